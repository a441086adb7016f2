//! Members that are late, that fail, or that never come, and what others do meanwhile. Nothing here hangs; elsewhere,
//! each of these does (`README.md` has the threads).

use crate::{
    cases::{Case, Kind, Prepared, kinds},
    numbers::Rng,
    on_both, rig,
    rig::{WAYS, assert_works, check_with_late_members, mismatch, one_of_each, sum_works},
    support::{self, Gpus, again, all_are, failure, printed, slow_add, until},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{Check, prelude::*};
use parking_lot::Mutex;
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::*},
    thread,
    time::Duration,
};

on_both! {
    // jax#38503: one device that is late is enough for a hang. Late on the host, and late on the device.
    2: fn a_member_that_is_a_second_late(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let cases = one_of_each(31, n);
        for late in [0, n - 1] {
            pool.run(|dev, _| {
                let mut busy = dev.zeros::<u32>(1)?;
                if dev.rank() == late {
                    thread::sleep(Duration::from_secs(1));
                    slow_add(dev, &mut busy, 1, 300_000)?;
                }
                cases.iter().try_for_each(|case| case.check(dev))
            })
            .unwrap();
        }
    }

    // Each kind behind one late member at a time: nobody reads what is not there yet.
    2: fn everybody_is_late_in_turn(gpus) {
        let n = gpus.up_to(3);
        for way in WAYS {
            check_with_late_members(&way.pool(gpus, n), &one_of_each(32, n), Duration::ZERO);
        }
    }

    // nccl#279, #829, pytorch#113281: peers of one that fails hang until a watchdog comes, or for ever.
    2: fn a_member_fails_before_between_and_after_collectives(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        for way in ["panics", "returns an error"] {
            for after in [0, 1, 7] {
                let fails = after % n;
                let told = Mutex::new(Vec::new());
                let error = failure(pool.run(|dev, _| {
                    let rounds = || {
                        let mut x = dev.upload(&vec![1.0f32; 10_000])?;
                        for k in 0..20 {
                            if k == after && dev.rank() == fails {
                                assert!(way != "panics", "goes wrong after {after}");
                                return Err(Error::custom(format!("goes wrong after {after}")));
                            }
                            dev.all_reduce(&mut x, ReduceOp::Avg)?;
                        }
                        dev.synchronize()
                    };
                    rounds().inspect_err(|error| told.lock().push((dev.rank(), error.clone())))
                }));
                let told = told.into_inner();
                let aborted = |error: &Error| matches!(error, Error::Aborted { by, .. } if *by == fails);
                assert_eq!(
                    told.iter().filter(|(rank, error)| *rank != fails && aborted(error)).count(),
                    n - 1,
                    "{told:?}"
                );
                match &error {
                    Error::Panicked { device, message, .. } => {
                        assert!(*device == fails && message.contains("goes wrong"), "{error}")
                    }
                    _ => assert_eq!(error.to_string(), format!("goes wrong after {after}")),
                }
                assert_works(&pool);
            }
        }
    }

    // While others are in every kind of collective.
    2: fn a_member_fails_while_others_wait_in_any_collective(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let cases = one_of_each(33, n);
        for case in &cases {
            let waiting = AtomicUsize::new(0);
            let error = failure(pool.run(|dev, _| {
                if dev.rank() == 1 {
                    until("the others wait", || waiting.load(SeqCst) == n - 1)?;
                    panic!("mid-operation");
                }
                waiting.fetch_add(1, SeqCst);
                // Where nobody needs the one that fails, such as a send, it may well succeed.
                case.check(dev)?;
                until("the other has failed", || dev.check().is_err())
            }));
            assert!(matches!(error, Error::Panicked { device: 1, .. }), "{:?}: {error}", case.case);
            assert_works(&pool);
        }
    }

    // nccl#744, pytorch#50925: memory is mapped, unmapped and trimmed by one while the others wait for it.
    2: fn allocation_while_others_wait(gpus) {
        let n = gpus.up_to(4);
        rig::run(gpus, n, |dev| {
            for round in 0..n {
                if dev.rank() == round {
                    for k in 1..6usize {
                        let large = dev.zeros::<u8>(k << 22)?;
                        let pinned = dev.pinned::<u8>(k << 16)?;
                        drop((large, pinned));
                        dev.trim()?;
                    }
                }
                sum_works(dev)?;
            }
            Ok(())
        });
    }

    // torchcomms#2334, nccl#1646: loading modules and making streams while collectives run; here, whole pools with
    // another module.
    2: fn modules_are_loaded_while_collectives_run(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let stop = AtomicBool::new(false);
        thread::scope(|s| {
            let user = s.spawn(|| {
                let mut rounds = 0;
                while !stop.load(SeqCst) {
                    pool.run(|dev, _| {
                        for _ in 0..10 {
                            sum_works(dev)?;
                        }
                        Ok(())
                    })
                    .unwrap();
                    rounds += 1;
                }
                rounds
            });
            for _ in 0..4 {
                let other = rig::pool(gpus, n);
                let added = other.run(|dev, _| {
                    let mut x = dev.zeros::<u32>(5)?;
                    slow_add(dev, &mut x, 3, 10)?;
                    sum_works(dev)?;
                    dev.download(&x)
                });
                assert_eq!(added.unwrap(), vec![[3; 5]; n]);
            }
            stop.store(true, SeqCst);
            assert!(user.join().unwrap() > 0);
        });
    }

    // sglang#1693: work goes on with incomplete data, or the whole process ends. Here what a collective leaves that was
    // given up half way is not taken for its result, by anybody who looks before the scope ends.
    2: fn what_a_member_gets_is_right_though_another_fails(gpus) {
        let lens: &[usize] = if gpus.is_cuda() { &[300, 300_000, 6_000_000] } else { &[300] };
        for (way, &len) in WAYS.iter().flat_map(|way| lens.iter().map(move |len| (way, len))) {
            let n = gpus.up_to(3);
            let pool = way.builder(gpus, n).module(&support::MODULE).build().unwrap();
            // Outside: what a closure says when another has failed nobody hears.
            let (waiting, got) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
            let error = failure(pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; len])?;
                if dev.rank() == n - 1 {
                    slow_add(dev, &mut dev.zeros::<u32>(1)?, 1, 300_000)?;
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    until("the others wait", || waiting.load(SeqCst) == n - 1)?;
                    thread::sleep(Duration::from_millis(10));
                    return Err(Error::custom("when its part is under way"));
                }
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                // Whichever way one looks.
                let found = if dev.rank() == 0 {
                    waiting.fetch_add(1, SeqCst);
                    dev.download(&x)?
                } else {
                    let mut copy = dev.pinned(len)?;
                    dev.download_pinned(&x, &mut copy)?;
                    waiting.fetch_add(1, SeqCst);
                    let found = copy.as_slice()?.to_vec();
                    dev.check()?;
                    found
                };
                got.lock().push(found);
                Ok(())
            }));
            assert!(error.to_string().contains("under way"), "{error}");
            assert!(got.lock().iter().flatten().all(|x| *x == n as f32), "{way:?}, {len}");
            assert_works(&pool);
        }
    }

    // Gangs have one order, but fail in any: one that comes later has failed when one before it still waits for a peer.
    3: fn a_gang_that_fails_early_ends_no_gang_before_it(gpus) {
        let pool = rig::builder(gpus, 3).check(Check::Off).module(&support::MODULE).build().unwrap();
        let begun = AtomicBool::new(false);
        thread::scope(|s| {
            let first = s.spawn(|| {
                pool.on(&[0, 1]).run(|dev, _| {
                    let mut x = dev.upload(&[1.0f32; 100])?;
                    if dev.rank() == 1 {
                        slow_add(dev, &mut dev.zeros::<u32>(1)?, 1, 200_000)?;
                    }
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    begun.store(true, SeqCst);
                    dev.download(&x)
                })
            });
            until("the first has begun", || begun.load(SeqCst)).unwrap();
            // Device 0 is still with the first.
            let error = failure(pool.on(&[0, 2]).run(|dev, _| match dev.rank() {
                0 => dev.synchronize(),
                _ => Err(Error::custom("at once")),
            }));
            assert!(error.to_string().contains("at once"), "{error}");
            assert_eq!(first.join().unwrap().unwrap(), vec![[2.0; 100]; 2]);
        });
        assert_works(&pool);
    }

    // pytorch#118369: a timeout of half an hour that came after seven. And who it was, which NCCL does not say.
    2: fn a_member_that_never_comes_is_named_by_every_collective(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::builder(gpus, n).timeout(Duration::from_secs(1)).build().unwrap();
        for kind in kinds() {
            // At the root, or where everybody gets it from.
            let mut case = Case { root: 1, count: 10, ..Case::any(&mut Rng(34), kind, ReduceOp::Sum, n) };
            if kind == Kind::SendRecv {
                case.root = n - 1;
            }
            let case = Prepared::<f32>::new(case, n);
            let error = failure(pool.run(|dev, _| match dev.rank() {
                // Busy on the host; but it looks whether it is still wanted.
                1 => until("the others have given up", || dev.check().is_err()),
                _ => case.check(dev),
            }));
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{kind:?}: {error}");
        }
        assert_works(&pool);
    }

    3: fn a_member_of_a_group_that_never_comes_is_named(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::builder(gpus, n).timeout(Duration::from_secs(1)).build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let ranks: Vec<usize> = (1..n).rev().collect();
            match dev.rank() {
                // Has nothing to do with it.
                0 => Ok(()),
                2 => until("the others have given up", || dev.check().is_err()),
                _ => dev.group(&ranks)?.broadcast(&mut dev.zeros::<u8>(9)?, 0),
            }
        }));
        // By its ordinal, not by its rank in the group.
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[2]), "{error}");
        assert_works(&pool);
    }

    // Scratch is taken before anybody has begun: who has no room for it says so, and the others learn it.
    2: fn no_room_for_scratch_is_an_error_and_no_hang(gpus) {
        let n = gpus.up_to(3);
        let limit = 32 << 20;
        let builder = rig::builder(gpus, n).memory_limit(limit).algorithm(Algorithm::Copies);
        let pool = builder.build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(1 << 20)?;
            let mut fills = Vec::new();
            if dev.rank() == 1 {
                for bytes in (12..24).rev().map(|log| 1 << log) {
                    while let Ok(fill) = dev.zeros::<u8>(bytes) {
                        fills.push(fill);
                    }
                }
            }
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.synchronize()
        }));
        assert!(matches!(error, Error::OutOfMemory { device: 1, .. }), "{error}");
        assert_works(&pool);
    }

    // With little room for scratch on one member, all send smaller pieces.
    2: fn little_room_for_scratch_is_enough(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::builder(gpus, n).memory_limit(32 << 20).algorithm(Algorithm::Copies).build().unwrap();
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&vec![dev.rank() as f32 + 1.0; 1 << 20])?;
            let mut fills = Vec::new();
            if dev.rank() == 1 {
                let all = (18..24).rev().map(|log| 1 << log);
                all.for_each(|bytes| fills.extend(std::iter::from_fn(|| dev.zeros::<u8>(bytes).ok())));
                drop(fills.pop());
            }
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(all_are(&dev.download(&x)?, (n * (n + 1) / 2) as f32))
        });
        assert_eq!(found.unwrap(), vec![true; n]);
    }

    // After everything that can go wrong, one after the other in one pool.
    2: fn failures_of_all_kinds_in_turn(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::builder(gpus, n).timeout(Duration::from_secs(1)).build().unwrap();
        let mut rng = Rng(36);
        for round in 0..24 {
            let odd = rng.below(n);
            let error = failure(pool.run(|dev, _| {
                let mut x = dev.zeros::<f32>(100)?;
                if dev.rank() != odd {
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    return sum_works(dev);
                }
                match round % 6 {
                    0 => panic!("round {round}"),
                    1 => Err(Error::custom("round")),
                    2 => Ok(()),
                    3 => dev.barrier(),
                    4 => dev.all_reduce(&mut x.slice_mut(1..), ReduceOp::Sum),
                    _ => until("the others have given up", || dev.check().is_err()),
                }
            }));
            let fits = match round % 6 {
                0 => matches!(error, Error::Panicked { .. }),
                1 => matches!(error, Error::Custom(_)),
                5 => matches!(error, Error::Timeout { .. }),
                _ => matches!(error, Error::Mismatch { .. }),
            };
            assert!(fits, "round {round}: {error}");
            assert_works(&pool);
        }
    }
}

