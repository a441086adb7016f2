//# first: Ref<'_, Vec<u32>>` cannot be returned
//# lines: 20
use gpu_pool::{GpuPool, PerDevice};

fn leak(pool: &GpuPool, state: &PerDevice<Vec<u32>>) {
    let _ = pool.run(|dev, _| state.borrow(dev)); //~ E0277: NotDeviceThreadOnly
}

fn main() {
    let _ = leak;
}
