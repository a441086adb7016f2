use super::*;
use crate::GpuPool;

/// cudarc gets a bare buffer until a graph names it.
#[test]
fn bare_buffers_of_graphs_are_refused() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let error = pool.run(|dev, _| {
        let (mut x, y) = (dev.zeros::<f32>(8)?, dev.zeros::<f32>(8)?);
        [&x, &y].into_iter().for_each(|free| refuse_graphs(&free.block));
        let (_graph, ()) = dev.capture(|dev| dev.fill(&mut x, 1.0))?;
        refuse_graphs(&y.block);
        refuse_graphs(&x.block);
        Ok(())
    });
    let Error::Panicked { message, .. } = error.unwrap_err() else { panic!("refused by a panic") };
    assert!(message.contains("a graph names this buffer"), "{message}");
}