/// A kernel that has waited for a peer's until the deadline ends, though the peer's may come yet. Then nobody is given
/// what it has left, or what was made of that, for a result; and nothing is given back that the peer's may write to.
/// (On software GPUs no kernel waits for another.)
#[test]
fn a_kernel_that_gives_up_is_noticed_by_all() {
    support::on_cuda(2, |gpus| {
        let build = |algorithm| {
            let builder = rig::builder(gpus, 2).check(Check::Off).module(&support::MODULE).algorithm(algorithm);
            builder.timeout(Duration::from_secs(1)).build().unwrap()
        };
        // By packets, which a peer that comes later finds; and by an exchange, which needs both at once.
        let pools = [(100, build(Algorithm::Auto)), (16 << 20, build(Algorithm::Exchange))];
        if !pools.iter().all(|(_, pool)| rig::meet_from(pool, 1)) {
            return;
        }
        type Look = fn(&Device, &DeviceBuffer<f32>) -> Result<(), Error>;
        let looks: [Look; 4] = [
            |dev, _| dev.trim().map(drop),
            |dev, _| dev.synchronize(),
            |dev, _| dev.check(),
            |dev, x| dev.download(x).map(drop),
        ];
        for (look, (len, pool)) in looks.iter().flat_map(|look| pools.iter().map(move |pool| (look, pool))) {
            // Outside: what a closure says when another has failed nobody hears.
            let told = Mutex::new(Vec::new());
            let error = failure(pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; *len])?;
                dev.synchronize()?;
                if dev.rank() == 1 {
                    slow_add(dev, &mut dev.zeros::<u32>(1)?, 1, 450_000)?;
                }
                // The second adds up what the first has left, on a device whose own kernels may miss nothing.
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                let over = dev.record()?;
                until("the kernels have ended", || over.is_complete().unwrap())?;
                told.lock().push(look(dev, &x));
                Ok(())
            }));
            assert!(matches!(&error, Error::Timeout { device: 0, missing, .. } if missing == &[1]), "{error}");
            let told = told.into_inner();
            let all = told.iter().all(|told| matches!(told, Err(Error::Aborted { by: 0, .. })));
            assert!(all && told.len() == 2, "{told:?}");
            assert_works(pool);
        }
        assert!(pools[1].1.trim().unwrap() > 0);
    });
}

