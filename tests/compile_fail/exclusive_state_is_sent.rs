//# first: is `DeviceThreadOnly`
//# lines: 30
use gpu_pool::{GpuPool, PerDevice};

fn leak(pool: &GpuPool, state: &PerDevice<Vec<u32>>) {
    let _ = pool.run(|dev, _| {
        let mut own = state.borrow_mut(dev)?;
        std::thread::scope(|s| {
            s.spawn(|| own.push(1)); //~ E0277: DeviceThreadOnly
        });
        Ok(())
    });
}

fn main() {
    let _ = leak;
}
