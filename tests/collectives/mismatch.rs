//! Calls that do not fit together: an error on every member, with both calls and their places, no buffer touched, and
//! the same scope goes on. PyTorch finds these with `TORCH_DISTRIBUTED_DEBUG=DETAIL` and a second process group
//! (`test_pg_wrapper.py`); without it they hang or give wrong sums (nccl#1417, nccl#1394: 409600 elements against
//! 409598).

use crate::{
    on_both, rig,
    rig::{assert_works, mismatch, sum_works},
    support::{failure, until},
};
use gpu_pool::{AsViewMut, Device, DeviceBuffer, Error, Group, ReduceOp};
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// What a member has to call with.
struct Own<'d> {
    all: Group<'d>,
    n: usize,
    x: DeviceBuffer<f32>,
    wide: DeviceBuffer<f64>,
    out: DeviceBuffer<f32>,
}

impl<'d> Own<'d> {
    fn new(all: Group<'d>) -> Result<Self, Error> {
        let (dev, n) = (all.device(), all.count());
        let own = || dev.upload(&vec![5.0f32; 4 * n]);
        Ok(Own { n, x: own()?, out: own()?, wide: dev.upload(&vec![5.0f64; 4 * n])?, all })
    }

    #[track_caller]
    fn assert_untouched(&self) -> Result<(), Error> {
        let (dev, expected) = (self.all.device(), vec![5.0f32; 4 * self.n]);
        assert_eq!(dev.download(&self.x)?, expected);
        assert_eq!(dev.download(&self.out)?, expected);
        assert_eq!(dev.download(&self.wide)?, vec![5.0f64; 4 * self.n]);
        Ok(())
    }
}

