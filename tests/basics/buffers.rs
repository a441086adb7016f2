//! Buffers: whatever safe code does with them, on whichever streams, devices and threads, the data is that of the order
//! of the calls. And the pool behind them: reuse, frees from anywhere, no driver call in the steady state.

use crate::{
    on_both,
    support::{ramp, slow_add, slow_copy},
};
use gpu_pool::{AsViewMut, Device, DeviceBuffer, Error, ReduceOp};
use parking_lot::Mutex;
use proptest::{prelude::*, test_runner::TestRunner};
use std::{sync::Arc, thread};

/// Microseconds that a slow kernel takes here: long compared to the calls that follow it.
const SLOW: u32 = 15_000;

/// So little memory that the pool uses again what streams still use.
const SHORT: u64 = 256 << 20;

on_both! {
    // Safe Rust, and only the block itself can know that device 1 still reads.
    2: fn a_buffer_read_elsewhere_is_written_at_home_in_a_later_scope(gpus) {
        let pool = gpus.pool(2);
        let shared = pool.on(&[0]).run(|dev, _| dev.upload(&[1u32; 1000])).unwrap().remove(0);
        let mut shared = Arc::new(shared);
        for round in 1..4u32 {
            let parked = Mutex::new(shared.clone());
            let copies = pool
                .on(&[1]).run(|dev, _| {
                    let theirs = std::mem::replace(&mut *parked.lock(), Arc::new(dev.zeros(0)?));
                    let mut here = dev.zeros::<u32>(1000)?;
                    slow_add(dev, &mut here, 0, SLOW)?;
                    dev.copy(&theirs.peer(), &mut here)?;
                    Ok(here)
                })
                .unwrap();
            drop(parked);
            let mut own = Arc::try_unwrap(shared).unwrap();
            shared = {
                let target = Mutex::new(&mut own);
                pool.on(&[0]).run(|dev, _| dev.fill(&mut **target.lock(), round + 1)).unwrap();
                Arc::new(own)
            };
            let seen = pool.on(&[1]).run(|dev, _| dev.download(&copies[0])).unwrap();
            assert_eq!(seen, [[round; 1000]]);
        }
    }

    // The same within one scope: the reader's copy is asked for, and queued behind something slow, when the owner
    // writes.
    2: fn a_buffer_read_elsewhere_is_written_at_home_in_the_same_scope(gpus) {
        for staged in [false, true] {
            let n = gpus.up_to(4);
            let pool = if staged { gpus.staged(n) } else { gpus.pool(n) };
            let seen = pool.run(|dev, _| {
                let mine = Arc::new(dev.upload(&[dev.rank() as u32; 5000])?);
                let theirs = dev.exchange(mine.clone())?[(dev.rank() + 1) % n].clone();
                let mut here = dev.zeros::<u32>(5000)?;
                slow_add(dev, &mut here, 0, SLOW)?;
                dev.copy(&theirs.peer(), &mut here)?;
                drop(theirs);
                // Everybody has asked for his copy, no more.
                dev.barrier()?;
                let mut mine = Arc::try_unwrap(mine).map_err(|_| Error::custom("somebody still holds it"))?;
                let other = dev.stream()?;
                dev.on(&other).fill(&mut mine, 99)?;
                Ok((dev.download(&here)?, dev.download(&mine)?))
            });
            for (rank, (copied, own)) in seen.unwrap().into_iter().enumerate() {
                assert_eq!(copied, vec![((rank + 1) % n) as u32; 5000], "staged: {staged}");
                assert_eq!(own, [99; 5000]);
            }
        }
    }

    // Write after write, read after write, write after read: over streams of one device.
    // What a whole buffer can, its parts and a shared one can.
    2: fn parts_and_shared_buffers_are_views(gpus) {
        let pool = gpus.pool(2);
        let numbers = ramp(1000, 1);
        let shared = Arc::new(pool.on(&[0]).run(|dev, _| dev.upload(&numbers)).unwrap().remove(0));
        let found = pool.run(|dev, _| {
            assert_eq!((shared.slice(1..).device(), shared.device()), (0, 0));
            let part = shared.slice(10..20).copy_to(dev)?;
            let (part, mut own) = (Arc::new(part), dev.zeros::<u32>(10)?);
            dev.copy(&part, &mut own)?;
            slow_copy(dev, &part, &mut own, 0)?;
            Ok((dev.download(&part)?, dev.download(&own)?))
        });
        assert_eq!(found.unwrap(), [(); 2].map(|()| (numbers[10..20].to_vec(), numbers[10..20].to_vec())));
    }

    1: fn streams_of_one_device_are_ordered(gpus) {
        gpus.run(1, |dev| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let (a, b) = (dev.on(&a), dev.on(&b));
            let mut x = dev.upload(&[1u32; 100])?;
            let (mut y, mut busy) = (dev.zeros::<u32>(100)?, dev.zeros::<u32>(1)?);
            slow_add(&a, &mut busy, 1, SLOW)?;
            slow_add(&a, &mut x, 1, 0)?;
            b.copy(&x, &mut y)?; // read after write
            assert_eq!(dev.download(&y)?, [2; 100]);
            // (The reader has not begun: software GPUs never run two operations on the same bytes at once.)
            slow_add(&a, &mut busy, 1, SLOW)?;
            slow_copy(&a, &x, &mut y, 0)?;
            b.fill(&mut x, 7)?; // write after read
            assert_eq!(dev.download(&y)?, [2; 100]);
            slow_add(&a, &mut busy, 1, SLOW)?;
            slow_add(&a, &mut x, 1, 0)?;
            b.fill(&mut x, 9)?; // write after write
            assert_eq!(a.download(&x)?, [9; 100]);
            // Helpers that take a device work on any stream, and host copies are uses like all others.
            fn double(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<(), Error> {
                dev.scale(x, 2.0)
            }
            let mut f = a.upload(&[1.0f32; 10])?;
            double(&b, &mut f)?;
            double(&a, &mut f)?;
            assert_eq!(dev.download(&f)?, [4.0; 10]);
            Ok(())
        });
    }

    1: fn disjoint_parts_on_two_streams(gpus) {
        gpus.run(1, |dev| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            for mid in [0, 1, 33, 99, 100] {
                let mut x = dev.upload(&ramp(100, 5))?;
                {
                    let (mut left, mut right) = x.split_at_mut(mid);
                    assert_eq!((left.len(), right.len()), (mid, 100 - mid));
                    for _ in 0..2 {
                        if mid > 0 {
                            slow_add(&dev.on(&a), &mut left, 1, SLOW / 10)?;
                        }
                        if mid < 100 {
                            slow_add(&dev.on(&b), &mut right, 10, SLOW / 10)?;
                        }
                    }
                }
                // One that needs both.
                slow_add(&dev.on(&b), &mut x, 1000, 0)?;
                let parts = (0..100).map(|i| if i < mid { 1002 } else { 1020 });
                let expected: Vec<u32> = ramp(100, 5).iter().zip(parts).map(|(x, add)| x.wrapping_add(add)).collect();
                assert_eq!(dev.download(&x)?, expected, "{mid}");
            }
            Ok(())
        });
    }

    // pytorch#196257: memory that was freed while a stream still used it, handed out again.
    1: fn reuse_of_freed_memory_is_ordered(gpus) {
        // A pool that may have more would rather grow than wait.
        let pool = gpus.builder(1).memory_limit(SHORT).build().unwrap();
        pool.run(|dev, _| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let (a, b) = (dev.on(&a), dev.on(&b));
            let mut busy = dev.zeros::<u32>(1)?;
            for round in 0..3u32 {
                // Sizes that nothing else has had, so that the one free block is the one that is still read.
                let len = (3 << 20) << round;
                let mut out = dev.zeros::<u32>(len)?;
                let source = dev.upload(&vec![round; len])?;
                // The reader waits for its turn, so nothing but the order keeps the next writer from the memory.
                slow_add(&a, &mut busy, 1, SLOW)?;
                slow_copy(&a, &source, &mut out, 0)?;
                let address = source.address();
                drop(source);
                let again = b.upload(&vec![u32::MAX; len])?;
                assert_eq!(again.address(), address, "the memory was not used again, so this tests nothing");
                assert_eq!(dev.download(&out)?, vec![round; len]);
                assert_eq!(dev.download(&again)?, vec![u32::MAX; len]);
            }
            Ok(())
        })
        .unwrap();
    }

    // The reader is a peer: the block comes home while device 1's stream still reads it.
    2: fn memory_freed_by_a_peer_is_reused_in_order(gpus) {
        for staged in [false, true] {
            let builder = gpus.builder(2).memory_limit(SHORT);
            let pool = if staged { builder.without_peer_access() } else { builder }.build().unwrap();
            for round in 0..3u32 {
                // Sizes that nothing else has had, so that the one free block is the one that is still read.
                let len = (3 << 20) << round;
                let seen = pool.run(|dev, _| {
                    let lent = match dev.rank() {
                        0 => Some(Arc::new(dev.upload(&vec![round; len])?)),
                        _ => None,
                    };
                    let lent = dev.exchange(lent)?.swap_remove(0).unwrap();
                    let address = lent.address();
                    if dev.rank() == 1 {
                        let mut here = dev.zeros::<u32>(len)?;
                        slow_add(dev, &mut here.slice_mut(..1), 0, SLOW)?;
                        dev.copy(&lent.peer(), &mut here)?;
                        drop(lent);
                        dev.barrier()?;
                        return dev.download(&here);
                    }
                    drop(lent);
                    dev.barrier()?;
                    // The last handle went on one of the two threads; now the memory is used for something else.
                    let other = dev.upload(&vec![77; len])?;
                    assert_eq!(other.address(), address, "the memory was not used again, so this tests nothing");
                    dev.download(&other)
                });
                let seen = seen.unwrap();
                assert!(seen[0].iter().all(|&x| x == 77) && seen[1].iter().all(|&x| x == round), "staged: {staged}");
            }
        }
    }

    1: fn buffers_are_dropped_anywhere(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        for _ in 0..5 {
            // In flight, on other threads, while the devices allocate.
            let made = pool
                .run(|dev, _| (0..50).map(|i| dev.upload(&vec![i as f32; 100 + i])).collect::<Result<Vec<_>, _>>())
                .unwrap();
            thread::scope(|s| {
                for buffers in made {
                    s.spawn(move || drop(buffers));
                }
                pool.run(|dev, _| {
                    for i in 0..50 {
                        assert_eq!(dev.download(&dev.upload(&[i as f32; 120])?)?, [i as f32; 120]);
                    }
                    Ok(())
                })
                .unwrap();
            });
        }
        let used = pool.run(|dev, _| Ok(dev.stats().in_use)).unwrap();
        assert!(used.iter().all(|&bytes| bytes == 0), "{used:?}");
    }

    1: fn buffers_outlive_their_pool(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let (buffers, events) = (
            pool.run(|dev, _| dev.upload(&[1.0f32; 1000])).unwrap(),
            pool.run(|dev, _| dev.record()).unwrap(),
        );
        let (pinned, mut unified) = (pool.pinned::<u8>(100).unwrap(), pool.unified::<u8>(100).unwrap());
        drop(pool);
        assert_eq!(buffers[0].len(), 1000);
        assert_eq!(pinned.as_slice().unwrap(), [0; 100]);
        unified.as_mut_slice().unwrap().fill(3);
        assert_eq!(unified.as_slice().unwrap(), [3; 100]);
        assert!(events[0].is_complete().unwrap());
        thread::spawn(move || drop((buffers, pinned, unified, events))).join().unwrap();
    }

    // cudarc#164, 16 us for each cuMemAllocAsync when eight threads call: a pool that makes no driver call is the
    // point.
    2: fn the_steady_state_makes_no_driver_call(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.pool(n);
        let batch: Vec<f32> = (0..4000).map(|i| i as f32).collect();
        let step = || {
            pool.run(|dev, shard| {
                let x = dev.upload(shard.of(&batch))?;
                let mut y = dev.zeros::<f32>(x.len())?;
                dev.axpy(2.0, &x, &mut y)?;
                let mut sum = dev.sum(&y)?;
                dev.all_reduce(&mut sum, ReduceOp::Sum)?;
                let large = dev.zeros::<u8>(3 << 20)?;
                drop(large);
                dev.download(&sum)?;
                Ok(dev.stats())
            })
            .unwrap()
        };
        for _ in 0..5 {
            step();
        }
        let before = step();
        for _ in 0..50 {
            step();
        }
        let after = step();
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(before.driver_calls, after.driver_calls);
            assert_eq!(before.reserved, after.reserved);
            assert!(after.allocations > before.allocations + 150, "{after:?}");
            // On GPUs the pool's set-up took more than the program does, and gave it back.
            assert!(after.peak >= after.in_use && after.reserved >= after.in_use, "{after:?}");
            assert!(after.peak_reserved >= after.peak, "{after:?}");
        }
    }

    1: fn statistics_count_what_lives(gpus) {
        gpus.run(1, |dev| {
            assert_eq!(dev.stats().in_use, 0);
            let x = dev.zeros::<u8>(5 << 20)?;
            let with = dev.stats();
            assert!(with.in_use >= 5 << 20 && with.in_use <= 7 << 20, "{with:?}");
            drop(x);
            let without = dev.stats();
            assert_eq!((without.in_use, without.peak >= with.in_use), (0, true), "{without:?}");
            Ok(())
        });
    }

    2: fn nothing_at_all_is_fine_everywhere(gpus) {
        let pool = gpus.run(2, |dev| {
            let mut x = dev.zeros::<f32>(0)?;
            assert!(x.is_empty() && dev.upload::<u64>(&[])?.is_empty());
            assert_eq!(dev.download(&x)?, [] as [f32; 0]);
            dev.upload_into(&[], &mut x)?;
            dev.download_into(&x, &mut [])?;
            let mut pinned = dev.pinned::<f32>(0)?;
            dev.upload_pinned_into(&pinned, &mut x)?;
            dev.download_pinned(&x, &mut pinned)?;
            assert!(pinned.as_slice()?.is_empty() && dev.upload_pinned(&pinned)?.is_empty());
            dev.fill(&mut x, 1.0)?;
            dev.scale(&mut x, 2.0)?;
            dev.axpy(2.0, &dev.zeros::<f32>(0)?, &mut x)?;
            assert_eq!(dev.download(&dev.sum(&x)?)?, [0.0]);
            assert_eq!(dev.download(&dev.dot(&x, &x)?)?, [0.0]);
            assert_eq!(dev.download(&dev.cast::<f64, _>(&x)?)?, [] as [f64; 0]);
            dev.copy(&dev.zeros::<f32>(0)?, &mut x)?;
            dev.all_reduce(&mut x, ReduceOp::Avg)?;
            assert!(x.copy_to(dev)?.is_empty());
            let some = dev.upload(&[1.0f32, 2.0])?;
            assert_eq!(dev.download(&some.slice(2..))?, [] as [f32; 0]);
            assert_eq!(dev.download(&some.slice(1..1))?, [] as [f32; 0]);
            assert!(x.view_mut().split_at_mut(0).1.is_empty());
            // Elements without bytes.
            assert_eq!(dev.download(&dev.upload(&[(); 5])?)?, [(); 5]);
            Ok(())
        });
        let mut none = pool.unified::<f32>(0).unwrap();
        pool.with(none.rows_mut(4)).run(|dev, _, mut rows| dev.scale(&mut rows, 2.0)).unwrap();
        assert!(none.as_slice().unwrap().is_empty() && pool.pinned::<u8>(0).unwrap().is_empty());
    }

    1: fn views_are_parts_of_parts(gpus) {
        gpus.run(1, |dev| {
            let host = ramp(1000, 3);
            let mut x = dev.upload(&host)?;
            assert_eq!(dev.download(&x.slice(100..).slice(..=50).slice(7..9))?, host[107..109]);
            let mut inner = x.slice_mut(10..20).slice_mut(5..);
            dev.fill(&mut inner, 1)?;
            assert_eq!(dev.download(&inner.slice(1..).slice(..2))?, [1; 2]);
            let (_, mut right) = inner.split_at_mut(4);
            dev.fill(&mut right, 2)?;
            let now = dev.download(&x)?;
            assert_eq!(now[14..21], [host[14], 1, 1, 1, 1, 2, host[20]]);
            Ok(())
        });
    }

    1: fn plain_structs_are_elements_too(gpus) {
        #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        struct Particle {
            at: [f32; 3],
            id: u32,
        }
        let pool = gpus.pool(1);
        let all: Vec<Particle> = (0..333).map(|id| Particle { at: [id as f32; 3], id }).collect();
        let back = pool.run(|dev, _| dev.download(&dev.upload(&all)?.slice(1..))).unwrap();
        assert_eq!(back[0], all[1..]);
    }

    2: fn random_programs_behave_as_if_run_one_by_one(gpus) {
        let (direct, staged) = (gpus.pool(2), gpus.staged(2));
        let cases = if gpus.is_cuda() { 200 } else { 60 };
        let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
        TestRunner::new(config)
            .run(&(prop::collection::vec(step(), 1..30), any::<bool>()), |(steps, peers)| {
                let pool = if peers { &direct } else { &staged };
                let found =
                    pool.run(|dev, _| run_program(dev, &steps)).map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert_eq!(&found[0], &expected(&steps));
                Ok(())
            })
            .unwrap();
    }
}

