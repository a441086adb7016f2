//! Kernels that meet on the GPUs, at their limits: counters that wrap around, launches that fail when the others count
//! on them, drivers that block, and pools that spin side by side. Kernels of software GPUs are ordered by events: there
//! these tests show that they are right themselves.

use crate::{
    on_both, rig,
    rig::{assert_launch_failure_is_told, assert_works, meet_from, one_of_each, run_as_counters_wrap, sum_works},
    support::{Gpus, again, all_are, failure, on_cuda, printed, slow_add},
};
use gpu_pool::{Builder, DType, Device, Error, GpuPool, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{Check, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::Duration,
};

/// Elements that are pushed by one block, by several, that two members send eagerly, and some that are too many for
/// that.
const LENGTHS: [usize; 6] = [1, 33, 1000, 20_000, 200_000, 300_001];

/// Without what keeps kernels from meeting, whatever the environment says.
fn builder(gpus: Gpus, count: usize) -> Builder {
    rig::builder(gpus, count).check(Check::Off).algorithm(Algorithm::Direct)
}

/// Whether its kernels meet by themselves.
fn meets(pool: &GpuPool) -> bool {
    pool.explain(DType::F32, ReduceOp::Sum, 4).unwrap().meets != "events"
}

/// So many sums in a row, with no wait in between, and what they give.
fn sums(dev: &Device, rounds: usize) -> Result<(), Error> {
    let (n, me) = (dev.count(), dev.rank());
    let value = |k: usize, i: usize, rank: usize| ((i + k) % 97 + rank) as f32;
    let mut own = Vec::new();
    for k in 0..rounds {
        let len = LENGTHS[k % LENGTHS.len()];
        own.push(dev.upload(&(0..len).map(|i| value(k, i, me)).collect::<Vec<_>>())?);
    }
    own.iter_mut().try_for_each(|x| dev.all_reduce(x, ReduceOp::Sum))?;
    for (k, x) in own.iter().enumerate() {
        for (i, got) in dev.download(x)?.into_iter().enumerate() {
            let want = n as f32 * value(k, i, 0) + (n * (n - 1) / 2) as f32;
            assert!(got == want, "sum {k}: element {i} is {got} and not {want}");
        }
    }
    Ok(())
}

mod cuda {
    use super::*;

    // Issue 5, "epoch counters wrapping": flags compare for equality, packets alternate by parity, and the number after
    // the last one must keep both right.
    #[test]
    fn counters_wrap_around() {
        on_cuda(2, |gpus| {
            let n = gpus.up_to(8);
            let pool = builder(gpus, n).build().unwrap();
            let cases = one_of_each(51, n);
            // Of both parities, pushes and barriers on both sides of the last number.
            run_as_counters_wrap(&pool, &[0, 1, 7, 12, 25], |dev| {
                sums(dev, 30)?;
                cases.iter().try_for_each(|case| case.check(dev))
            });
        });
    }

    // Pairs count for themselves: some are past the last number when others are not.
    #[test]
    fn counters_of_pairs_wrap_around_at_different_times() {
        on_cuda(3, |gpus| {
            let n = gpus.up_to(4);
            let pool = builder(gpus, n).build().unwrap();
            run_as_counters_wrap(&pool, &[3, 10], |dev| {
                for round in 0..12 {
                    // Without one of them at a time.
                    let ranks: Vec<usize> = (0..n).filter(|&rank| rank != round % n).rev().collect();
                    if ranks.contains(&dev.rank()) {
                        for len in LENGTHS {
                            let mut x = dev.upload(&vec![1.0f32; len])?;
                            dev.group(&ranks)?.all_reduce(&mut x, ReduceOp::Sum)?;
                            assert!(all_are(&dev.download(&x)?, (n - 1) as f32), "round {round}, {len}");
                        }
                    }
                    sums(dev, 2)?;
                }
                Ok(())
            });
        });
    }

    /// Tests in a process of their own, since the driver reads its variables once.
    fn again_with(variables: &[(&str, &str)]) {
        let names = [
            "meetings::both_kinds::cuda::memory_and_other_pools_while_kernels_wait",
            "basics::cuda::back_to_back_without_a_wait",
            "pytorch::cuda::all_reduce_ops",
        ];
        printed(again(&names, "").envs(variables.iter().copied()), names.len());
    }

    // nccl#774, #750: every launch waits for its kernel. So kernels must not wait for others'.
    #[test]
    fn with_launches_that_block() {
        on_cuda(2, |_| again_with(&[("CUDA_LAUNCH_BLOCKING", "1")]));
    }

    // torchcomms#2334: the first launch of a kernel loads it, and waits for kernels that run.
    #[test]
    fn with_modules_that_are_loaded_late() {
        on_cuda(2, |_| again_with(&[("CUDA_MODULE_LOADING", "LAZY")]));
    }

    #[test]
    fn with_modules_that_are_loaded_at_once() {
        on_cuda(2, |_| again_with(&[("CUDA_MODULE_LOADING", "EAGER")]));
    }
}

mod both_kinds {
    use super::*;

    on_both! {
        // nccl#829, pytorch#113281: all have agreed, and then one's kernel cannot be launched. The others' kernels wait
        // for it already.
        2: fn a_launch_that_fails_when_the_others_count_on_it(gpus) {
            let n = gpus.up_to(4);
            for victim in [0, n - 1] {
                let rule = FaultRule::new(Injected::Error).device(victim).op(FaultOp::Launch);
                let plan = FaultPlan::new().on(rule).paused();
                let pool = builder(gpus, n).faults(plan.clone()).build().unwrap();
                // The second half of it around the last number of the counters.
                // Where events order kernels, who has nothing to do launches none.
                let least = if meets(&pool) { 0 } else { 1000 };
                let lengths = LENGTHS.into_iter().filter(|&len| len >= least);
                for (round, len) in lengths.cycle().take(20).enumerate() {
                    if round == 10 {
                        meet_from(&pool, u32::MAX - 12);
                    }
                    assert_launch_failure_is_told(&pool, (&plan, victim), len, |dev, x| {
                        (0..round % 4).try_for_each(|_| dev.all_reduce(x, ReduceOp::Max))
                    });
                }
                pool.run(|dev, _| sums(dev, 10)).unwrap();
            }
        }

        // The same from the other side: a member that hears of a failure when a peer has committed a collective for it
        // already, and that has to be counted for nevertheless. Where the failure hits is left to chance.
        2: fn a_failure_right_behind_a_collective(gpus) {
            let n = gpus.up_to(4);
            let pool = builder(gpus, n).build().unwrap();
            for round in 0..200 {
                if round == 100 {
                    meet_from(&pool, u32::MAX - 150);
                }
                let fails = round % n;
                let error = failure(pool.run(|dev, _| {
                    let mut x = dev.upload(&vec![1.0f32; LENGTHS[round % LENGTHS.len()]])?;
                    for _ in 0..1 + round % 3 {
                        dev.all_reduce(&mut x, ReduceOp::Max)?;
                    }
                    if dev.rank() == fails {
                        return Err(Error::custom("right behind"));
                    }
                    dev.all_reduce(&mut x, ReduceOp::Max)?;
                    dev.synchronize()
                }));
                assert_eq!(error.to_string(), "right behind", "round {round}");
                if round % 8 == 0 {
                    assert_works(&pool);
                }
            }
            pool.run(|dev, _| sums(dev, 20)).unwrap();
        }

        // nccl#744: a driver call that may wait for kernels, while kernels wait for the one that makes it; and while
        // others' meet.
        2: fn blocking_calls_while_others_meet(gpus) {
            let n = gpus.up_to(4);
            let pool = builder(gpus, n).build().unwrap();
            let others: Vec<usize> = (1..n).collect();
            pool.run(|dev, _| {
                for round in 0..20 {
                    if dev.rank() == 0 {
                        dev.blocking(|| thread::sleep(Duration::from_millis(2)));
                        continue;
                    }
                    for len in [33, 300_001] {
                        let mut x = dev.upload(&vec![round as f32; len])?;
                        dev.group(&others)?.all_reduce(&mut x, ReduceOp::Sum)?;
                        dev.blocking(|| ());
                        assert!(all_are(&dev.download(&x)?, ((n - 1) * round) as f32));
                    }
                }
                // The others wait for one that blocks.
                for _ in 0..10 {
                    if dev.rank() == 0 {
                        dev.blocking(|| thread::sleep(Duration::from_millis(5)));
                    }
                    sum_works(dev)?;
                }
                Ok(())
            })
            .unwrap();
        }

        // nccl#744, pytorch#50925, torchcomms#2334: one member's stream is late, so the others' kernels run and wait;
        // meanwhile memory is taken, mapped and given back, and another pool is built, with modules of its own.
        2: fn memory_and_other_pools_while_kernels_wait(gpus) {
            let n = gpus.up_to(4);
            let pool = builder(gpus, n).build().unwrap();
            let building = AtomicBool::new(false);
            thread::scope(|s| {
                s.spawn(|| {
                    while !building.load(SeqCst) {
                        thread::yield_now();
                    }
                    assert_works(&builder(gpus, n).build().unwrap());
                });
                pool.run(|dev, _| {
                    let mut busy = dev.zeros::<u32>(1)?;
                    for late in 0..n {
                        let (mut small, mut large) = (dev.upload(&[1.0f32; 33])?, dev.upload(&[1.0f32; 300_001])?);
                        if dev.rank() == late {
                            slow_add(dev, &mut busy, 1, 150_000)?;
                        }
                        dev.all_reduce(&mut small, ReduceOp::Sum)?;
                        dev.all_reduce(&mut large, ReduceOp::Sum)?;
                        building.store(true, SeqCst);
                        for k in 1..5usize {
                            let taken = (dev.zeros::<u8>(k << 22)?, dev.pinned::<u8>(k << 18)?, dev.stream()?);
                            drop(taken);
                            dev.trim()?;
                        }
                        assert_eq!(dev.download(&small)?, [n as f32; 33]);
                        assert!(all_are(&dev.download(&large)?, n as f32));
                    }
                    Ok(())
                })
                .unwrap();
            });
        }

        // pytorch#8388: two pools, each used by two threads, on the same GPUs, and all of them spin.
        2: fn two_pools_and_four_threads_that_meet_without_a_pause(gpus) {
            let n = gpus.up_to(4);
            let pools = [builder(gpus, n).build().unwrap(), builder(gpus, n).build().unwrap()];
            thread::scope(|s| {
                for thread in 0..4 {
                    let pool = &pools[thread % 2];
                    s.spawn(move || {
                        for round in 0..if gpus.is_cuda() { 40 } else { 5 } {
                            pool.run(|dev, _| sums(dev, 5)).unwrap_or_else(|e| panic!("thread {thread}, {round}: {e}"));
                        }
                    });
                }
            });
        }
    }
}
