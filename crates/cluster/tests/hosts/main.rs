//! Groups of several processes, as pools of this process (`loopback`): every method against plain sums, and with
//! failures.

mod device_pieces;
mod devices;
mod failures;
mod gradients;
mod hand_over;
#[path = "../support/loopback/mod.rs"]
mod loopback;
#[cfg(target_os = "linux")]
mod own;
mod pieces;
mod rail_messages;
#[cfg(target_os = "linux")]
mod registered;
mod seen;
mod shared;
mod user_code;

use crate::loopback::Hosts;
use gpu_pool::extend::cluster::Call;
use gpu_pool::extend::train::{RowNorm, sum_and_norm};
use gpu_pool::{AsView, AsViewMut, DType, DeviceBuffer, Element, Group, ReduceOp};
use gpu_pool_cluster::prelude::*;
use gpu_pool_lab::{Check, prelude::*};
use internals::*;
use proptest::prelude::*;

/// The methods of the runtime's private parts.
mod internals {
    pub use gpu_pool::extend::cluster::{
        BufferInternals as _, DeviceInternals as _, GroupInternals as _, PinnedInternals as _,
    };
}

const SHAPES: [&[usize]; 5] = [&[2, 2], &[2, 3], &[2, 1, 3], &[1, 1, 1, 1], &[1, 2]];
const LENS: [usize; 6] = [0, 1, 2, 7, 61, 30_011];

/// Numbers whose sums are exact in any order.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 64) as f32 - 20.0).collect()
}

fn combined(n: usize, len: usize, with: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    let mut all = (0..n).map(|rank| numbers(rank, len));
    let first = all.next().unwrap();
    all.fold(first, |sum, x| sum.iter().zip(x).map(|(a, b)| with(*a, b)).collect())
}

fn sums(n: usize, len: usize) -> Vec<f32> {
    combined(n, len, |a, b| a + b)
}

/// Uneven parts of `n` members.
fn counts(n: usize, each: usize) -> Vec<usize> {
    (0..n).map(|k| if k == 1 { 0 } else { each + k * 3 }).collect()
}

fn part(counts: &[usize], k: usize) -> std::ops::Range<usize> {
    let start = counts[..k].iter().sum();
    start..start + counts[k]
}

#[test]
fn all_reduce_adds_up() {
    for shape in SHAPES {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum());
        for len in LENS {
            let found = hosts.all(|dev| {
                let world = dev.world()?;
                assert_eq!((world.count(), world.place(world.rank()).1), (n, dev.index()));
                let mut x = dev.upload(&numbers(world.rank(), len))?;
                world.all_reduce(&mut x, ReduceOp::Sum)?;
                let source = dev.upload(&numbers(world.rank(), len))?;
                let mut into = dev.zeros(len)?;
                world.all_reduce_into(&source, &mut into, ReduceOp::Max)?;
                Ok((dev.download(&x)?, dev.download(&into)?, dev.download(&source)? == numbers(world.rank(), len)))
            });
            let (sum, max) = (sums(n, len), combined(n, len, f32::max));
            assert!(found.iter().all(|found| *found == (sum.clone(), max.clone(), true)), "{shape:?} {len}");
        }
    }
}

/// Of several processes it is three calls.
#[test]
fn a_norm_behind_a_sum() {
    for shape in SHAPES {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let (mut x, mut residual) = (dev.upload(&[1.0f32; 6])?, dev.upload(&[0.5f32; 6])?);
            let gamma = dev.upload(&[2.0f32, 3.0, 4.0])?;
            let norm = RowNorm::rms(&gamma, 0.0);
            let (sum, to) = (x.view_mut(), residual.view_mut());
            sum_and_norm("all_reduce_norm", &world, None, to, sum, &norm, |mut residual, mut sum, _| {
                dev.axpy(1.0, &sum, &mut residual)?;
                // The norm of equal numbers.
                dev.upload_into(&dev.download(&gamma)?.repeat(2), &mut sum)
            })?;
            assert!(!world.explain_norm(DType::F32, 2, 3)?.reason.contains("residual"));
            Ok((dev.download(&x)?, dev.download(&residual)?))
        });
        let wanted = ([2.0, 3.0, 4.0].repeat(2), vec![n as f32 + 0.5; 6]);
        assert!(found.iter().all(|found| *found == wanted), "{shape:?}: {found:?}");
    }
}

