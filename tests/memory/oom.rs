//! Out of memory: what it says, who is asked, what it costs; and that the next request that fits is served. (PyTorch
//! `test_out_of_memory(_retry)`, `test_raises_oom`, `test_notifies_oom`; RMM `failure_callback_resource_adaptor`; UMF
//! `outOfMem`; mimalloc `malloc-nomem`; CUDA.jl `retry_reclaim`.)

use crate::{
    on_both,
    rig::{
        Gate, KIB, MIB, Rng, assert_at_rest, assert_empty, bytes_of, check_books, limited, on_backings, on_limited,
        on_limited_pools, refused,
    },
    support::{all_are, failure},
};
use gpu_pool::{
    Device, DeviceBuffer, Error,
    memory::{BackingChoice, OutOfMemoryReport},
};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::{panic::Location, sync::Arc, time::Duration};

on_both! {
    // The list: requested, free, largest, per-stream pending, who holds what by call site.
    1: fn the_report_says_what_there_was(gpus) {
        on_backings(|backing| {
            let pool = limited(gpus, 1, backing, 32 * MIB)
                .memory_reserve(32 * MIB as u64)
                .record_memory(true)
                .build()
                .unwrap();
            pool.run(|dev, _| {
                let line = Location::caller().line();
                let many = (0..3).map(|_| bytes_of(dev, 4 * MIB)).collect::<Result<Vec<_>, _>>()?; // line + 1
                let one = dev.upload(&vec![0u8; 3 * MIB])?; // line + 2
                let between = bytes_of(dev, 7 * MIB)?;
                let last = dev.zeros::<u8>(200)?; // line + 4
                dev.synchronize()?;
                drop(between);
                let report = refused(dev.zeros::<u8>(20 * MIB)); // line + 7
                let OutOfMemoryReport { device: 0, op: "zeros", recorded: true, ref site, ref holders, .. } = *report
                else {
                    panic!("{report}");
                };
                let site = site.as_ref().unwrap();
                assert!(site.op == "zeros" && site.file.ends_with("oom.rs") && site.line == line + 7, "{site}");
                assert_eq!((report.requested, report.limit), (20 * MIB as u64, Some(32 * MIB as u64)));
                assert_eq!(report.in_use, 15 * MIB as u64 + 256);
                assert!(
                    report.reserved <= 32 * MIB as u64 && report.in_use + report.free_in_pool <= report.reserved,
                    "{report}"
                );
                assert!(
                    report.largest_free <= report.free_in_pool && report.largest_free < 20 * MIB as u64,
                    "{report}"
                );
                assert!(report.pending.is_empty(), "{report}");
                assert!(report.driver_total >= report.driver_free && report.driver_total > 0, "{report}");
                // Most first, by call site.
                let held: Vec<_> =
                    holders.iter().map(|h| (h.site.as_ref().unwrap().line - line, h.blocks, h.bytes)).collect();
                assert_eq!(held, [(1, 3, 12 * MIB as u64), (2, 1, 3 * MIB as u64), (4, 1, 256)], "{report}");
                assert_eq!(holders[0].site.as_ref().unwrap().op, "uninit");
                assert!(!report.rungs.is_empty());
                // In words: each of these facts, and a hint.
                let text = report.to_string();
                for part in
                    ["20.0 MiB by zeros", "oom.rs:", "15.0 MiB in live buffers", "32.0 MiB for this pool", "hint: "]
                {
                    assert!(text.contains(part), "no {part:?} in: {text}");
                }
                let error = failure(dev.zeros::<u8>(20 * MIB)).to_string();
                assert!(error.contains("20.0 MiB") || error.contains("20971520"), "{error}");
                drop((many, one, last));
                Ok(())
            })
            .unwrap();
            assert_at_rest(&pool);
        });
    }

    // What is freed and still used is told apart, by stream: a stream that never gets on is the likeliest reason.
    1: fn the_report_names_streams_that_keep_memory(gpus) {
        if gpus.is_cuda() {
            return; // Nothing can hold a GPU for longer than the deadline and then let go of it.
        }
        on_backings(|backing| {
            let pool = &limited(gpus, 1, backing, 16 * MIB).timeout(Duration::from_secs(2)).build().unwrap();
            pool.run(|dev, _| {
                let gate = Gate::new(gpus);
                let side = dev.stream()?;
                let side = dev.on(&side);
                let live = bytes_of(dev, 6 * MIB)?;
                let mut x = side.zeros::<u32>(2 * MIB)?;
                side.synchronize()?;
                gate.block(&side, &mut x)?;
                drop(x);
                // (10 MiB would do: what is pending and what is mapped beside it, used after a wait on the device.)
                let report = refused(bytes_of(dev, 11 * MIB));
                let [pending] = &report.pending[..] else { panic!("{report}") };
                assert_eq!((pending.device, pending.bytes), (0, 8 * MIB as u64), "{report}");
                assert!(report.free_in_pool >= pending.bytes, "{report}");
                assert!(report.to_string().contains("of it pending"), "{report}");
                drop(live);
                gate.open();
                side.synchronize()?;
                // Nothing was lost by it.
                bytes_of(dev, 16 * MIB).map(drop)
            })
            .unwrap();
            assert_at_rest(pool);
        });
    }

    1: fn without_recording_the_report_says_how_to_get_one(gpus) {
        let pool = limited(gpus, 1, BackingChoice::Auto, 8 * MIB).record_memory(false).build().unwrap();
        pool.run(|dev, _| {
            let _live = bytes_of(dev, 6 * MIB)?;
            let report = refused(bytes_of(dev, 6 * MIB));
            assert!(!report.recorded && report.holders.is_empty(), "{report}");
            assert!(report.to_string().contains("record_memory"), "{report}");
            Ok(())
        })
        .unwrap();
    }

    // UMF: outOfMem; PyTorch: test_out_of_memory: "the state is as it was, and the next that fits succeeds".
    1: fn a_refused_request_costs_nothing(gpus) {
        on_limited(gpus, 16 * MIB, |dev| {
            let mut rng = Rng(9);
            let mut live: Vec<(DeviceBuffer<u32>, u32)> = Vec::new();
            for round in 0..150u32 {
                let bytes = rng.size(22).max(4);
                let before = dev.stats();
                let made = if rng.chance(3) { bytes_of(dev, 17 * MIB + bytes).map(|_| None) } else {
                    // SAFETY: written next.
                    unsafe { dev.uninit::<u32>(bytes / 4) }.map(Some)
                };
                match made {
                    Ok(Some(mut x)) => {
                        dev.fill(&mut x, round)?;
                        live.push((x, round));
                    }
                    Ok(None) => panic!("17 MiB of 16"),
                    Err(Error::OutOfMemory { .. }) => {
                        let after = dev.stats();
                        assert_eq!((after.in_use, after.requested, after.allocations),
                            (before.in_use, before.requested, before.allocations), "{before}\n{after}");
                        check_books(dev);
                        // One that certainly fits, since so much was freed for it.
                        if let Some((x, number)) = live.pop() {
                            assert!(all_are(&dev.download(&x)?, number));
                            let bytes = 4 * x.len();
                            drop(x);
                            bytes_of(dev, bytes)?;
                        }
                    }
                    Err(other) => return Err(other),
                }
            }
            for (x, number) in live {
                assert!(all_are(&dev.download(&x)?, number), "block {number} was written to");
            }
            Ok(())
        });
    }

    // One device is full; the others do not notice. PyTorch: test_raises_oom per device; MultidevicePool.
    2: fn other_devices_are_unaffected(gpus) {
        let n = gpus.up_to(3);
        on_limited_pools(gpus, n, 16 * MIB, |pool, _| {
            pool.run(|dev, _| {
                if dev.rank() == 1 {
                    let whole = bytes_of(dev, 15 * MIB)?;
                    dev.barrier()?;
                    for _ in 0..20 {
                        let report = refused(bytes_of(dev, 4 * MIB));
                        assert_eq!(report.device, 1);
                    }
                    drop(whole);
                    return dev.barrier();
                }
                dev.barrier()?;
                for i in 0..20u8 {
                    let x = dev.upload(&vec![i; 14 * MIB])?;
                    assert_eq!(dev.download(&x.slice(14 * MIB - 1..))?, [i]);
                }
                dev.barrier()
            })
            .unwrap();
            assert_at_rest(pool);
        });
    }

    // PyTorch: test_out_of_memory_retry (two that fit one after the other, not together), on and on.
    1: fn one_after_the_other(gpus) {
        on_limited(gpus, 16 * MIB, |dev| {
            for i in 0..40u8 {
                let len = (9 + usize::from(i) % 7) * MIB + usize::from(i) * 1000;
                let x = dev.upload(&vec![i; len])?;
                refused(bytes_of(dev, 16 * MIB - len + 2 * MIB));
                assert!(all_are(&dev.download(&x.slice(len - 10..))?, i));
            }
            Ok(())
        });
    }

    // The driver has no more, although the limit would allow it; and it has, when it is asked for less, or later.
    1: fn a_driver_that_has_no_more(gpus) {
        on_backings(|backing| {
            let op = if backing == BackingChoice::Vmm { FaultOp::VmMap } else { FaultOp::Alloc };
            let plan = FaultPlan::new().on(FaultRule::new(Injected::OutOfMemory).op(op).device(0)).paused();
            let pool = limited(gpus, 1, backing, 64 * MIB).faults(plan.clone()).build().unwrap();
            pool.run(|dev, _| {
                let live = dev.upload(&vec![3u8; 5 * MIB])?;
                let spare = bytes_of(dev, 9 * MIB)?;
                plan.resume();
                let report = refused(bytes_of(dev, 8 * MIB));
                assert!(!plan.fired().is_empty() && report.in_use >= 14 * MIB as u64, "{report}");
                check_books(dev);
                // What is freed serves the next one, and no driver is asked.
                drop(spare);
                let again = bytes_of(dev, 8 * MIB)?;
                plan.pause();
                let more = bytes_of(dev, 20 * MIB)?;
                check_books(dev);
                assert!(all_are(&dev.download(&live)?, 3));
                drop((again, more, live));
                Ok(())
            })
            .unwrap();
            assert_at_rest(&pool);
        });
    }

    // Not every failure is for want of memory. UMF: freeErrorPropagation; RMM: DifferentExceptionTypes,
    // UpstreamFailure. A driver that fails once is no reason to give up; one that goes on failing is the reason that is
    // given.
    1: fn other_failures_of_the_driver_are_what_they_are(gpus) {
        on_backings(|backing| {
            let op = if backing == BackingChoice::Vmm { FaultOp::VmMap } else { FaultOp::Alloc };
            let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(op)).paused();
            let asked = Arc::new(AtomicUsize::new(0));
            let counter = asked.clone();
            let pool = limited(gpus, 1, backing, 64 * MIB)
                .faults(plan.clone())
                .on_out_of_memory(move |_| { counter.fetch_add(1, Relaxed); false })
                .build()
                .unwrap();
            pool.run(|dev, _| {
                let held = dev.upload(&vec![7u8; MIB])?;
                plan.resume();
                let error = failure(bytes_of(dev, 20 * MIB));
                plan.pause();
                assert!(matches!(error, Error::Driver { code: 999, device: 0, .. }), "{error}");
                check_books(dev);
                let whole = bytes_of(dev, 20 * MIB)?;
                assert!(all_are(&dev.download(&held)?, 7));
                drop((whole, held));
                Ok(())
            })
            .unwrap();
            assert_eq!(asked.load(Relaxed), 0, "the callback is for want of memory");
            assert_at_rest(&pool);
        });
    }

    // A refusal leaves no gap in what peers may do: a scope goes on after it, and collectives work.
    2: fn a_scope_goes_on_after_a_refusal(gpus) {
        let pool = limited(gpus, 2, BackingChoice::Auto, 16 * MIB).build().unwrap();
        let sums = pool.run(|dev: &Device, _| {
            if dev.rank() == 0 {
                refused(bytes_of(dev, 100 * MIB));
            }
            let mut x = dev.upload(&[1.0f32; 1000])?;
            dev.all_reduce(&mut x, gpu_pool::ReduceOp::Sum)?;
            dev.download(&x.slice(..1))
        });
        assert_eq!(sums.unwrap(), [[2.0], [2.0]]);
        assert_at_rest(&pool);
    }
}

/// The steps of a small limit: everything that the limit holds can be had in pieces of every size, again and again.
#[test]
fn every_size_can_have_what_another_had() {
    on_backings(|backing| {
        let pool = crate::support::builder().host(1).memory_backing(backing).memory_limit(8 << 20).build().unwrap();
        pool.run(|dev, _| {
            for shift in (8..23).chain((8..23).rev()) {
                let bytes = 1usize << shift;
                let live =
                    (0..7 * MIB / bytes.max(KIB)).map(|_| bytes_of(dev, bytes)).collect::<Result<Vec<_>, _>>()?;
                drop(live);
            }
            assert_empty(dev)
        })
        .unwrap();
    });
}
