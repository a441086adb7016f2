//# first: `Module::cuda` needs the feature `nvrtc`
//# lines: 20
use gpu_pool::Module;

static MODULE: Module = Module::cuda("extern \"C\" __global__ void clear() {}"); //~ E0277: features = ["nvrtc"]

fn main() {
    let _ = &MODULE;
}
