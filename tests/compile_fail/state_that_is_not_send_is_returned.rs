use gpu_pool::{GpuPool, PerDevice};
use std::rc::Rc;

fn leak(pool: &GpuPool, state: &PerDevice<Rc<u32>>) {
    let _ = pool.run(|dev, _| Ok(state.borrow(dev)?.clone())); //~ E0277: cannot be returned
}

fn main() {
    let _ = leak;
}
