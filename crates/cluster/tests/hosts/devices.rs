//! Groups of several processes over a transport between devices (`loopback`): whichever rails
//! a group has, and none.

use super::{combined, counts, numbers, part, sums};
use crate::loopback::Hosts;
use gpu_pool::{AsView, AsViewMut, DeviceBuffer, ReduceOp};
use gpu_pool_lab::{Check, prelude::*};
use proptest::prelude::*;

/// Between devices: sums by the transport and by own kernels, moves by messages.
#[test]
fn device_transports_carry_the_same() {
    for shape in [&[2, 2][..], &[2, 3], &[1, 1, 1]] {
        let (hosts, n) = (Hosts::on_devices(shape), shape.iter().sum::<usize>());
        for each in [0, 1, 5, 4001] {
            let counts = &counts(n, each)[..];
            let total = counts.iter().sum();
            let found = hosts.all(|dev| {
                let world = dev.world()?;
                let me = world.rank();
                let mut sum = dev.upload(&numbers(me, total))?;
                world.all_reduce(&mut sum, ReduceOp::Sum)?;
                let mut max = dev.upload(&numbers(me, total))?;
                world.all_reduce(&mut max, ReduceOp::Max)?;
                let mut mean = dev.upload(&vec![me as i32 * n as i32; each])?;
                world.all_reduce(&mut mean, ReduceOp::Avg)?;
                let (uneven, mut mine) = (dev.upload(&numbers(me, total))?, dev.zeros(counts[me])?);
                world.reduce_scatter_v(&uneven, &mut mine, counts, ReduceOp::Sum)?;
                let (own, mut all) = (dev.upload(&numbers(me, counts[me]))?, dev.zeros(total)?);
                world.all_gather_v(&own, &mut all, counts)?;
                let mut told = dev.upload(&numbers(me, each))?;
                world.broadcast(&mut told, n - 1)?;
                let (src, mut swapped) = (dev.upload(&numbers(me, n * 3))?, dev.zeros(n * 3)?);
                world.all_to_all(&src, &mut swapped)?;
                assert_eq!(dev.download(&mean)?, vec![(n * (n - 1) / 2) as i32; each]);
                let all = [dev.download(&sum)?, dev.download(&max)?, dev.download(&all)?, dev.download(&told)?];
                Ok((all, dev.download(&mine)?, dev.download(&swapped)?))
            });
            let gathered: Vec<f32> = (0..n).flat_map(|k| numbers(k, counts[k])).collect();
            let wanted = [sums(n, total), combined(n, total, f32::max), gathered, numbers(n - 1, each)];
            for (me, (all, mine, swapped)) in found.into_iter().enumerate() {
                assert!(all == wanted, "{shape:?} {each} {me}");
                assert_eq!(mine, sums(n, total)[part(counts, me)]);
                let from = |k: usize| numbers(k, n * 3)[me * 3..(me + 1) * 3].to_vec();
                assert_eq!(swapped, (0..n).flat_map(from).collect::<Vec<_>>());
            }
        }
    }
}

