//! Buffers that a capture allocates: their zones are there before the graph has run, also if it never does, and no
//! launch mends them. A fill that is captured would blame whoever ends a capture early, and would hide what happens
//! between two launches.

use super::rig::{audited, found, poke};
use crate::{
    on_both,
    support::{failure, slow_add},
};
use gpu_pool::{Error, Result};

on_both! {
    // Captures that come to nothing, graphs that are dropped unlaunched, graphs that are launched: of memory of both
    // sizes, on whatever stream, and of memory that was in use just before.
    1: fn what_a_capture_allocates_is_nobodys_fault(gpus) {
        let pool = audited(gpus, 1);
        for len in [7, 100_000] {
            pool.run(|dev, _| {
                let side = dev.stream()?;
                for dev in [dev, &dev.on(&side)] {
                    for launches in 0..3 {
                        let mut busy = dev.zeros::<u32>(len)?;
                        slow_add(dev, &mut busy, 1, 1000)?;
                        drop(busy);
                        let ended = failure(dev.capture(|dev| {
                            dev.zeros::<u32>(len)?;
                            Err::<(), _>(Error::custom("on second thoughts"))
                        }));
                        assert!(matches!(ended, Error::Custom(_)), "{ended}");
                        let (graph, mut x) = dev.capture(|dev| {
                            drop(dev.zeros::<u32>(len)?);
                            let mut x = dev.zeros::<u32>(len)?;
                            slow_add(dev, &mut x, 3, 0)?;
                            Ok(x)
                        })?;
                        (0..launches).try_for_each(|_| dev.launch_graph(&graph))?;
                        dev.fill(&mut x, 5)?;
                        assert_eq!(dev.download(&x)?, vec![5; len]);
                    }
                }
                Ok(())
            })
            .unwrap();
        }
        pool.close().unwrap();
    }

    1: fn a_graph_that_writes_too_far_is_found(gpus) {
        let pool = audited(gpus, 1);
        let result = pool.run(|dev, _| {
            let (graph, x) = dev.capture(|dev| {
                let mut x = dev.zeros::<u8>(1000)?;
                poke(dev, &mut x, 1003, 7)?;
                Ok(x)
            })?;
            drop(x);
            dev.launch_graph(&graph)
        });
        let report = found(result);
        assert_eq!((report.bytes.clone(), report.allocation.as_ref().unwrap().bytes), (1003..1004, 1000), "{report}");
    }

    // The graph that has allocated the buffer is launched once more after the mistake.
    1: fn a_launch_mends_nothing(gpus) {
        let pool = audited(gpus, 1);
        let result = pool.run(|dev, _| -> Result<()> {
            let (graph, mut x) = dev.capture(|dev| dev.zeros::<u8>(1000))?;
            dev.launch_graph(&graph)?;
            poke(dev, &mut x, 1000, 7)?;
            dev.launch_graph(&graph)
        });
        assert_eq!(found(result).bytes, 1000..1001);
    }
}