type Call = fn(&mut Own<'_>) -> Result<(), Error>;

/// What differs, what the others call, and what one calls.
const SITUATIONS: [(&str, Call, Call); 18] = [
    // test_collectives_op_mismatch
    ("operation", |o| o.all.all_reduce(&mut o.x, ReduceOp::Sum), |o| o.all.broadcast(&mut o.x, 0)),
    ("operation", |o| o.all.all_reduce(&mut o.x, ReduceOp::Sum), |o| o.all.reduce(&mut o.x, ReduceOp::Sum, 0)),
    ("operation", |o| o.all.all_to_all(&o.x, &mut o.out), |o| o.all.all_reduce_into(&o.x, &mut o.out, ReduceOp::Sum)),
    ("operation", |o| o.all.reduce_scatter_in_place(&mut o.x, ReduceOp::Sum), |o| o.all.all_gather_in_place(&mut o.x)),
    // In place and out of place are not the same call: a member could not know where a peer's result is to go.
    (
        "operation",
        |o| o.all.all_reduce(&mut o.out, ReduceOp::Sum),
        |o| o.all.all_reduce_into(&o.x, &mut o.out, ReduceOp::Sum),
    ),
    // test_collective_shape_mismatch
    (
        "count",
        |o| o.all.all_reduce(&mut o.x, ReduceOp::Sum),
        |o| o.all.all_reduce(&mut o.x.slice_mut(1..), ReduceOp::Sum),
    ),
    ("count", |o| o.all.broadcast(&mut o.x, 0), |o| o.all.broadcast(&mut o.x.slice_mut(..0), 0)),
    (
        "count",
        |o| o.all.all_gather(&o.x.slice(..4), &mut o.out),
        |o| o.all.all_gather(&o.x.slice(..3), &mut o.out.slice_mut(..3 * o.n)),
    ),
    (
        "count",
        |o| o.all.reduce_scatter(&o.x, &mut o.out.slice_mut(..4), ReduceOp::Sum),
        |o| o.all.reduce_scatter(&o.x.slice(..2 * o.n), &mut o.out.slice_mut(..2), ReduceOp::Sum),
    ),
    (
        "count",
        |o| o.all.all_to_all(&o.x, &mut o.out),
        |o| o.all.all_to_all(&o.x.slice(..o.n), &mut o.out.slice_mut(..o.n)),
    ),
    // One byte count, another type: PyTorch compares dtypes only in its wrapper.
    ("dtype", |o| o.all.all_reduce(&mut o.x, ReduceOp::Sum), |o| o.all.all_reduce(&mut o.wide, ReduceOp::Sum)),
    (
        "dtype",
        |o| o.all.broadcast(&mut o.x, 0),
        |o| {
            let mut ints = o.all.device().zeros::<i32>(4 * o.n)?;
            o.all.broadcast(&mut ints, 0)
        },
    ),
    ("reduce op", |o| o.all.all_reduce(&mut o.x, ReduceOp::Sum), |o| o.all.all_reduce(&mut o.x, ReduceOp::Max)),
    ("reduce op", |o| o.all.all_reduce(&mut o.x, ReduceOp::Sum), |o| o.all.all_reduce(&mut o.x, ReduceOp::Scaled(1.0))),
    ("root", |o| o.all.broadcast(&mut o.x, 0), |o| o.all.broadcast(&mut o.x, 1)),
    ("root", |o| o.all.reduce(&mut o.x, ReduceOp::Sum, 0), |o| o.all.reduce(&mut o.x, ReduceOp::Sum, 1)),
    ("counts", |o| gather_v(o, &counts(o.n, [4, 4])), |o| gather_v(o, &counts(o.n, [3, 5]))),
    // What one sends is not what the other receives.
    ("counts", |o| all_to_all_v(o, 4), |o| all_to_all_v(o, 3)),
];

/// The first two, and 4 for all others.
fn counts(n: usize, first: [usize; 2]) -> Vec<usize> {
    first.into_iter().chain(std::iter::repeat_n(4, n - 2)).collect()
}

#[track_caller]
fn gather_v(o: &mut Own<'_>, counts: &[usize]) -> Result<(), Error> {
    let (rank, x) = (o.all.rank(), &o.x);
    o.all.all_gather_v(&x.slice(..counts[rank]), &mut o.out, counts)
}

/// The next member gets so many elements, and expects 4.
#[track_caller]
fn all_to_all_v(o: &mut Own<'_>, to_next: usize) -> Result<(), Error> {
    let mut send = vec![4; o.n];
    send[(o.all.rank() + 1) % o.n] = to_next;
    let src = o.x.slice(..send.iter().sum::<usize>());
    o.all.all_to_all_v(&src, &send, &mut o.out, &vec![4; o.n])
}

/// The situation with the given number, with member `odd` as the one.
fn situation(all: Group<'_>, number: usize, odd: usize) -> Result<rig::Differs, Error> {
    let (_, usual, other) = SITUATIONS[number];
    let mut own = Own::new(all)?;
    let call = if own.all.rank() == odd { other } else { usual };
    let found = mismatch(call(&mut own));
    own.assert_untouched()?;
    Ok(found)
}

#[track_caller]
fn assert_told(number: usize, odd: usize, found: &[rig::Differs]) {
    let (what, ..) = SITUATIONS[number];
    let first = &found[0];
    // Everybody reads the same.
    assert!(found.iter().all(|other| other == first), "{found:#?}");
    assert_eq!(first.what, what, "{}", first.text);
    assert!(first.a.0 == odd || first.b.0 == odd, "{odd} is not named: {}", first.text);
    assert_ne!(first.a.0, first.b.0, "{}", first.text);
    for (device, call, site) in [&first.a, &first.b] {
        assert!(site.file().ends_with("mismatch.rs"), "{}", first.text);
        let (place, device) = (format!("{}:{}", site.file(), site.line()), format!("device {device} called {call}"));
        assert!(first.text.contains(&place) && first.text.contains(&device), "{}", first.text);
    }
    assert_ne!((first.a.2.line(), first.a.2.column()), (first.b.2.line(), first.b.2.column()), "{}", first.text);
}

on_both! {
    2: fn every_mismatch_is_told_to_all_with_both_places(gpus) {
        for n in [2, 3, 5] {
            if n > gpus.up_to(5) {
                continue;
            }
            let pool = rig::pool(gpus, n);
            for (number, (what, ..)) in SITUATIONS.iter().enumerate() {
                // A member that is not where the others' lists begin, and that one.
                for odd in [0, n - 1] {
                    println!("{n} devices: {what} ({number}), member {odd} differs");
                    let found = pool.run(|dev, _| {
                        let all = dev.group(&(0..n).collect::<Vec<_>>())?;
                        let found = situation(all, number, odd)?;
                        // The same scope goes on.
                        sum_works(dev)?;
                        Ok(found)
                    });
                    let found = found.unwrap();
                    assert_told(number, odd, &found);
                    if number + 1 == SITUATIONS.len() {
                        assert!(
                            found[0].text.contains("3 elements") && found[0].text.contains("4 elements"),
                            "{}",
                            found[0].text
                        );
                    }
                }
            }
            assert_works(&pool);
        }
    }

    // Members that are not in the group never hear of it.
    3: fn mismatches_within_a_group_stay_there(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        for number in 0..SITUATIONS.len() {
            let found = pool.run(|dev, _| {
                let found = match dev.rank() {
                    0 => None,
                    _ => Some(situation(dev.group(&(1..n).rev().collect::<Vec<_>>())?, number, 1)?),
                };
                sum_works(dev)?;
                Ok(found)
            });
            let found: Vec<_> = found.unwrap().into_iter().flatten().collect();
            // Rank 1 in the group of devices n - 1, .., 1.
            assert_told(number, n - 2, &found);
        }
    }

    // test_collective_hang: one calls a collective, the others a monitored barrier.
    2: fn a_collective_against_a_barrier(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; 9])?;
            let found = [
                mismatch(if dev.rank() == 0 { dev.barrier() } else { dev.all_reduce(&mut x, ReduceOp::Sum) }),
                mismatch(if dev.rank() == 1 { dev.barrier() } else { dev.exchange(7).map(drop) }),
                mismatch(if dev.rank() == 1 { dev.broadcast(&mut x, 0) } else { dev.exchange(7).map(drop) }),
            ];
            assert_eq!(dev.download(&x)?, [1.0; 9]);
            sum_works(dev)?;
            Ok(found)
        });
        for found in found.unwrap() {
            assert!(found.iter().all(|found| found.what == "operation"), "{found:?}");
            assert!(
                found[0].text.contains("barrier()") && found[0].text.contains("all_reduce(9 x F32, Sum)"),
                "{found:?}"
            );
        }
        assert_works(&pool);
    }

    2: fn a_member_that_has_left(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        for gone in [0, n - 1] {
            let error = failure(pool.run(|dev, _| match dev.rank() == gone {
                true => Ok(()),
                false => sum_works(dev),
            }));
            let Error::Mismatch { what: "participation", b, a_call, a_site, .. } = &error else { panic!("{error}") };
            assert!(*b == gone && a_call.contains("all_reduce(33 x F32, Sum)"), "{error}");
            assert!(a_site.file().ends_with("mismatch.rs") && error.to_string().contains("ended"), "{error}");
            assert_works(&pool);
        }
    }

    // Leaving is no failure of those who need nobody: the rest may go on without the one that has ended.
    3: fn those_who_stay_go_on_without_the_one_that_left(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let left = AtomicUsize::new(0);
        pool.run(|dev, _| {
            if dev.rank() == 1 {
                left.store(1, SeqCst);
                return Ok(());
            }
            until("the other has left", || left.load(SeqCst) == 1)?;
            let mut x = dev.upload(&[1.0f32; 10])?;
            let found = mismatch(dev.all_reduce(&mut x, ReduceOp::Sum));
            assert_eq!((found.what, found.b.0), ("participation", 1), "{}", found.text);
            let rest: Vec<usize> = (0..n).filter(|&rank| rank != 1).collect();
            dev.group(&rest)?.all_reduce(&mut x, ReduceOp::Sum)?;
            assert_eq!(dev.download(&x)?, [(n - 1) as f32; 10]);
            Ok(())
        })
        .unwrap();
        assert_works(&pool);
    }

    // A mismatch that the closure passes on: the cause is the scope's error, and the pool goes on.
    2: fn a_mismatch_that_is_passed_on_fails_the_scope(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for root in 0..2 {
            let found = mismatch(pool.run(|dev, _| {
                let mut x = dev.zeros::<u8>(100)?;
                dev.broadcast(&mut x, if dev.rank() == 0 { root } else { 1 - root })?;
                dev.download(&x)
            }));
            assert!(
                found.what == "root" && found.text.contains("root 0") && found.text.contains("root 1"),
                "{}",
                found.text
            );
            assert_works(&pool);
        }
    }

    // The sender has gone on, so it hears of it at its next call.
    2: fn what_is_received_must_be_what_was_sent(gpus) {
        let pool = rig::pool(gpus, 2);
        for what in ["count", "dtype"] {
            let found = mismatch(pool.run(|dev, _| {
                if dev.rank() == 0 {
                    dev.send(&dev.upload(&[1.0f32; 8])?, 1)?;
                    let error = failure(dev.barrier());
                    assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
                    return Err(error);
                }
                match what {
                    "count" => dev.recv(&mut dev.zeros::<f32>(7)?, 0),
                    _ => dev.recv(&mut dev.zeros::<u32>(8)?, 0),
                }
            }));
            assert_eq!((found.what, found.a.0, found.b.0), (what, 1, 0), "{}", found.text);
            assert!(found.text.contains("send(8 x F32)") && found.text.contains("recv("), "{}", found.text);
            assert_ne!(found.a.2.line(), found.b.2.line());
            assert_works(&pool);
        }
    }

    2: fn nobody_sends_what_is_waited_for(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let found = mismatch(pool.run(|dev, _| match dev.rank() {
            0 => dev.recv(&mut dev.zeros::<f32>(7)?, 1),
            _ => Ok(()),
        }));
        assert_eq!((found.what, found.a.0, found.b.0), ("participation", 0, 1), "{}", found.text);
        assert_works(&pool);
    }

    // A closure that skips one call and then meets the next: found at the first that is not alike, however far the
    // others are.
    2: fn a_call_that_one_member_skips(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::builder(gpus, n).build().unwrap();
        let found = mismatch(pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(64)?;
            for step in 0..10 {
                if step == 5 && dev.rank() == 1 {
                    continue;
                }
                dev.all_reduce(&mut x.slice_mut(step..), ReduceOp::Sum)?;
            }
            dev.synchronize()
        }));
        assert!(found.what == "count" && found.text.contains("59 x") && found.text.contains("58 x"), "{}", found.text);
        assert_works(&pool);
    }

    // Of two buffers that are both wrong, neither is touched, and one that is dropped at once is not used any more.
    2: fn a_refused_call_keeps_nothing(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::run(gpus, n, |dev| {
            for round in 0..20 {
                let mut x = dev.upload(&vec![1u32; 1000 + dev.rank()])?;
                let found = mismatch(dev.all_reduce(&mut x.view_mut(), ReduceOp::Sum));
                assert_eq!(found.what, "count", "round {round}");
            }
            sum_works(dev)
        });
        rig::assert_nothing_kept(&pool);
    }
}

/// `Device` and `Group` say the same of the same call.
#[test]
fn a_device_and_the_group_of_all_are_one() {
    let pool = crate::support::builder().host(2).build().unwrap();
    let sum = |dev: &Device, x: &mut DeviceBuffer<f32>| match dev.rank() {
        0 => dev.all_reduce(x, ReduceOp::Sum),
        _ => dev.group(&[0, 1])?.all_reduce(x, ReduceOp::Sum),
    };
    let found = pool.run(|dev, _| {
        let mut x = dev.upload(&[2.0f32])?;
        sum(dev, &mut x)?;
        dev.download(&x)
    });
    assert_eq!(found.unwrap(), [[4.0], [4.0]]);
}
