//! Every member's part, carried out on vectors in any order of members, gives what the collective promises.

use super::*;
use proptest::prelude::*;

/// `[member][element]`; sums are exact.
pub(crate) type Memory = Vec<Vec<u64>>;

/// Carries out the work of all members, one after the other.
fn run(
    shape: &Shape,
    n: usize,
    grain: usize,
    order: &[usize],
    sources: &mut Memory,
    destinations: Option<&mut Memory>,
) {
    let mut none = Memory::new();
    let in_place = destinations.is_none();
    let destinations = destinations.unwrap_or(&mut none);
    let mut written = std::collections::HashSet::new();
    for &me in order {
        let mut moves = Vec::new();
        match shape.work(n, me, grain) {
            Work::Combine { len, sources: from, destinations: to } => {
                for i in 0..len {
                    let sum = from.iter().map(|place| sources[place.member][place.start + i]).sum::<u64>();
                    moves.extend(to.iter().map(|place| (*place, i, sum)));
                }
                assert!(from.iter().chain(&to).all(|place| shape.touches(me, place.member)));
            }
            Work::Pairs(pairs) => {
                for pair in pairs {
                    moves.extend((0..pair.len).map(|i| (pair.to, i, sources[pair.from.member][pair.from.start + i])));
                }
            }
        }
        for (place, i, value) in moves {
            assert!(written.insert((place.member, place.start + i)), "{shape:?}: two members write to one place");
            let memory = if in_place { &mut *sources } else { &mut *destinations };
            memory[place.member][place.start + i] = value;
        }
    }
}

pub(crate) fn value(member: usize, i: usize) -> u64 {
    (member as u64 + 1) * 1_000_003 + i as u64 * 7
}

pub(crate) fn filled(n: usize, len: impl Fn(usize) -> usize) -> Memory {
    (0..n).map(|k| (0..len(k)).map(|i| value(k, i)).collect()).collect()
}

pub(crate) fn empty(n: usize, len: impl Fn(usize) -> usize) -> Memory {
    (0..n).map(|k| vec![1; len(k)]).collect()
}

/// Checks all-reduce in place and into other memory, reduce, and broadcast. `sum` is the expected sum of an element.
pub(crate) fn check_whole(
    n: usize,
    len: usize,
    root: usize,
    sum: impl Fn(usize) -> u64,
    run: impl Fn(&Shape, &mut Memory, Option<&mut Memory>),
) {
    let summed = |x: &Memory| x.iter().all(|x| (0..len).all(|i| x[i] == sum(i)));
    let mut x = filled(n, |_| len);
    run(&Shape::AllReduce { len }, &mut x, None);
    assert!(summed(&x));

    let (mut x, mut y) = (filled(n, |_| len), empty(n, |_| len));
    run(&Shape::AllReduce { len }, &mut x, Some(&mut y));
    assert!(x == filled(n, |_| len) && summed(&y));

    let mut x = filled(n, |_| len);
    run(&Shape::Reduce { len, root }, &mut x, None);
    for (k, x) in x.iter().enumerate() {
        let expected = |i| if k == root { sum(i) } else { value(k, i) };
        assert!((0..len).all(|i| x[i] == expected(i)));
    }

    let mut x = filled(n, |_| len);
    run(&Shape::Broadcast { len, root }, &mut x, None);
    assert!(x.iter().all(|x| (0..len).all(|i| x[i] == value(root, i))));
}

fn sum(n: usize, i: usize) -> u64 {
    (0..n).map(|k| value(k, i)).sum()
}

