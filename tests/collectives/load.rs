//! A great deal of everything at once: calls, streams, scopes and pools.

use crate::{
    on_both, rig,
    rig::{WAYS, assert_works, one_of_each},
    support::{self, slow_add},
};
use gpu_pool::{Error, ReduceOp};
use std::{thread, time::Duration};

on_both! {
    // pytorch#8388: two gangs that each hold a device of the other's.
    3: fn scopes_at_once_on_devices_of_their_own_and_on_shared_ones(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let gangs: [Vec<usize>; 4] = [vec![0, 1], (2..n).collect(), vec![1, 2], (0..n).rev().collect()];
        thread::scope(|s| {
            for gang in &gangs {
                let pool = &pool;
                s.spawn(move || {
                    for round in 0..15 {
                        let found = pool.on(gang).run(|dev, _| {
                            let mut x = dev.upload(&vec![round as f64; 500])?;
                            dev.all_reduce(&mut x, ReduceOp::Sum)?;
                            dev.broadcast(&mut x, dev.count() - 1)?;
                            dev.download(&x)
                        });
                        let expected = (round * gang.len()) as f64;
                        assert!(found.unwrap().iter().flatten().all(|x| *x == expected), "{gang:?}, round {round}");
                    }
                });
            }
        });
    }

    // Two pools of the same devices: gangs of different pools are in one order, too.
    2: fn two_pools_of_the_same_devices(gpus) {
        let n = gpus.up_to(3);
        let pools = [rig::pool(gpus, n), rig::pool(gpus, n)];
        thread::scope(|s| {
            for pool in &pools {
                s.spawn(move || {
                    for _ in 0..10 {
                        assert_works(pool);
                    }
                });
            }
        });
    }

    // llmq, nccl#2353: queues of launches and pools of operations run full.
    2: fn thousands_in_a_row_without_a_wait(gpus) {
        let n = gpus.up_to(3);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let mut x = dev.upload(&[1.0f32; 64])?;
                for k in 0..if gpus.is_cuda() { 5000 } else { support::cases(300, 1000) } {
                    match k % 3 {
                        0 => dev.all_reduce(&mut x, ReduceOp::Max)?,
                        1 => dev.broadcast(&mut x, k % n)?,
                        _ => dev.reduce_scatter_in_place(&mut x.slice_mut(..n), ReduceOp::Avg)?,
                    }
                }
                dev.download(&x)
            });
            assert!(found.unwrap().iter().flatten().all(|x| (x - 1.0).abs() < 1e-3), "{way:?}");
        }
    }

    // sglang#31117: one communicator on two streams spins for ever. Here, on many, in another order of streams on each
    // device.
    2: fn many_streams_of_one_device(gpus) {
        let n = gpus.up_to(3);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let streams = (0..8).map(|_| dev.stream()).collect::<Result<Vec<_>, _>>()?;
                let mut own = (0..8).map(|k| dev.upload(&vec![k; 300])).collect::<Result<Vec<_>, _>>()?;
                let mut busy = dev.zeros::<u32>(8)?;
                for round in 0..10 {
                    for (k, x) in own.iter_mut().enumerate() {
                        let on = dev.on(&streams[(k + round + dev.rank()) % 8]);
                        if (k + dev.rank()) % 5 == 0 {
                            slow_add(&on, &mut busy.slice_mut(k..k + 1), 1, 200)?;
                        }
                        on.all_reduce(x, if round == 0 { ReduceOp::Sum } else { ReduceOp::Min })?;
                    }
                }
                own.iter().map(|x| dev.download(x)).collect::<Result<Vec<_>, _>>()
            });
            for own in found.unwrap() {
                for (k, x) in own.into_iter().enumerate() {
                    assert_eq!(x, vec![(k * n) as i32; 300], "{way:?}");
                }
            }
        }
    }

    // nccl#864, #2363: 0.5 to 6 GB for communicators. Here they live within what the buffers leave.
    2: fn collectives_take_little_memory(gpus) {
        let n = gpus.up_to(4);
        for way in WAYS {
            let pool = way.builder(gpus, n).memory_limit(32 << 20).build().unwrap();
            let cases = one_of_each(35, n);
            pool.run(|dev, _| {
                // Most of it.
                let _large = dev.zeros::<u8>(20 << 20)?;
                cases.iter().try_for_each(|case| case.check(dev))
            })
            .unwrap();
            rig::assert_nothing_kept(&pool);
        }
    }

    // One member is far ahead: what it sends has room, or it waits; nothing is lost.
    2: fn one_runs_ahead(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&[0u64; 10])?;
            let one = dev.upload(&[1u64; 10])?;
            let mut sum = dev.zeros::<u64>(10)?;
            for k in 0..200 {
                if dev.rank() == n - 1 && k % 50 == 0 {
                    thread::sleep(Duration::from_millis(20));
                }
                dev.all_reduce_into(&one, &mut sum, ReduceOp::Sum)?;
                dev.gather(&sum.slice(..1), (dev.rank() == 0).then(|| x.slice_mut(..n)), 0)?;
            }
            dev.download(&x)
        });
        assert_eq!(found.unwrap()[0][..n], vec![n as u64; n]);
    }

    // The exit rule: when the stream has passed, nobody touches the buffers; so they may be written or be somebody
    // else's.
    2: fn buffers_dropped_right_after_are_nobodys(gpus) {
        let n = gpus.up_to(3);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let mut busy = dev.zeros::<u32>(1)?;
                let (len, mut kept) = (30_001, Vec::new());
                for round in 0..6 {
                    let own = dev.upload(&vec![(round + dev.rank()) as f32; len])?;
                    let (mut sum, mut all) = (dev.zeros::<f32>(len)?, dev.zeros::<f32>(len * n)?);
                    let mut part = dev.zeros::<f32>(len)?;
                    if dev.rank() == round % n {
                        slow_add(dev, &mut busy, 1, 3_000)?;
                    }
                    dev.all_reduce_into(&own, &mut sum, ReduceOp::Sum)?;
                    dev.all_gather(&own, &mut all)?;
                    dev.reduce_scatter(&all, &mut part, ReduceOp::Max)?;
                    dev.broadcast(&mut sum, round % n)?;
                    drop(own);
                    // The same memory, most likely.
                    let junk = [dev.upload(&vec![f32::NAN; len])?, dev.upload(&vec![f32::INFINITY; len])?];
                    drop(all);
                    drop(junk);
                    kept.push((sum, part));
                }
                kept.iter().map(|(a, b)| Ok((dev.download(a)?, dev.download(b)?))).collect::<Result<Vec<_>, Error>>()
            });
            for (rank, rounds) in found.unwrap().into_iter().enumerate() {
                for (round, (sum, part)) in rounds.into_iter().enumerate() {
                    let expected = (n * round + n * (n - 1) / 2) as f32;
                    assert!(sum.iter().all(|x| *x == expected), "{way:?}, round {round}");
                    assert!(part.iter().all(|x| *x == (round + rank) as f32), "{way:?}, round {round}");
                }
            }
        }
    }
}