/// nccl#774, #750: `CUDA_LAUNCH_BLOCKING=1` makes every launch wait, so members that launch from one thread deadlock;
/// and lazy loading (torchcomms#2334) makes the first launch of each kernel one that waits for the device. In a process
/// of its own, since both are read once.
#[test]
fn with_launches_that_block_and_modules_that_load_late() {
    let names = ["pytorch::cuda::all_reduce_ops", "load::cuda::many_streams_of_one_device"];
    for name in names {
        printed(again(&[name], "").env("CUDA_LAUNCH_BLOCKING", "1").env("CUDA_MODULE_LOADING", "LAZY"), 1);
    }
}

/// A closure that ends with a collective under way ends the scope no sooner than the collective.
#[test]
fn the_scope_waits_for_what_is_under_way() {
    support::guarded(|| {
        let pool: GpuPool = rig::pool(Gpus::software(), 3);
        let whole = |dev: &Device| -> Result<(), Error> {
            let mut busy = dev.zeros::<u32>(1)?;
            slow_add(dev, &mut busy, 1, 20_000)?;
            dev.all_reduce(&mut dev.zeros::<f32>(1000)?, ReduceOp::Sum)
        };
        for _ in 0..5 {
            pool.run(|dev, _| whole(dev)).unwrap();
            let pending: u64 = pool.memory_stats().iter().map(|stats| stats.pending + stats.in_use).sum();
            assert_eq!(pending, 0);
        }
        let found = mismatch(pool.run(|dev, _| if dev.rank() == 0 { dev.barrier() } else { whole(dev) }));
        assert_eq!(found.what, "operation");
    });
}