/// Buffers of the random programs: four, the even ones on device 0 and the odd ones on device 1.
const BUFFERS: usize = 4;
const LEN: usize = 64;

/// One operation: on which device and stream, and what.
#[derive(Clone, Debug)]
enum Step {
    Add {
        buffer: usize,
        stream: usize,
        from: usize,
        len: usize,
        add: u32,
        slow: bool,
    },
    Fill {
        buffer: usize,
        stream: usize,
        from: usize,
        len: usize,
        value: u32,
    },
    /// By the source's device, or by the destination's.
    Copy {
        src: usize,
        dst: usize,
        pull: bool,
        stream: usize,
        from: usize,
        to: usize,
        len: usize,
    },
    Upload {
        buffer: usize,
        stream: usize,
        from: usize,
        len: usize,
        seed: u32,
    },
    /// The buffer is dropped and a new one takes its place, of which all is written.
    Renew {
        buffer: usize,
        stream: usize,
        value: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let part = (0..BUFFERS, 0..3usize, 0..LEN, 0..LEN);
    let part = part.prop_map(|(buffer, stream, from, len)| (buffer, stream, from, len.min(LEN - from)));
    prop_oneof![
        (part.clone(), any::<u32>(), any::<bool>()).prop_map(|((buffer, stream, from, len), add, slow)| Step::Add {
            buffer,
            stream,
            from,
            len: len.max(1),
            add,
            slow
        }),
        (part.clone(), any::<u32>()).prop_map(|((buffer, stream, from, len), value)| Step::Fill {
            buffer,
            stream,
            from,
            len,
            value
        }),
        (part.clone(), 1..BUFFERS, any::<bool>(), 0..LEN).prop_map(|((src, stream, from, len), skip, pull, to)| {
            Step::Copy { src, dst: (src + skip) % BUFFERS, pull, stream, from, to, len: len.min(LEN - to) }
        }),
        (part, any::<u32>()).prop_map(|((buffer, stream, from, len), seed)| Step::Upload {
            buffer,
            stream,
            from,
            len,
            seed
        }),
        (0..BUFFERS, 0..3usize, any::<u32>()).prop_map(|(buffer, stream, value)| Step::Renew { buffer, stream, value }),
    ]
}

/// The buffers that the two threads work on in turn; safe Rust's way to hand them over.
type Shared = Arc<Vec<Mutex<DeviceBuffer<u32>>>>;

/// Both devices go through the program; each does its own steps, and a barrier of the hosts (not of the streams) is
/// between any two.
fn run_program(dev: &Device, steps: &[Step]) -> Result<Vec<Vec<u32>>, Error> {
    let me = dev.rank();
    let mine = [dev.zeros::<u32>(LEN)?, dev.zeros::<u32>(LEN)?].map(|buffer| Mutex::new(Some(buffer)));
    let both = dev.exchange(Arc::new(mine))?;
    let all: Option<Shared> = (me == 0).then(|| {
        let take = |i: usize| Mutex::new(both[i % 2][i / 2].lock().take().expect("taken once"));
        Arc::new((0..BUFFERS).map(take).collect())
    });
    let all = dev.exchange(all)?.swap_remove(0).expect("device 0 has made it");
    let streams = [dev.stream()?, dev.stream()?];
    let guards = [dev.on(&streams[0]), dev.on(&streams[1])];
    let on = |stream: usize| -> &Device { guards.get(stream).map_or(dev, |guard| guard) };
    for step in steps {
        match *step {
            Step::Add { buffer, stream, from, len, add, slow } if me == buffer % 2 => {
                let mut x = all[buffer].lock();
                slow_add(on(stream), &mut x.slice_mut(from..from + len), add, if slow { 2000 } else { 0 })?;
            }
            Step::Fill { buffer, stream, from, len, value } if me == buffer % 2 => {
                let mut x = all[buffer].lock();
                on(stream).fill(&mut x.slice_mut(from..from + len), value)?;
            }
            Step::Copy { src, dst, pull, stream, from, to, len } if me == if pull { dst } else { src } % 2 => {
                let len = len.min(LEN - from);
                let x = all[src].lock();
                let mut y = all[dst].lock();
                on(stream).copy(&x.peer().slice(from..from + len), &mut y.slice_mut(to..to + len))?;
            }
            Step::Upload { buffer, stream, from, len, seed } if me == buffer % 2 => {
                on(stream).upload_into(&ramp(len, seed), &mut all[buffer].lock().slice_mut(from..from + len))?;
            }
            Step::Renew { buffer, stream, value } if me == buffer % 2 => {
                let mut x = all[buffer].lock();
                *x = dev.zeros(LEN)?;
                on(stream).fill(&mut *x, value)?;
            }
            _ => {}
        }
        dev.barrier()?;
    }
    let seen = (0..BUFFERS).map(|i| dev.download(&all[i].lock().copy_to(dev)?)).collect();
    dev.barrier()?;
    seen
}

fn expected(steps: &[Step]) -> Vec<Vec<u32>> {
    let mut all = vec![vec![0u32; LEN]; BUFFERS];
    for step in steps {
        match *step {
            Step::Add { buffer, from, len, add, .. } => {
                all[buffer][from..from + len].iter_mut().for_each(|x| *x = x.wrapping_add(add));
            }
            Step::Fill { buffer, from, len, value, .. } => all[buffer][from..from + len].fill(value),
            Step::Copy { src, dst, from, to, len, .. } => {
                let len = len.min(LEN - from);
                let part = all[src][from..from + len].to_vec();
                all[dst][to..to + len].copy_from_slice(&part);
            }
            Step::Upload { buffer, from, len, seed, .. } => {
                all[buffer][from..from + len].copy_from_slice(&ramp(len, seed));
            }
            Step::Renew { buffer, value, .. } => all[buffer].fill(value),
        }
    }
    all
}
