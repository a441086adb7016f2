//! Groups: some of the members, in any order, several at once. MPI's communicators and NCCL's split ones, without the
//! set-up (nccl#534: 2 s for each communicator), and without counters of their own that get out of step (Modular's
//! `NUM_BARRIER_DOMAINS`).

use crate::{
    cases::{Case, Prepared, kinds},
    numbers::{OPS, Rng},
    on_both, rig,
    rig::{WAYS, assert_works, invalid, mismatch, sum_works, ways},
    support::failure,
};
use gpu_pool::{Device, Error, ReduceOp};
use parking_lot::Mutex;
use std::time::Duration;

/// Each kind once, with any operation.
fn one_of_each(rng: &mut Rng, n: usize) -> Vec<Case> {
    let any = |kind| {
        let op = rng.pick(&OPS);
        Case::any(rng, kind, op, n)
    };
    kinds().map(any).collect()
}

/// Sums ones over a group.
#[track_caller]
fn sum_in(dev: &Device, ranks: &[usize]) -> Result<(), Error> {
    let mut x = dev.upload(&[1.0f32; 10])?;
    dev.group(ranks)?.all_reduce(&mut x, ReduceOp::Sum)?;
    assert_eq!(dev.download(&x)?, [ranks.len() as f32; 10]);
    Ok(())
}

