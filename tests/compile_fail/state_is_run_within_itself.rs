use gpu_pool::{PerDevice, Result};

fn nested(state: &mut PerDevice<u32>) -> Result<()> {
    state.run(|dev, _, x| { //~ E0502
        *x += *state.borrow(dev)?;
        Ok(())
    })?;
    Ok(())
}

fn main() {
    let _ = nested;
}