/// With one member in each process a collective is one call of the transport, in the callers' own memory.
#[test]
fn one_member_per_process_takes_one_call_and_no_scratch() {
    let hosts = Hosts::on_devices(&[1, 1, 1]);
    for each in [1, 1000, 1 << 20] {
        hosts.all(|dev| {
            let (world, n) = (dev.world()?, 3);
            let me = world.rank();
            let mail = &hosts.mails[me];
            let one = |name: &str, memory: &[(u64, usize, bool)]| {
                let calls = std::mem::take(&mut *mail.calls.lock());
                assert_eq!(calls.len(), 1, "{name}: {calls:?}");
                assert!(calls[0].0.starts_with(name) && calls[0].1 == memory, "{name}, {memory:?}: {calls:?}");
            };
            let (mut x, mut all) = (dev.upload(&numbers(me, each))?, dev.zeros::<f32>(n * each)?);
            let (whole, mut part) = (dev.upload(&numbers(me, n * each))?, dev.zeros::<f32>(each)?);
            let (bytes, at) = (4 * each, |buffer: &DeviceBuffer<f32>| buffer.view().address());
            dev.synchronize()?;
            world.barrier()?;
            mail.calls.lock().clear();
            let allocations = dev.stats().allocations;

            world.all_reduce_into(&whole, &mut all, ReduceOp::Sum)?;
            one("AllReduce", &[(at(&whole), n * bytes, false), (at(&all), n * bytes, true)]);
            assert_eq!(dev.download(&all)?, sums(n, n * each));
            world.reduce_scatter(&whole, &mut part, ReduceOp::Sum)?;
            one("ReduceScatter", &[(at(&whole), n * bytes, false), (at(&part), bytes, true)]);
            assert_eq!(dev.download(&part)?, sums(n, n * each)[me * each..(me + 1) * each]);
            world.all_gather(&x, &mut all)?;
            one("AllGather", &[(at(&x), bytes, false), (at(&all), n * bytes, true)]);
            assert_eq!(dev.download(&all)?, (0..n).flat_map(|k| numbers(k, each)).collect::<Vec<_>>());
            world.all_reduce(&mut x, ReduceOp::Sum)?;
            one("AllReduce", &[(at(&x), bytes, true)]);
            assert_eq!(dev.download(&x)?, sums(n, each));
            world.broadcast(&mut part, 1)?;
            one("Broadcast", &[(at(&part), bytes, true)]);
            assert_eq!(dev.download(&part)?, sums(n, n * each)[each..2 * each]);
            world.all_to_all(&whole, &mut all)?;
            let calls = std::mem::take(&mut *mail.calls.lock());
            let others: Vec<usize> = (1..n).map(|k| (me + k) % n).collect();
            let ends = |write| others.iter().map(move |host| (host * bytes, write));
            let at = |(start, write)| (at(if write { &all } else { &whole }) + start as u64, bytes, write);
            let mut found = calls[0].1.clone();
            let mut wanted: Vec<_> = ends(false).chain(ends(true)).map(at).collect();
            found.sort_unstable();
            wanted.sort_unstable();
            assert!(calls.len() == 1 && found == wanted, "{calls:?}, {wanted:?}");
            let swapped = (0..n).flat_map(|from| numbers(from, n * each)[me * each..(me + 1) * each].to_vec());
            assert_eq!(dev.download(&all)?, swapped.collect::<Vec<_>>());
            assert_eq!(dev.stats().allocations, allocations);
            Ok(())
        });
    }
}

/// What member `a` sends member `b`.
fn amount(a: usize, b: usize) -> usize {
    (a * 3 + b * 2) % 5 * 7
}

fn sent(a: usize, n: usize) -> Vec<usize> {
    (0..n).map(|b| amount(a, b)).collect()
}

