//! What cannot be captured is refused without harm, and so is a capture that fails.

use crate::{
    on_both,
    rig::{all_work, works},
    support::{self, failure, slow_add},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Graph, Result};
use gpu_pool_lab::FaultPlan;
use gpu_pool_lab::prelude::*;
use parking_lot::Mutex;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

on_both! {
    // Each is named, the capture is discarded, and all is well again.
    1: fn what_cannot_be_captured_is_refused(gpus) {
        type Try = fn(&Device, &GpuPool, &mut Kept) -> Result<()>;
        struct Kept {
            x: DeviceBuffer<u32>,
            event: gpu_pool::Event,
            stream: gpu_pool::Stream,
            graph: Graph,
        }
        let tries: [(&str, Try); 15] = [
            ("upload", |dev, _, _| dev.upload(&[1u32; 10]).map(drop)),
            ("upload_into", |dev, _, kept| dev.upload_into(&[1; 100], &mut kept.x)),
            ("download", |dev, _, kept| dev.download(&kept.x).map(drop)),
            ("upload_pinned", |dev, pool, _| dev.upload_pinned(&pool.pinned::<u8>(10)?).map(drop)),
            ("download_pinned", |dev, pool, kept| dev.download_pinned(&kept.x, &mut pool.pinned(100)?)),
            ("synchronize", |dev, _, _| dev.synchronize()),
            ("barrier", |dev, _, _| dev.barrier()),
            ("exchange", |dev, _, _| dev.exchange(1).map(drop)),
            ("record", |dev, _, _| dev.record().map(drop)),
            ("record_timed", |dev, _, _| dev.record_timed().map(drop)),
            ("wait", |dev, _, kept| dev.wait(&kept.event)),
            ("stream", |dev, _, _| dev.stream().map(drop)),
            ("fill", |dev, _, kept| dev.on(&kept.stream).fill(&mut kept.x, 1)),
            ("capture", |dev, _, _| dev.capture(|_| Ok(())).map(drop)),
            ("launch_graph", |dev, _, kept| dev.launch_graph(&kept.graph)),
        ];
        let pool = gpus.pool(1);
        let pool = &pool;
        pool.run(|dev, _| {
            let mut x = dev.upload(&[3u32; 100])?;
            let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, 0))?;
            let mut kept = Kept { x, event: dev.record()?, stream: dev.stream()?, graph };
            for (name, attempt) in tries {
                let refused = dev.capture(|dev| {
                    let mut own = dev.zeros::<u32>(100)?;
                    attempt(dev, pool, &mut kept)?;
                    slow_add(dev, &mut own, 1, 0)
                });
                let error = failure(refused);
                assert!(matches!(&error, Error::InvalidArgument { op, .. } if *op == name), "{name}: {error}");
                // Also if the closure makes nothing of it: such a graph would lack something.
                let refused = dev.capture(|dev| {
                    let _ = attempt(dev, pool, &mut kept);
                    Ok(())
                });
                let error = failure(refused);
                assert!(matches!(&error, Error::InvalidArgument { op, .. } if *op == name), "{name}: {error}");
                works(dev);
            }
            assert_eq!(dev.download(&kept.x)?, [3; 100]);
            dev.launch_graph(&kept.graph)?;
            assert_eq!(dev.download(&kept.x)?, [4; 100]);
            Ok(())
        })
        .unwrap();
    }

    1: fn errors_and_panics_end_a_capture(gpus) {
        gpus.run(1, |dev| {
            let before = dev.stats().in_use;
            let mut x = dev.upload(&[3u32; 100])?;
            for _ in 0..3 {
                let error = failure(dev.capture(|dev| {
                    slow_add(dev, &mut x, 1, 0)?;
                    let kept = dev.zeros::<u8>(1 << 20)?;
                    drop(kept);
                    Err::<(), _>(Error::custom("no"))
                }));
                assert!(matches!(&error, Error::Custom(why) if why.to_string() == "no"), "{error}");
                works(dev);
                let panicked = catch_unwind(AssertUnwindSafe(|| {
                    dev.capture(|dev| {
                        slow_add(dev, &mut x, 1, 0)?;
                        std::panic::resume_unwind(Box::new("in the closure"));
                        #[allow(unreachable_code)]
                        Ok(())
                    })
                }));
                assert_eq!(*panicked.unwrap_err().downcast::<&str>().unwrap(), "in the closure");
                works(dev);
            }
            assert_eq!(dev.download(&x)?, [3; 100]);
            drop(x);
            assert_eq!(dev.stats().in_use, before);
            Ok(())
        });
    }

    2: fn a_gang_that_fails_ends_captures(gpus) {
        let pool = gpus.pool(2);
        let failed = pool.run(|dev, _| {
            if dev.rank() == 1 {
                return Err(Error::custom("the peer fails"));
            }
            support::until("the gang has failed", || dev.check().is_err())?;
            let aborted = failure(dev.capture(|_| Ok(())));
            assert!(matches!(aborted, Error::Aborted { by: 1, .. }), "{aborted}");
            Ok(())
        });
        assert!(matches!(failure(failed), Error::Custom(_)));
        let failed = pool.run(|dev, _| {
            if dev.rank() == 1 {
                dev.barrier()?;
                return Err(Error::custom("the peer fails"));
            }
            let mut x = dev.zeros::<u32>(10)?;
            dev.barrier()?;
            let aborted = failure(dev.capture(|dev| {
                let _ = support::until("the gang has failed", || dev.check().is_err());
                let _ = slow_add(dev, &mut x, 1, 0);
                Ok(())
            }));
            assert!(matches!(aborted, Error::Aborted { by: 1, .. }), "{aborted}");
            Ok(())
        });
        assert!(matches!(failure(failed), Error::Custom(_)));
        all_work(&pool);
    }

    2: fn foreign_memory_is_refused(gpus) {
        let (pool, other) = (gpus.pool(2), gpus.pool(1));
        let theirs = Mutex::new(pool.run(|dev, _| dev.zeros::<u32>(10)).unwrap());
        let foreign = Mutex::new(other.run(|dev, _| dev.zeros::<u32>(10)).unwrap().remove(0));
        pool.on(&[0]).run(|dev, _| {
            let mut theirs = theirs.lock();
            let error = failure(dev.capture(|dev| slow_add(dev, &mut theirs[1], 1, 0)));
            assert!(matches!(error, Error::WrongDevice { op: "launch", buffer: 1, device: 0, .. }), "{error}");
            let error = failure(dev.capture(|dev| slow_add(dev, &mut *foreign.lock(), 1, 0)));
            assert!(matches!(error, Error::WrongPool { op: "launch", device: 0, .. }), "{error}");
            works(dev);
            Ok(())
        })
        .unwrap();
        drop((theirs, foreign));
    }

    2: fn a_staged_copy_is_refused(gpus) {
        let pool = gpus.staged(2);
        pool.run(|dev, _| {
            let theirs = dev.exchange(Arc::new(dev.zeros::<u32>(10)?))?.swap_remove(1 - dev.rank());
            let mut here = dev.zeros::<u32>(10)?;
            let error = failure(dev.capture(|dev| dev.copy(&theirs.peer(), &mut here)));
            assert!(matches!(error, Error::InvalidArgument { op: "copy", .. }), "{error}");
            works(dev);
            dev.barrier()
        })
        .unwrap();
    }

    // The host may look at it when the graph is launched: no borrow would keep it from that.
    1: fn memory_of_the_host_is_refused(gpus) {
        let pool = gpus.pool(1);
        let mut table = pool.unified::<u32>(10).unwrap();
        table.as_mut_slice().unwrap().fill(7);
        pool.with(table.rows_mut(1)).run(|dev, _, mut rows| {
            let error = failure(dev.capture(|dev| dev.fill(&mut rows, 1)));
            assert!(matches!(error, Error::InvalidArgument { op: "fill", .. }), "{error}");
            let mut here = dev.zeros::<u32>(10)?;
            let error = failure(dev.capture(|dev| dev.copy(&rows, &mut here)));
            assert!(matches!(error, Error::InvalidArgument { op: "copy", .. }), "{error}");
            works(dev);
            Ok(())
        })
        .unwrap();
        assert_eq!(table.as_slice().unwrap(), [7; 10]);
    }

    // The driver's calls can fail, too.
    1: fn calls_that_fail_are_named(gpus) {
        for (op, name) in [
            ("capture-begin", "capture"),
            ("capture-end", "capture"),
            ("graph-launch", "launch_graph"),
            ("fill", "fill"),
        ] {
            let plan: FaultPlan = format!("0:{op}:1:error").parse().unwrap();
            let plan = plan.paused();
            let pool = gpus.builder(1).faults(plan.clone()).build().unwrap();
            pool.run(|dev, _| {
                let mut x = dev.upload(&[1u32; 10])?;
                let mut attempt = || {
                    let (graph, ()) = dev.capture(|dev| {
                        // A graph that lacks an operation is none, whatever is made of the error.
                        let _ = dev.fill(&mut x, 5);
                        Ok(())
                    })?;
                    dev.launch_graph(&graph)
                };
                plan.resume();
                let error = failure(attempt());
                assert!(matches!(&error, Error::Driver { op, device: 0, .. } if *op == name), "{op}: {error}");
                plan.pause();
                attempt()?;
                assert_eq!(dev.download(&x)?, [5; 10]);
                works(dev);
                Ok(())
            })
            .unwrap();
            assert_eq!(plan.fired().len(), 1);
        }
    }
}
