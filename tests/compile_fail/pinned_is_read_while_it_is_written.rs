use gpu_pool::{Device, PinnedBuffer, Result};

fn send(dev: &Device, x: &mut PinnedBuffer<f32>) -> Result<()> {
    let host = x.as_mut_slice()?;
    dev.upload_pinned(x)?; //~ E0502
    host.fill(1.0);
    Ok(())
}

fn receive(dev: &Device, x: &mut PinnedBuffer<f32>) -> Result<f32> {
    let y = dev.zeros::<f32>(4)?;
    let host = x.as_slice()?;
    dev.download_pinned(&y, x)?; //~ E0502
    Ok(host[0])
}

fn receive_beside_a_part(dev: &Device, x: &mut PinnedBuffer<f32>) -> Result<f32> {
    let y = dev.zeros::<f32>(4)?;
    let part = x.slice(1..3)?;
    dev.download_pinned(&y, x)?; //~ E0502
    Ok(part[0])
}

fn main() {
    let _ = (send, receive, receive_beside_a_part);
}