#[test]
fn sums_reach_their_owners() {
    for shape in SHAPES {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        for each in [0, 1, 5, 4001] {
            let counts = &counts(n, each)[..];
            let total = counts.iter().sum();
            let found = hosts.all(|dev| {
                let world = dev.world()?;
                let me = world.rank();
                let mut reduced = dev.upload(&numbers(me, each))?;
                world.reduce(&mut reduced, ReduceOp::Sum, n - 1)?;
                let (source, mut own) = (dev.upload(&numbers(me, n * each))?, dev.zeros(each)?);
                world.reduce_scatter(&source, &mut own, ReduceOp::Sum)?;
                let (uneven, mut mine) = (dev.upload(&numbers(me, total))?, dev.zeros(counts[me])?);
                world.reduce_scatter_v(&uneven, &mut mine, counts, ReduceOp::Sum)?;
                let mut in_place = dev.upload(&numbers(me, n * each))?;
                world.reduce_scatter_in_place(&mut in_place, ReduceOp::Sum)?;
                let in_place = dev.download(&in_place)?[me * each..(me + 1) * each].to_vec();
                Ok((dev.download(&reduced)?, dev.download(&own)?, dev.download(&mine)?, in_place))
            });
            for (me, (reduced, own, mine, in_place)) in found.into_iter().enumerate() {
                let root = if me == n - 1 { sums(n, each) } else { numbers(me, each) };
                assert_eq!(reduced, root, "{shape:?} {each} {me}");
                assert_eq!(own, sums(n, n * each)[me * each..(me + 1) * each]);
                assert_eq!(in_place, own);
                assert_eq!(mine, sums(n, total)[part(counts, me)]);
            }
        }
    }
}

#[test]
fn elements_reach_everybody() {
    for shape in SHAPES {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        for each in [0, 1, 5, 4001] {
            let counts = &counts(n, each)[..];
            let found = hosts.all(|dev| {
                let world = dev.world()?;
                let me = world.rank();
                let (own, mut all) = (dev.upload(&numbers(me, each))?, dev.zeros(n * each)?);
                world.all_gather(&own, &mut all)?;
                let (mine, mut uneven) = (dev.upload(&numbers(me, counts[me]))?, dev.zeros(counts.iter().sum())?);
                world.all_gather_v(&mine, &mut uneven, counts)?;
                let mut in_place = dev.upload(&numbers(me, n * each))?;
                world.all_gather_in_place(&mut in_place)?;
                let mut told = dev.upload(&numbers(me, each))?;
                world.broadcast(&mut told, 1)?;
                world.barrier()?;
                Ok([dev.download(&all)?, dev.download(&uneven)?, dev.download(&in_place)?, dev.download(&told)?])
            });
            let all: Vec<f32> = (0..n).flat_map(|k| numbers(k, each)).collect();
            let uneven: Vec<f32> = (0..n).flat_map(|k| numbers(k, counts[k])).collect();
            let parts = (0..n).flat_map(|k| numbers(k, n * each)[k * each..(k + 1) * each].to_vec());
            let wanted = [all, uneven, parts.collect(), numbers(1, each)];
            assert!(found.iter().all(|found| *found == wanted), "{shape:?} {each}");
        }
    }
}

#[test]
fn elements_reach_each_other() {
    for shape in SHAPES {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        // What member `a` sends member `b`.
        let amount = |a: usize, b: usize| (a * 3 + b * 2) % 5 * 7;
        let for_all = |a: usize| (0..n).map(|b| amount(a, b)).collect::<Vec<_>>();
        let from_all = |b: usize| (0..n).map(|a| amount(a, b)).collect::<Vec<_>>();
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let me = world.rank();
            let (src, mut even) = (dev.upload(&numbers(me, n * 3))?, dev.zeros(n * 3)?);
            world.all_to_all(&src, &mut even)?;
            let (send, receive) = (for_all(me), from_all(me));
            let (src, mut uneven) = (dev.upload(&numbers(me, send.iter().sum()))?, dev.zeros(receive.iter().sum())?);
            world.all_to_all_v(&src, &send, &mut uneven, &receive)?;
            let (own, mut all) = (dev.upload(&numbers(me, 9))?, dev.zeros(9 * n)?);
            world.gather(&own, (me == 1).then(|| all.view_mut()), 1)?;
            let (whole, mut mine) = (dev.upload(&numbers(7, 4 * n))?, dev.zeros(4)?);
            world.scatter((me == n - 1).then(|| whole.view()), &mut mine, n - 1)?;
            Ok([dev.download(&even)?, dev.download(&uneven)?, dev.download(&all)?, dev.download(&mine)?])
        });
        for (me, [even, uneven, all, mine]) in found.into_iter().enumerate() {
            let from = |k: usize| numbers(k, n * 3)[me * 3..(me + 1) * 3].to_vec();
            assert_eq!(even, (0..n).flat_map(from).collect::<Vec<_>>(), "{shape:?} {me}");
            let from = |k: usize| numbers(k, for_all(k).iter().sum())[part(&for_all(k), me)].to_vec();
            assert_eq!(uneven, (0..n).flat_map(from).collect::<Vec<_>>(), "{shape:?} {me}");
            let gathered = (0..n).flat_map(|k| if me == 1 { numbers(k, 9) } else { vec![0.0; 9] });
            assert_eq!(all, gathered.collect::<Vec<_>>());
            assert_eq!(mine, numbers(7, 4 * n)[me * 4..(me + 1) * 4]);
        }
    }
}

