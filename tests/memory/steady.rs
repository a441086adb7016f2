//! The steady state: no driver call, no growth. (DALI `SingleStreamRandom`, cubecl `measured_plan_cycle`, RMM
//! `async_priming`, cudf#23464, burn#4792: memory that grows with every epoch.)

use crate::{
    on_both,
    rig::{Gate, KIB, MIB, Rng, assert_at_rest, bytes_of, check_books, on_devices, on_pools},
    support::Gpus,
};
use gpu_pool::{Device, DeviceBuffer, Error, memory::BackingChoice};
use std::sync::Arc;

/// When the work of a step's two streams is over, as seen by the host that allocates.
#[derive(Clone, Copy)]
enum Timing {
    /// As it comes: what one stream has freed may or may not be there for the other.
    Any,
    /// Never before the step's last allocation, so that each stream finds only what it has freed itself: the most that
    /// a step can need.
    Worst(Gpus),
}

/// One training step: activations that live for long and for short, from several streams, exchanged with a peer.
fn step(dev: &Device, seed: u64, timing: Timing) -> Result<(), Error> {
    let mut rng = Rng(seed);
    let side = dev.stream()?;
    let gate = match timing {
        Timing::Any => None,
        Timing::Worst(gpus) => Some(Gate::new(gpus)),
    };
    let _held = gate
        .as_ref()
        .map(|gate| Ok::<_, Error>((gate.hold_stream(dev)?, gate.hold_stream(&dev.on(&side))?)))
        .transpose()?;
    let mut live: Vec<DeviceBuffer<u8>> = Vec::new();
    for i in 0..60 {
        let on = dev.on(&side);
        let dev = if i % 5 == 0 { &*on } else { dev };
        live.push(dev.zeros(rng.size(20))?);
        if live.len() > 30 {
            live.swap_remove(rng.below(live.len()));
        }
    }
    drop(gate);
    let all = dev.exchange(Arc::new(dev.upload(&vec![7u32; 100 * KIB])?))?;
    let copy = all[(dev.rank() + 1) % dev.count()].copy_to(dev)?;
    drop(all);
    assert_eq!(dev.download(&copy.slice(..5))?, [7; 5]);
    Ok(())
}

on_both! {
    // The issue: zero driver calls after warm-up. Frees by peers, several streams, all sizes.
    2: fn steady_state_makes_zero_driver_calls(gpus) {
        on_pools(gpus, 2, |pool, _| {
            let steps = |seeds: std::ops::Range<u64>, timing| {
                for seed in seeds {
                    // Eight different steps, over and over.
                    pool.run(|dev, _| step(dev, seed % 8, timing)).unwrap();
                }
                pool.run(|dev, _| Ok(dev.stats())).unwrap()
            };
            // A step that is lucky in its warm-up may need more later, if it never was unlucky before.
            steps(0..16, Timing::Worst(gpus));
            let before = steps(0..160, Timing::Any);
            let after = steps(0..80, Timing::Any);
            for (before, after) in before.iter().zip(&after) {
                assert_eq!(before.driver_calls, after.driver_calls, "{before}\n{after}");
                assert_eq!(before.reserved, after.reserved, "{before}\n{after}");
                assert!(after.allocations >= before.allocations + 80 * 60);
                assert!(after.remote_frees > before.remote_frees);
            }
            assert_at_rest(pool);
        });
    }

    // https://github.com/tracel-ai/burn/issues/4792 (open): memory grows with every epoch until there is none.
    1: fn epochs_do_not_add_up(gpus) {
        on_pools(gpus, 1, |pool, backing| {
            let mut reserved = Vec::new();
            for epoch in 0..12 {
                pool.run(|dev, _| {
                    // Batches of random sizes, other ones in every epoch.
                    let mut rng = Rng(epoch);
                    for _ in 0..60 {
                        let batch = bytes_of(dev, MIB / 4 + rng.below(4 * MIB))?;
                        let hidden = (0..6)
                            .map(|_| bytes_of(dev, batch.len() / 4 + rng.below(100 * KIB)))
                            .collect::<Result<Vec<_>, _>>()?;
                        drop((batch, hidden));
                    }
                    check_books(dev);
                    reserved_of(dev)
                })
                .map(|all| reserved.push(all[0]))
                .unwrap();
            }
            let (early, last) = (reserved[5], reserved[11]);
            // Single allocations do not fit together as a window does; but they do not add up either.
            let fits = if backing == BackingChoice::Vmm { last == early } else { last <= early * 5 / 4 };
            assert!(fits, "{backing:?}: {reserved:?}");
        });
    }

    // RMM: async_priming. What was taken once is there the second time.
    1: fn the_second_round_is_primed(gpus) {
        on_devices(gpus, 1, |dev| {
                let round = || {
                    let all = (0..100).map(|_| bytes_of(dev, 900 * KIB)).collect::<Result<Vec<_>, _>>()?;
                    drop(all);
                    Ok::<_, Error>(dev.stats())
                };
                let first = round()?;
                for _ in 0..3 {
                    let next = round()?;
                    assert_eq!((next.driver_calls, next.ladder), (first.driver_calls, first.ladder), "{next}");
                }
                Ok(())
        });
    }

    // A loop that allocates what it has just freed finds it without a climb: what `MemoryStats::ladder` promises.
    1: fn a_loop_does_not_climb(gpus) {
        on_devices(gpus, 1, |dev| {
                let round = || {
                    [8, 4 * KIB, 100 * KIB, MIB, 3 * MIB].iter().try_for_each(|&bytes| bytes_of(dev, bytes).map(drop))
                };
                for _ in 0..3 {
                    round()?;
                }
                let before = dev.stats();
                for _ in 0..50 {
                    round()?;
                }
                let after = dev.stats();
                assert_eq!(
                    (before.ladder, before.driver_calls),
                    (after.ladder, after.driver_calls),
                    "{before}\n{after}"
                );
                Ok(())
        });
    }
}

fn reserved_of(dev: &Device) -> Result<u64, Error> {
    Ok(dev.stats().reserved)
}
