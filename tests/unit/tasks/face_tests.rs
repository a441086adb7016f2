use crate::GpuPool;

/// Values that were dropped leave nothing, however many there are.
#[test]
fn the_variables_of_dropped_values_are_forgotten() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.tasks(|t| {
        let kept = t.cpu().run((), |()| Ok(1));
        for _ in 0..100 {
            for _ in 0..20 {
                let _ = t.gpu(0).run((&kept,), |_, (x,)| Ok(*x));
            }
            t.wait()?;
            let vars = t.engine.lock().graph.vars();
            assert!(vars < 200, "{vars}");
        }
        assert_eq!(t.get(&kept)?, 1);
        Ok(())
    })
    .unwrap();
}
