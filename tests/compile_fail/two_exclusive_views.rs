use gpu_pool::DeviceBuffer;

fn views(mut x: DeviceBuffer<f32>) {
    let a = x.slice_mut(0..10);
    let b = x.slice_mut(5..15); //~ E0499
    drop((a, b));
}

fn main() {
    let _ = views;
}