/// All collectives of a group with these ranks, on all members of it, against plain sums.
fn all_of(hosts: &Hosts, ranks: &[usize], each: usize) {
    let n = ranks.len();
    let counts = &counts(n, each)[..];
    let total = counts.iter().sum();
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        if !ranks.contains(&world.rank()) {
            return Ok(None);
        }
        let group = world.group(ranks)?;
        let me = group.rank();
        let mut sum = dev.upload(&numbers(me, total))?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        let mut max = dev.upload(&numbers(me, total))?;
        group.all_reduce(&mut max, ReduceOp::Max)?;
        let mut mean = dev.upload(&vec![(me * n) as i32; each])?;
        group.all_reduce(&mut mean, ReduceOp::Avg)?;
        assert_eq!(dev.download(&mean)?, vec![(n * (n - 1) / 2) as i32; each]);
        let (uneven, mut mine) = (dev.upload(&numbers(me, total))?, dev.zeros(counts[me])?);
        group.reduce_scatter_v(&uneven, &mut mine, counts, ReduceOp::Sum)?;
        assert_eq!(dev.download(&mine)?, sums(n, total)[part(counts, me)]);
        let (own, mut all) = (dev.upload(&numbers(me, counts[me]))?, dev.zeros(total)?);
        group.all_gather_v(&own, &mut all, counts)?;
        let mut told = dev.upload(&numbers(me, each))?;
        group.broadcast(&mut told, n - 1)?;
        let from_all: Vec<usize> = (0..n).map(|from| amount(from, me)).collect();
        let source = dev.upload(&numbers(me, sent(me, n).iter().sum()))?;
        let mut swapped = dev.zeros(from_all.iter().sum())?;
        group.all_to_all_v(&source, &sent(me, n), &mut swapped, &from_all)?;
        let wanted =
            (0..n).flat_map(|from| numbers(from, sent(from, n).iter().sum())[part(&sent(from, n), me)].to_vec());
        assert_eq!(dev.download(&swapped)?, wanted.collect::<Vec<_>>(), "{ranks:?} {me}");
        let (own, mut gathered) = (dev.upload(&numbers(me, 9))?, dev.zeros(9 * n)?);
        group.gather(&own, (me == n / 2).then(|| gathered.view_mut()), n / 2)?;
        let wanted: Vec<f32> = (0..n).flat_map(|k| if me == n / 2 { numbers(k, 9) } else { vec![0.0; 9] }).collect();
        assert_eq!(dev.download(&gathered)?, wanted);
        let (whole, mut mine) = (dev.upload(&numbers(7, 4 * n))?, dev.zeros(4)?);
        group.scatter((me == 0).then(|| whole.view()), &mut mine, 0)?;
        assert_eq!(dev.download(&mine)?, numbers(7, 4 * n)[me * 4..(me + 1) * 4]);
        Ok(Some([dev.download(&sum)?, dev.download(&max)?, dev.download(&all)?, dev.download(&told)?]))
    });
    let gathered: Vec<f32> = (0..n).flat_map(|k| numbers(k, counts[k])).collect();
    let wanted = [sums(n, total), combined(n, total, f32::max), gathered, numbers(n - 1, each)];
    let mut members = 0;
    for found in found.into_iter().flatten() {
        assert!(found == wanted, "{ranks:?} {each}");
        members += 1;
    }
    assert_eq!(members, n);
}

/// The members' ordinals may differ, and a process may have more members than rails.
#[test]
fn groups_without_a_common_ordinal_work() {
    let hosts = Hosts::on_devices(&[2, 3]);
    for ranks in [&[0, 3][..], &[3, 0], &[1, 2], &[0, 1, 4], &[4, 0, 2], &[4, 3, 1], &[1, 3, 4]] {
        all_of(&hosts, ranks, 5);
    }
    all_of(&hosts, &[0, 3], 40_001);
}

/// Slices lie in the order of each process's members. With other orders in the processes an H200 once added up elements
/// that do not belong together.
#[test]
fn orders_of_ordinals_may_differ() {
    let hosts = Hosts::on_devices(&[2, 3]);
    for ranks in [&[2, 1, 3, 0][..], &[1, 2, 0, 3], &[1, 4, 0, 3, 2], &[0, 4, 3, 1]] {
        all_of(&hosts, ranks, 999);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]
    #[test]
    fn any_group_of_devices(
        shape in prop::collection::vec(1usize..4, 2..4),
        each in prop_oneof![Just(0usize), Just(1), 2usize..3000],
        take in any::<u64>(),
        keys in prop::collection::vec(any::<u8>(), 9),
    ) {
        let n: usize = shape.iter().sum();
        let mut ranks: Vec<usize> = (0..n).filter(|k| take >> k & 1 == 0).collect();
        ranks.sort_by_key(|&rank| keys[rank]);
        if ranks.len() > 1 {
            all_of(&Hosts::on_devices(&shape), &ranks, each);
        }
    }
}

#[test]
fn the_race_checker_is_content_with_detours() {
    let hosts = Hosts::on_devices_with(&[2, 2], |builder| builder.check(Check::Races));
    for ranks in [&[0, 3][..], &[0, 1, 2, 3], &[2, 1]] {
        all_of(&hosts, ranks, 999);
    }
}
