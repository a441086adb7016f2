use gpu_pool::{Kernel, LaunchDims, Module};

static MODULE: Module = Module::ptx("");

fn twin(_: LaunchDims, x: &mut [f64]) {
    x.fill(0.0);
}

static CLEAR: Kernel<(&mut [f32],)> = Kernel::new(&MODULE, "clear", twin); //~ E0271

fn main() {
    println!("{}", CLEAR.name());
}
