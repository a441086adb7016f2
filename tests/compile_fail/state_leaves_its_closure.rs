use gpu_pool::{GpuPool, PerDevice};

fn leak(pool: &GpuPool, state: &PerDevice<Vec<u32>>) {
    let _ = pool.run(|dev, _| state.borrow(dev)); //~ E0277: cannot be sent between threads
}

fn main() {
    let _ = leak;
}
