use gpu_pool::{GpuPool, Result};

fn keep(pool: &GpuPool) -> Result<Vec<&'static mut [f32]>> {
    let mut y = vec![0.0f32; 8];
    pool.run_mut(&mut y, 1, |_, _, rows| Ok(rows)) //~
}

fn main() {
    let _ = keep;
}