/// Every operation on a type, for numbers whose results are exact.
fn operations<T: Element + PartialEq + std::fmt::Debug>(hosts: &Hosts, n: usize, of: impl Fn(u32) -> T + Sync) {
    let run = |op: ReduceOp, own: &(dyn Fn(usize) -> u32 + Sync)| -> T {
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let mut x = dev.upload(&[of(own(world.rank())); 3])?;
            let scaled = matches!(op, ReduceOp::Scaled(_));
            let op = if scaled { ReduceOp::Scaled((1 + world.rank()) as f64) } else { op };
            world.all_reduce(&mut x, op)?;
            dev.download(&x)
        });
        assert!(found.iter().flatten().all(|x| *x == found[0][0]), "{op:?} {found:?}");
        found[0][0]
    };
    let ranks = || 0..n as u32;
    assert_eq!(run(ReduceOp::Sum, &|k| k as u32), of(ranks().sum()));
    assert_eq!(run(ReduceOp::Avg, &|_| 6), of(6));
    assert_eq!(run(ReduceOp::Min, &|k| k as u32 + 2), of(2));
    assert_eq!(run(ReduceOp::Max, &|k| k as u32), of(n as u32 - 1));
    assert_eq!(run(ReduceOp::Prod, &|k| if k < 2 { 2 } else { 1 }), of(4));
    assert_eq!(run(ReduceOp::Scaled(0.0), &|_| 2), of(ranks().map(|k| (k + 1) * 2).sum()));
}

#[test]
fn all_types_and_operations() {
    let hosts = Hosts::new(&[2, 1]);
    operations(&hosts, 3, |x| x as f32);
    operations(&hosts, 3, f64::from);
    operations(&hosts, 3, |x| half::f16::from_f32(x as f32));
    operations(&hosts, 3, |x| half::bf16::from_f32(x as f32));
    operations(&hosts, 3, |x| x as i8);
    operations(&hosts, 3, |x| x as u8);
    operations(&hosts, 3, |x| x as i32);
    operations(&hosts, 3, |x| x);
    operations(&hosts, 3, i64::from);
    operations(&hosts, 3, u64::from);
}

/// Half types are rounded inside each process, and once more between them.
#[test]
fn halves_are_rounded_once_per_level() {
    let bf16 = half::bf16::from_f32;
    let found = Hosts::new(&[2, 2]).all(|dev| {
        let world = dev.world()?;
        let mut x = dev.upload(&[bf16([1.0, 1.0 / 256.0, 1.0, 3.0 / 256.0][world.rank()])])?;
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        Ok(dev.download(&x)?[0])
    });
    // 1 + 1/256 is a tie, which goes to the even 1; 1 + 3/256 to the even 1 + 4/256.
    assert_eq!(found, [bf16(2.0 + 4.0 / 256.0); 4]);
}

#[test]
fn messages_cannot_deadlock() {
    let hosts = Hosts::new(&[2, 3]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let (n, me) = (world.count(), world.rank());
        let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
        for round in 0..3 {
            world.send(&dev.upload(&numbers(me + round, 1000))?, next)?;
        }
        world.send_owned(dev.upload(&vec![me as u8; me + 1])?, previous)?;
        let mut x = dev.zeros::<f32>(1000)?;
        let mut right = true;
        for round in 0..3 {
            world.recv(&mut x, previous)?;
            right &= dev.download(&x)? == numbers(previous + round, 1000);
        }
        let any: DeviceBuffer<u8> = world.recv_any(next)?;
        Ok(right && dev.download(&any)? == vec![next as u8; next + 1])
    });
    assert_eq!(found, [true; 5]);
}

