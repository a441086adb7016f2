use gpu_pool::{GpuPool, PerDevice};

fn leak_inside(pool: &GpuPool, state: &PerDevice<Vec<u32>>) {
    let _ = pool.run(|dev, _| Ok(&*state.borrow(dev)?)); //~ E0515
}

fn main() {
    let _ = leak_inside;
}
