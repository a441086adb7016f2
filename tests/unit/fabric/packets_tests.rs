//! Packets carried on vectors do what the members' work does, which the plan's tests hold against what collectives
//! promise.

use super::*;
use crate::{
    collective::algorithm::ll_two_shot::two_trips,
    fabric::plan::{Side, Work},
};
use proptest::prelude::*;

/// `[member][element]`; sums are exact.
type Memory = Vec<Vec<i64>>;

/// All packets at once: what is sent is taken before anything is written.
fn push(of: impl Fn(usize) -> Packets, n: usize, sources: &mut Memory, destinations: Option<&mut Memory>) {
    let sends = |a: usize, b: usize| of(a).route.senders >> a & of(b).route.receivers >> b & 1 == 1;
    let mut moves = Vec::new();
    for (me, i) in (0..n).flat_map(|me| (0..of(me).each).map(move |i| (me, i))) {
        let packets = of(me);
        let sent = |a: usize| sources[a][of(a).source + me * packets.route.out as usize + i];
        let from: Vec<usize> = (0..n).filter(|&a| sends(a, me)).collect();
        if packets.route.folds == 1 && !from.is_empty() {
            assert_eq!(from.len(), n, "all are added up");
            moves.push((me, packets.destination + i, from.iter().map(|&a| sent(a)).sum()));
        } else {
            let to = |a: usize| packets.destination + a * packets.route.into as usize + i;
            moves.extend(from.iter().map(|&a| (me, to(a), sent(a))));
        }
    }
    let memory = destinations.unwrap_or(sources);
    moves.into_iter().for_each(|(member, at, value)| memory[member][at] = value);
}

/// The same by the plan.
fn work(shape: &Shape, n: usize, sources: &mut Memory, destinations: Option<&mut Memory>) {
    let mut moves = Vec::new();
    for me in 0..n {
        match shape.work(n, me, 4) {
            Work::Combine { len, sources: from, destinations: to } => {
                for i in 0..len {
                    let sum: i64 = from.iter().map(|place| sources[place.member][place.start + i]).sum();
                    moves.extend(to.iter().map(|place| (place.member, place.start + i, sum)));
                }
            }
            Work::Pairs(pairs) => {
                for pair in pairs {
                    assert_eq!((pair.from.side, pair.to.side), (Side::Source, Side::Destination));
                    let moved = |i| (pair.to.member, pair.to.start + i, sources[pair.from.member][pair.from.start + i]);
                    moves.extend((0..pair.len).map(moved));
                }
            }
        }
    }
    let memory = destinations.unwrap_or(sources);
    moves.into_iter().for_each(|(member, at, value)| memory[member][at] = value);
}

fn filled(n: usize, len: usize) -> Memory {
    (0..n).map(|k| (0..len).map(|i| (k as i64 + 1) * 1_000_003 + i as i64 * 7).collect()).collect()
}

proptest! {
    #[test]
    fn two_trips_do_what_one_does(n in 2usize..9, each in 1usize..20, in_place: bool) {
        let shape = Shape::AllReduce { len: each * n };
        let (mut x, mut y) = (filled(n, each * n), vec![vec![-1; each * n]; n]);
        let (mut wanted_x, mut wanted_y) = (x.clone(), y.clone());
        work(&shape, n, &mut wanted_x, (!in_place).then_some(&mut wanted_y));
        let trip = |k: usize| move |me| two_trips(&Shape::AllReduce { len: each * n }, n, me).unwrap()[k];
        push(trip(0), n, &mut x, (!in_place).then_some(&mut y));
        push(trip(1), n, if in_place { &mut x } else { &mut y }, None);
        prop_assert!(x == wanted_x && y == wanted_y, "{} each of {}", each, n);
    }

    #[test]
    fn packets_do_what_the_plan_does(n in 1usize..9, each in 0usize..20, root in 0usize..9) {
        let (root, all) = (root % n, each * n);
        let counts = Counts::Each(each);
        let table = vec![counts.clone(); n];
        let filled = |len| filled(n, len);
        let shapes = [
            (Shape::AllReduce { len: each }, false),
            (Shape::AllReduce { len: each }, true),
            (Shape::Reduce { len: each, root }, true),
            (Shape::ReduceScatter { counts: counts.clone(), in_place: false }, false),
            (Shape::ReduceScatter { counts: counts.clone(), in_place: true }, true),
            (Shape::AllGather { counts: counts.clone(), in_place: false }, false),
            (Shape::AllGather { counts: counts.clone(), in_place: true }, true),
            (Shape::Broadcast { len: each, root }, true),
            (Shape::Gather { counts: counts.clone(), root }, false),
            (Shape::Scatter { counts, root }, false),
            (Shape::AllToAll { send: table.clone(), receive: table }, false),
        ];
        for (shape, in_place) in shapes {
            let (mut x, mut y) = (filled(all), vec![vec![-1; all]; n]);
            let (mut wanted_x, mut wanted_y) = (x.clone(), y.clone());
            push(|me| shape.packets(n, me).unwrap(), n, &mut x, (!in_place).then_some(&mut y));
            work(&shape, n, &mut wanted_x, (!in_place).then_some(&mut wanted_y));
            prop_assert!(x == wanted_x && y == wanted_y, "{:?} of {}", shape, n);
        }
    }
}

#[test]
fn uneven_parts_are_no_packets() {
    let (even, uneven) = (Counts::Each(10), Counts::By([10, 11].into()));
    assert_eq!(Shape::AllGather { counts: uneven.clone(), in_place: false }.packets(2, 0), None);
    assert_eq!(Shape::Scatter { counts: uneven.clone(), root: 1 }.packets(2, 0), None);
    let table = Shape::AllToAll { send: vec![uneven, even.clone()], receive: vec![even.clone(), even] };
    assert_eq!(table.packets(2, 0), None);
    assert!(two_trips(&Shape::AllReduce { len: 10 }, 3, 0).is_none());
}