#[test]
fn groups_cross_processes() {
    let hosts = Hosts::new(&[2, 2, 2]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let sum = |group: &Group<'_>| {
            let mut x = dev.upload(&[1 << (8 * (me % 4)), me as u32])?;
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        };
        // The other way round, one host's own, and one that crosses local indexes.
        let column = sum(&world.group(&if me % 2 == 0 { [4, 2, 0] } else { [1, 5, 3] })?)?[1];
        let row = sum(&world.group(&[me / 2 * 2 + 1, me / 2 * 2])?)?[1];
        let crossed = match me {
            0 | 3 => sum(&world.group(&[3, 0])?)?[1],
            _ => sum(&world.group(&[5, 4, 2, 1])?)?[1],
        };
        let again = world.group(&[5, 3, 1, 0, 2, 4])?;
        let mut ranks = dev.zeros::<u32>(6)?;
        again.all_gather(&dev.upload(&[me as u32])?, &mut ranks)?;
        Ok((column, row, crossed, dev.download(&ranks)?, again.rank()))
    });
    for (me, (column, row, crossed, ranks, rank)) in found.into_iter().enumerate() {
        let crossed_sum = if [0, 3].contains(&me) { 3 } else { 12 };
        assert_eq!((column, row), ([6, 9][me % 2], [1, 5, 9][me / 2]), "{me}");
        assert_eq!((crossed, ranks, [5, 3, 1, 0, 2, 4][rank]), (crossed_sum, vec![5, 3, 1, 0, 2, 4], me));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Random shapes, groups and lengths; the bits are equal on all members.
    #[test]
    fn any_group_adds_up(
        shape in prop::collection::vec(1usize..4, 2..4),
        len in 0usize..3000,
        take in any::<u64>(),
        seed in any::<u64>(),
    ) {
        let hosts = Hosts::new(&shape);
        let n: usize = shape.iter().sum();
        let mut ranks: Vec<usize> = (0..n).filter(|k| take >> k & 1 == 0).collect();
        let by = (seed % (ranks.len().max(1) as u64)) as usize;
        ranks.rotate_left(by);
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            if !ranks.contains(&world.rank()) {
                return Ok(None);
            }
            let group = world.group(&ranks)?;
            let mut x = dev.upload(&numbers(world.rank(), len))?;
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            // Sums that are not exact.
            let mut y: Vec<f32> = (0..len).map(|i| ((i * 31 + world.rank()) as f32).sin() / 3.0).collect();
            let mut inexact = dev.upload(&y)?;
            group.all_reduce(&mut inexact, ReduceOp::Avg)?;
            y = dev.download(&inexact)?;
            Ok(Some((dev.download(&x)?, y.into_iter().map(f32::to_bits).collect::<Vec<_>>())))
        });
        let found: Vec<_> = found.into_iter().flatten().collect();
        let wanted = (0..len).map(|i| ranks.iter().map(|&k| ((i * 7 + k * 13) % 64) as f32 - 20.0).sum::<f32>());
        let wanted: Vec<f32> = wanted.collect();
        for own in &found {
            prop_assert_eq!(&own.0, &wanted);
            prop_assert_eq!(&own.1, &found[0].1);
        }
    }
}

#[test]
fn the_race_checker_is_content() {
    let hosts = Hosts::with(&[2, 2], |builder| builder.check(Check::Races));
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let mut x = dev.upload(&numbers(me, 999))?;
        let side = dev.stream()?;
        dev.on(&side).scale(&mut x, 1.0)?;
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        let (mut own, mut all) = (dev.zeros::<f32>(3)?, dev.zeros::<f32>(12)?);
        world.reduce_scatter(&x.slice(..12), &mut own, ReduceOp::Max)?;
        world.all_gather(&own, &mut all)?;
        let mut swapped = dev.zeros::<f32>(12)?;
        world.all_to_all(&all, &mut swapped)?;
        world.send(&x, (me + 1) % 4)?;
        world.recv(&mut x, (me + 3) % 4)?;
        Ok((dev.download(&x)?, dev.download(&all)?))
    });
    assert!(found.iter().all(|(x, all)| *x == sums(4, 999) && *all == sums(4, 12)));
}

#[test]
fn values_of_serde_are_exchanged() {
    let found = Hosts::new(&[2, 1]).all(|dev| {
        let world = dev.world()?;
        world.exchange_serde(&(world.rank(), "x".repeat(3000 * world.rank()), Some(0.5)))
    });
    let wanted: Vec<_> = (0..3).map(|rank| (rank, "x".repeat(3000 * rank), Some(0.5))).collect();
    assert!(found.iter().all(|found| *found == wanted));
}

#[test]
fn bytes_of_any_length_are_exchanged() {
    let hosts = Hosts::new(&[2, 1]);
    for lens in [[0, 1, 2], [10_000, 0, 3], [5, 5, 90_000]] {
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let call = Call::new("exchange");
            world.exchange_bytes(&call, vec![world.rank() as u8; lens[world.rank()]])
        });
        let wanted: Vec<Vec<u8>> = (0..3).map(|rank| vec![rank as u8; lens[rank]]).collect();
        assert!(found.iter().all(|found| *found == wanted));
    }
}
