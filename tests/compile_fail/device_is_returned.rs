use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| Ok(dev)); //~ E0277: cannot be shared between threads
}
