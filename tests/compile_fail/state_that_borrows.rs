use gpu_pool::{GpuPool, Result};

fn main() -> Result<()> {
    let pool = GpuPool::builder().host(1).build()?;
    let local = vec![1, 2, 3];
    let state = pool.per_device(|_, _| Ok(&local))?; //~ E0597
    std::mem::forget(state);
    Ok(())
}
