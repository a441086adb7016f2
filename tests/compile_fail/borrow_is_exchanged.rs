use gpu_pool::{Device, Result};

fn lend(dev: &Device) -> Result<usize> {
    let local = dev.rank();
    let all = dev.exchange(&local)?; //~ E0597
    Ok(*all[0])
}

fn main() {
    let _ = lend;
}
