use gpu_pool::{GpuPool, Result};

fn borrowed(pool: &GpuPool) -> Result<()> {
    pool.run(|dev, _| Ok(dev.name()))?; //~ : lifetime may not live long enough
    Ok(())
}

fn copied(pool: &GpuPool) -> Result<Vec<String>> {
    pool.run(|dev, _| Ok(dev.name().to_owned()))
}

fn main() {
    let _ = (borrowed, copied);
}
