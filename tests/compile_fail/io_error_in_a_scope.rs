//# first: `?` couldn't convert the error
//# lines: 20
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| {
        let text = std::fs::read("batch")?; //~ E0277: GpuPool::try_run
        dev.upload(&text)
    });
}