on_both! {
    2: fn every_collective_of_any_subset_in_any_order(gpus) {
        let of = gpus.up_to(6);
        let mut rng = Rng(11);
        for (way, pool) in ways(gpus, of) {
            for _ in 0..3 {
                let n = 1 + rng.below(of);
                let members = rng.choose(n, of);
                let cases: Vec<_> =
                    one_of_each(&mut rng, n).into_iter().map(|case| Prepared::<f32>::new(case, n)).collect();
                let run = pool.run(|dev, _| {
                    if !members.contains(&dev.rank()) {
                        return Ok(());
                    }
                    let group = dev.group(&members)?;
                    assert_eq!((group.count(), members[group.rank()]), (n, dev.rank()));
                    cases.iter().try_for_each(|case| case.check_in(&group))
                });
                run.unwrap_or_else(|error| panic!("{way:?}, {members:?} of {of}: {error}"));
            }
        }
    }

    // Rows and columns of grids, by turns; all rows at once.
    4: fn rows_and_columns_of_grids(gpus) {
        let mut rng = Rng(12);
        for (rows, columns) in [(2, 2), (2, 3), (4, 2), (1, 4)] {
            let n = rows * columns;
            if n > gpus.up_to(8) {
                continue;
            }
            let mut prepared =
                |n| one_of_each(&mut rng, n).into_iter().map(|case| Prepared::<i32>::new(case, n)).collect();
            let (in_rows, in_columns): (Vec<_>, Vec<_>) = (prepared(columns), prepared(rows));
            rig::pool(gpus, n)
                .run(|dev, _| {
                    let (row, column) = (dev.rank() / columns, dev.rank() % columns);
                    let row = dev.group(&(0..columns).map(|c| row * columns + c).collect::<Vec<_>>())?;
                    let column = dev.group(&(0..rows).map(|r| r * columns + column).collect::<Vec<_>>())?;
                    for (a, b) in in_rows.iter().zip(&in_columns) {
                        a.check_in(&row)?;
                        b.check_in(&column)?;
                    }
                    sum_works(dev)
                })
                .unwrap();
        }
    }

    // Each with its neighbours: every member is in several groups, and all begin with the lowest.
    3: fn overlapping_groups_by_turns(gpus) {
        let n = gpus.up_to(6);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let me = dev.rank();
                let mut x = dev.upload(&vec![me as i64; 100])?;
                for first in 0..n - 1 {
                    if (first..first + 2).contains(&me) {
                        dev.group(&[first, first + 1])?.all_reduce(&mut x, ReduceOp::Sum)?;
                    }
                }
                for first in 0..n - 2 {
                    if (first..first + 3).contains(&me) {
                        dev.group(&[first + 2, first, first + 1])?.broadcast(&mut x, 0)?;
                    }
                }
                dev.download(&x)
            });
            // The same by hand.
            let mut x: Vec<i64> = (0..n as i64).collect();
            for first in 0..n - 1 {
                x[first] += x[first + 1];
                x[first + 1] = x[first];
            }
            for first in 0..n - 2 {
                x[first] = x[first + 2];
                x[first + 1] = x[first + 2];
            }
            assert_eq!(found.unwrap(), x.into_iter().map(|x| vec![x; 100]).collect::<Vec<_>>(), "{way:?}");
        }
    }

    // One communicator's work does not wait for another's: the first pair is done while the second has not even begun.
    4: fn groups_that_share_nobody_do_not_wait_for_each_other(gpus) {
        let pool = rig::pool(gpus, 4);
        let (told, heard) = std::sync::mpsc::channel();
        let heard = Mutex::new(heard);
        pool.run(|dev, _| match dev.rank() {
            0 | 1 => {
                sum_in(dev, &[0, 1])?;
                told.send(()).map_err(Error::custom)
            }
            _ => {
                if dev.rank() == 2 {
                    let heard = heard.lock();
                    for _ in 0..2 {
                        heard.recv_timeout(Duration::from_secs(300)).map_err(Error::custom)?;
                    }
                }
                sum_in(dev, &[3, 2])
            }
        })
        .unwrap();
    }

    // The same members in another order are another group; calls of one device are matched in the order of its calls.
    2: fn two_groups_of_the_same_members(gpus) {
        let found = rig::pool(gpus, 2).run(|dev, _| {
            let (a, b, again) = (dev.group(&[0, 1])?, dev.group(&[1, 0])?, dev.group(&[1, 0])?);
            let mut all = dev.zeros::<u32>(6)?;
            let own = dev.upload(&[dev.rank() as u32])?;
            for _ in 0..50 {
                a.all_gather(&own, &mut all.slice_mut(0..2))?;
                b.all_gather(&own, &mut all.slice_mut(2..4))?;
                again.all_gather(&own, &mut all.slice_mut(4..6))?;
            }
            dev.download(&all)
        });
        assert_eq!(found.unwrap(), [[0, 1, 1, 0, 1, 0]; 2]);
    }

    2: fn on_any_stream(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let streams = [dev.stream()?, dev.stream()?];
            let mut x = dev.upload(&vec![1.0f64; 5000])?;
            let ranks: Vec<usize> = (0..n).rev().collect();
            for k in 0..10 {
                let on = dev.on(&streams[k % 2]);
                on.group(&ranks)?.all_reduce(&mut x, ReduceOp::Avg)?;
                on.scale(&mut x, 2.0)?;
                dev.group(&ranks)?.broadcast(&mut x, k % n)?;
            }
            dev.download(&x)
        });
        for x in found.unwrap() {
            assert!(x.iter().all(|x| (x / 1024.0 - 1.0).abs() < 1e-12), "{}", x[0]);
        }
    }

    2: fn invalid_groups(gpus) {
        let n = gpus.up_to(3);
        rig::run(gpus, n, |dev| {
            let me = dev.rank();
            assert!(invalid(dev.group(&[me, n])).contains(&format!("rank {n} in a gang of {n}")));
            assert!(invalid(dev.group(&[me, (me + 1) % n, me])).contains("twice"));
            assert!(invalid(dev.group(&[(me + 1) % n])).contains("not in"));
            assert!(invalid(dev.group(&[])).contains("not in"));
            let group = dev.group(&[me])?;
            assert!(invalid(group.broadcast(&mut dev.zeros::<u8>(1)?, 1)).contains("root 1 of 1"));
            assert_eq!(format!("{group:?}"), format!("Group [{me}], rank 0"));
            sum_works(dev)
        });
    }

    1: fn a_group_of_one_needs_nobody(gpus) {
        let n = gpus.up_to(3);
        let cases: Vec<_> =
            one_of_each(&mut Rng(13), 1).into_iter().map(|case| Prepared::<half::f16>::new(case, 1)).collect();
        rig::pool(gpus, n)
            .run(|dev, _| {
                let alone = dev.group(&[dev.rank()])?;
                cases.iter().try_for_each(|case| case.check_in(&alone))
            })
            .unwrap();
    }

    // nccl#2353, and what hangs in every library: two members call two groups that they share, each in its own order.
    2: fn members_that_cross_get_an_error(gpus) {
        for n in [2, 3, 4] {
            if n > gpus.up_to(4) {
                continue;
            }
            let pool = rig::pool(gpus, n);
            for round in 0..5 {
                let told = Mutex::new(vec![None; n]);
                let error = failure(pool.run(|dev, _| {
                    let (me, all): (_, Vec<usize>) = (dev.rank(), (0..n).collect());
                    let mut other = all.clone();
                    other.rotate_left(1);
                    let both = if me == 0 { [&other, &all] } else { [&all, &other] };
                    let outcome = both.into_iter().try_for_each(|ranks| sum_in(dev, ranks));
                    told.lock()[me] = Some(outcome.clone().map_err(|error| error.to_string()));
                    outcome
                }));
                let told: Vec<_> = told.into_inner().into_iter().flatten().collect();
                assert!(told.len() == n && told.iter().all(Result::is_err), "round {round}: {told:?}");
                let Error::Mismatch { what: "group", a, b, .. } = &error else { panic!("round {round}: {error}") };
                assert!(*a == 0 || *b == 0, "device 0 is the one that crosses: {error}");
                assert!(error.to_string().contains("groups.rs"), "{error}");
                for error in told.into_iter().map(Result::unwrap_err) {
                    assert!(error.contains("do not match (group)"), "{error}");
                }
                assert_works(&pool);
            }
        }
    }

    // A circle of groups, each pair of which shares only one member: nobody has told anybody anything wrong, and nobody
    // gets on.
    3: fn a_circle_of_groups_comes_to_an_end(gpus) {
        let pool = rig::builder(gpus, 3).timeout(Duration::from_millis(1500)).build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let me = dev.rank();
            let (next, previous) = ((me + 1) % 3, (me + 2) % 3);
            sum_in(dev, &[me, next])?;
            sum_in(dev, &[previous, me])
        }));
        assert!(
            matches!(error, Error::Deadlock { .. } | Error::Timeout { .. } | Error::Mismatch { what: "group", .. }),
            "{error}"
        );
        assert_works(&pool);
    }

    // NeMo-RL#3591: after a failure the children of a communicator were left behind.
    3: fn a_group_works_after_another_one_has_failed(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::run(gpus, n, |dev| {
            for round in 0..5 {
                if dev.rank() < 2 {
                    let (pair, mut x) = (dev.group(&[1, 0])?, dev.zeros::<f32>(1 + dev.rank())?);
                    assert_eq!(mismatch(pair.all_reduce(&mut x, ReduceOp::Sum)).what, "count", "round {round}");
                    sum_in(dev, &[1, 0])?;
                }
                if dev.rank() > 0 {
                    sum_in(dev, &(1..n).collect::<Vec<_>>())?;
                }
                sum_works(dev)?;
            }
            Ok(())
        });
        // The same when the whole scope fails: all groups are aborted with it, whoever waits in which.
        for waits in 1..n {
            let error = failure(pool.run(|dev, _| match dev.rank() {
                0 => Err(Error::custom("no more")),
                // In a group that the failed one is not in, with a member that never comes.
                me if me == waits => {
                    let partner = if me == 1 { 2 } else { 1 };
                    let error = failure(sum_in(dev, &[me, partner]));
                    assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
                    Err(error)
                }
                _ => crate::support::until("the scope has failed", || dev.check().is_err()),
            }));
            assert_eq!(error.to_string(), "no more");
            assert_works(&pool);
            pool.run(|dev, _| if dev.rank() > 0 { sum_in(dev, &(1..n).collect::<Vec<_>>()) } else { Ok(()) }).unwrap();
        }
    }

    // 8 x 8 communicators took 16 s elsewhere (nccl#534); here they are made and used by the thousand.
    2: fn a_thousand_groups(gpus) {
        let n = gpus.up_to(4);
        let mut rng = Rng(14);
        let groups: Vec<Vec<usize>> = (0..1000)
            .map(|_| {
                let size = 1 + rng.below(n);
                rng.choose(size, n)
            })
            .collect();
        let found = rig::pool(gpus, n).run(|dev, _| {
            let mut x = dev.upload(&[1u64])?;
            for ranks in groups.iter().filter(|ranks| ranks.contains(&dev.rank())) {
                dev.group(ranks)?.all_reduce(&mut x, ReduceOp::Sum)?;
            }
            dev.download(&x)
        });
        let mut x = vec![1u64; n];
        for ranks in &groups {
            let sum = ranks.iter().fold(0u64, |sum, &r| sum.wrapping_add(x[r]));
            ranks.iter().for_each(|&r| x[r] = sum);
        }
        assert_eq!(found.unwrap(), x.into_iter().map(|x| vec![x]).collect::<Vec<_>>());
    }
}
