use gpu_pool::{GpuPool, Result, memory::UnifiedBuffer};

fn look(pool: &GpuPool, table: &mut UnifiedBuffer<f32>) -> Result<()> {
    let seen = table.as_slice()?;
    pool.with(table.rows_mut(4)).run(|dev, _, mut rows| dev.scale(&mut rows, 2.0))?; //~ E0502
    println!("{}", seen[0]);
    Ok(())
}

fn main() {
    let _ = look;
}