proptest! {
    #[test]
    fn every_collective_does_what_it_says(
        n in 1usize..9,
        len in 0usize..70,
        grain in prop::sample::select(vec![1usize, 4, 32]),
        root in 0usize..9,
        counts in prop::collection::vec(0usize..9, 9),
        table in prop::collection::vec(prop::collection::vec(0usize..5, 9), 9),
        order in Just((0..9).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let (root, order) = (root % n, order.into_iter().filter(|&k| k < n).collect::<Vec<_>>());
        let run = |shape: &Shape, from: &mut Memory, to: Option<&mut Memory>| run(shape, n, grain, &order, from, to);

        check_whole(n, len, root, |i| sum(n, i), run);

        for counts in [Counts::Each(len / 3), Counts::By(counts[..n].into())] {
            let all = counts.total(n);
            let (mut x, mut y) = (filled(n, |_| all), empty(n, |k| counts.part(k).len()));
            run(&Shape::ReduceScatter { counts: counts.clone(), in_place: false }, &mut x, Some(&mut y));
            prop_assert!((0..n).all(|k| counts.part(k).enumerate().all(|(at, i)| y[k][at] == sum(n, i))));

            let mut x = filled(n, |_| all);
            run(&Shape::ReduceScatter { counts: counts.clone(), in_place: true }, &mut x, None);
            prop_assert!((0..n).all(|k| counts.part(k).all(|i| x[k][i] == sum(n, i))));

            let (mut x, mut y) = (filled(n, |k| counts.part(k).len()), empty(n, |_| all));
            run(&Shape::AllGather { counts: counts.clone(), in_place: false }, &mut x, Some(&mut y));
            let gathered = |y: &[u64]| (0..n).all(|k| counts.part(k).enumerate().all(|(at, i)| y[i] == value(k, at)));
            prop_assert!(y.iter().all(|y| gathered(y)));

            let mut x = filled(n, |_| all);
            run(&Shape::AllGather { counts: counts.clone(), in_place: true }, &mut x, None);
            prop_assert!(x.iter().all(|x| (0..n).all(|k| counts.part(k).all(|i| x[i] == value(k, i)))));

            let (mut x, mut y) = (filled(n, |k| counts.part(k).len()), empty(n, |k| if k == root { all } else { 0 }));
            run(&Shape::Gather { counts: counts.clone(), root }, &mut x, Some(&mut y));
            prop_assert!(gathered(&y[root]));

            let (mut x, mut y) = (filled(n, |k| if k == root { all } else { 0 }), empty(n, |k| counts.part(k).len()));
            run(&Shape::Scatter { counts: counts.clone(), root }, &mut x, Some(&mut y));
            prop_assert!((0..n).all(|k| counts.part(k).enumerate().all(|(at, i)| y[k][at] == value(root, i))));
        }

        let send: Vec<Counts> = (0..n).map(|a| Counts::By(table[a][..n].into())).collect();
        let receive: Vec<Counts> = (0..n).map(|b| Counts::By((0..n).map(|a| table[a][b]).collect())).collect();
        let shape = Shape::AllToAll { send: send.clone(), receive: receive.clone() };
        prop_assert_eq!(shape.disagreement(n), None);
        let (mut x, mut y) = (filled(n, |a| send[a].total(n)), empty(n, |b| receive[b].total(n)));
        run(&shape, &mut x, Some(&mut y));
        for (a, b) in (0..n).flat_map(|a| (0..n).map(move |b| (a, b))) {
            let (out, into) = (send[a].part(b), receive[b].part(a));
            prop_assert!(out.zip(into).all(|(i, at)| y[b][at] == value(a, i)));
        }
        if n > 1 {
            let mut wrong = send;
            wrong[1] = Counts::By(table[1][..n].iter().enumerate().map(|(b, c)| c + usize::from(b == 0)).collect());
            prop_assert_eq!(Shape::AllToAll { send: wrong, receive }.disagreement(n), Some((1, 0)));
        }
    }
}

#[test]
fn slices_begin_at_the_grain_and_cover_everything() {
    for (n, len, grain) in [(3, 1000, 32), (8, 5, 32), (7, 0, 4), (5, 12_345, 64)] {
        let slices: Vec<_> = (0..n).map(|k| slice(k, n, len, grain)).collect();
        assert_eq!((slices[0].start, slices[n - 1].end), (0, len));
        assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(slices.iter().all(|slice| slice.is_empty() || slice.start.is_multiple_of(grain)));
    }
}
