//# first: Device` is `DeviceThreadOnly`
//# lines: 36
use gpu_pool::{Device, GpuPool};
use std::sync::Mutex;

fn main() {
    let leaked: Mutex<Option<&Device>> = Mutex::new(None);
    let _ = GpuPool::scope(|dev, _| { //~ E0277: DeviceThreadOnly
        *leaked.lock().unwrap() = Some(dev);
        Ok(())
    });
}
