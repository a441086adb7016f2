//# first: `GradientExchange
//# lines: 20
use gpu_pool::{GpuPool, gradients::GradientExchange};

fn main() {
    let _ = GpuPool::scope(|dev, _| GradientExchange::builder().build(dev, &[4])); //~ E0277: NotDeviceThreadOnly
}
