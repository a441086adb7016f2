use gpu_pool::{GpuPool, Result, memory::UnifiedBuffer};

fn on_the_devices(pool: &GpuPool, table: &UnifiedBuffer<f32>) -> Result<()> {
    pool.with(table.rows(4)).run(|dev, _, mut rows| dev.scale(&mut rows, 2.0))?; //~ E0277
    Ok(())
}

fn on_the_host(pool: &GpuPool, table: &mut UnifiedBuffer<f32>) -> Result<()> {
    let rows = table.rows(4);
    table.as_mut_slice()?.fill(1.0); //~ E0502
    pool.with(rows).run(|dev, _, rows| dev.sum(&rows).map(drop))?;
    Ok(())
}

fn main() {
    let _ = (on_the_devices, on_the_host);
}
