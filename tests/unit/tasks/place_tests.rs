use super::*;
use crate::GpuPool;

/// A peer may fail before the caller has told the engine of its gang.
#[test]
fn a_peer_fails_at_once() {
    let pool = GpuPool::builder().host(2).build().unwrap();
    let engine = Engine::new(&pool.shared, 1);
    let ran = rayon::in_place_scope(|scope| {
        pool.run(|dev, _| {
            dev.session.gang.poison(0, Error::custom("at once"));
            engine.serve(dev, scope)
        })
    });
    assert_eq!(ran.unwrap_err().to_string(), "at once");
    let ended = engine.lock().ended.clone();
    assert_eq!(ended.unwrap().error().to_string(), "at once");
}
