use gpu_pool::{DeviceBuffer, GpuPool};

fn write(pool: &GpuPool, mut x: DeviceBuffer<f32>) {
    let _ = pool.run(|dev, _| dev.fill(&mut x, 1.0)); //~ E0596
}

fn main() {
    let _ = write;
}
