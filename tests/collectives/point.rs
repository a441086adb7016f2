//! From one device to one other.

use crate::{
    numbers::each_type,
    on_both, rig,
    rig::{WAYS, assert_works},
    support::{failure, ramp, slow_add, until},
};
use gpu_pool::Error;
use std::sync::atomic::{AtomicBool, Ordering::*};

on_both! {
    2: fn messages_of_a_pair_arrive_in_order_and_pairs_do_not_mix(gpus) {
        let n = gpus.up_to(4);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let (me, mut got) = (dev.rank(), Vec::new());
                for k in 0..10u32 {
                    for to in 0..n {
                        // Of another length each time, also empty.
                        dev.send(&dev.upload(&ramp(k as usize * 37, 100 * me as u32 + k))?, to)?;
                    }
                }
                // From the last one first, and from itself.
                for from in (0..n).rev() {
                    for k in 0..10u32 {
                        let mut x = dev.zeros::<u32>(k as usize * 37)?;
                        dev.recv(&mut x, from)?;
                        got.push(dev.download(&x)? == ramp(k as usize * 37, 100 * from as u32 + k));
                    }
                }
                Ok(got)
            });
            assert!(found.unwrap().iter().flatten().all(|right| *right), "{way:?}");
        }
    }

    2: fn every_type(gpus) {
        let pool = rig::pool(gpus, 2);
        each_type!(T => {
            let found = pool.run(|dev, _| {
                let x: Vec<T> = (0..55).map(|i| <T as crate::numbers::Num>::of((i + dev.rank()) as f64)).collect();
                let mut y = dev.upload(&x)?;
                // Into the middle, from the middle.
                dev.sendrecv(&dev.upload(&x)?.slice(1..50), 1 - dev.rank(), &mut y.slice_mut(3..52), 1 - dev.rank())?;
                dev.download(&y)
            });
            for (rank, y) in found.unwrap().into_iter().enumerate() {
                let at = |i: usize| if (3..52).contains(&i) { i - 2 + 1 - rank } else { i + rank };
                let expected: Vec<T> = (0..55).map(|i| <T as crate::numbers::Num>::of(at(i) as f64)).collect();
                assert_eq!(y, expected);
            }
        });
    }

    // Sends wait for nobody: MPI's classic deadlock is none here.
    2: fn a_hundred_sends_before_the_first_receive_in_both_directions(gpus) {
        rig::run(gpus, 2, |dev| {
            let (other, mut x) = (1 - dev.rank(), dev.zeros::<u32>(1000)?);
            for k in 0..100 {
                dev.fill(&mut x, k + 1000 * dev.rank() as u32)?;
                dev.send(&x, other)?;
            }
            for k in 0..100 {
                dev.recv(&mut x, other)?;
                assert_eq!(dev.download(&x)?, [k + 1000 * other as u32; 1000]);
            }
            Ok(())
        });
    }

    2: fn a_message_that_nobody_fetches_holds_nothing_up(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for round in 0..3 {
            let keeps = pool.run(|dev, _| {
                for k in 0..20 {
                    dev.send(&dev.zeros::<f64>(1 << 12)?, (dev.rank() + k) % n)?;
                }
                Ok(round)
            });
            assert_eq!(keeps.unwrap(), vec![round; n]);
            // It is not taken for a message of the next scope.
            let found = pool.run(|dev, _| {
                let mut x = dev.zeros::<u32>(1)?;
                dev.sendrecv(
                    &dev.upload(&[dev.rank() as u32])?,
                    (dev.rank() + 1) % n,
                    &mut x,
                    (dev.rank() + n - 1) % n,
                )?;
                dev.download(&x)
            });
            let found: Vec<u32> = found.unwrap().concat();
            assert_eq!(found, (0..n as u32).map(|r| (r + n as u32 - 1) % n as u32).collect::<Vec<_>>());
        }
        rig::assert_nothing_kept(&pool);
    }

    // Sent is what the buffer had at that place of the stream, whatever comes before and after it there.
    2: fn the_buffer_may_be_changed_or_dropped_right_after(gpus) {
        for way in WAYS {
            let found = way.pool(gpus, 2).run(|dev, _| {
                let (side, mut x) = (dev.stream()?, dev.zeros::<u32>(500)?);
                let other = 1 - dev.rank();
                // Behind slow work, on another stream.
                slow_add(&dev.on(&side), &mut x, 7, 5_000)?;
                dev.on(&side).send(&x, other)?;
                dev.fill(&mut x, 99)?;
                drop(x);
                let mut y = dev.zeros::<u32>(500)?;
                dev.recv(&mut y, other)?;
                dev.download(&y)
            });
            assert_eq!(found.unwrap(), [[7; 500]; 2], "{way:?}");
        }
    }

    3: fn groups_have_their_own_messages(gpus) {
        let pool = rig::pool(gpus, 3);
        let found = pool.run(|dev, _| {
            let (a, b) = (dev.group(&[0, 1, 2])?, dev.group(&[2, 1, 0])?);
            let me = dev.rank() as u32;
            let mut got = [dev.zeros::<u32>(1)?, dev.zeros::<u32>(1)?];
            a.send(&dev.upload(&[me])?, (a.rank() + 1) % 3)?;
            b.send(&dev.upload(&[10 + me])?, (b.rank() + 1) % 3)?;
            // In the other order.
            b.recv(&mut got[1], (b.rank() + 2) % 3)?;
            a.recv(&mut got[0], (a.rank() + 2) % 3)?;
            Ok((dev.download(&got[0])?[0], dev.download(&got[1])?[0]))
        });
        assert_eq!(found.unwrap(), [(2, 11), (0, 12), (1, 10)]);
    }

    // Collectives and messages do not get into each other's way.
    2: fn between_collectives(gpus) {
        let n = gpus.up_to(4);
        rig::run(gpus, n, |dev| {
            let (next, previous) = ((dev.rank() + 1) % n, (dev.rank() + n - 1) % n);
            let mut x = dev.upload(&[dev.rank() as u32])?;
            for _ in 0..n {
                dev.send(&x, next)?;
                rig::sum_works(dev)?;
                dev.recv(&mut x, previous)?;
                dev.barrier()?;
            }
            assert_eq!(dev.download(&x)?, [dev.rank() as u32]);
            Ok(())
        });
    }

    // MPI_Send to one that has failed.
    2: fn whoever_waits_for_a_member_that_fails_is_told(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let waits = AtomicBool::new(false);
        let error = failure(pool.run(|dev, _| {
            if dev.rank() == 1 {
                until("the other waits", || waits.load(SeqCst))?;
                return Err::<(), _>(Error::custom("no message today"));
            }
            waits.store(true, SeqCst);
            let error = failure(dev.recv(&mut dev.zeros::<f32>(3)?, 1));
            assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
            Err(error)
        }));
        assert_eq!(error.to_string(), "no message today");
        assert_works(&pool);
    }
}
