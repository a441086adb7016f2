use gpu_pool::{Device, Result};

fn work(dev: &Device) -> Result<()> {
    let stream = dev.stream()?;
    let on = dev.on(&stream);
    drop(stream); //~ E0505
    on.synchronize()
}

fn main() {
    let _ = work;
}
