//! The cases.

use super::{Place, random, tag};
use gpu_pool::Error;
use gpu_pool_cluster::extend::Message;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// A name, and what is done.
type Case = (&'static str, fn(&Place<'_>));

/// All cases but the loss, which leaves a transport unusable.
pub(super) fn all(place: &Place<'_>) {
    let cases: [Case; 10] = [
        ("empty messages", empty),
        ("messages to itself", to_itself),
        ("each length between each two", lengths),
        ("parts of one buffer", parts_of_one_buffer),
        ("one tag stays in order", in_order),
        ("receives in another order", in_another_order),
        ("receives while a message comes", receives_while_it_comes),
        ("many threads", threads),
        ("tags that differ in one thing", close_tags),
        ("random sets", |place| random::fixed_sets().iter().for_each(|set| set.carry_out(place))),
    ];
    for (number, (name, case)) in cases.into_iter().enumerate() {
        place.meet(1000 + number as u64);
        case(place);
        if place.rank == 0 {
            println!("{}: {name}: ok", place.transport.name());
        }
    }
    place.meet(2000);
}

/// Between all, each of the lengths; with all in one call.
fn all_to_all(place: &Place<'_>, number: u64, len: impl Fn(usize, usize) -> usize) -> Vec<Message> {
    let (rank, hosts) = (place.rank, || 0..place.size);
    let sends = hosts().map(|to| place.send(to, tag(number, 0, 0), len(rank, to)));
    sends.chain(hosts().map(|from| place.receive(from, tag(number, 0, 0), len(from, rank)))).collect()
}

/// mpi4py's `test_msgzero`.
fn empty(place: &Place<'_>) {
    place.exchange(vec![]);
    place.exchange(all_to_all(place, 1, |_, _| 0));
    place.exchange(all_to_all(place, 2, |from, to| usize::from(from < to)));
}

fn to_itself(place: &Place<'_>) {
    let me = place.rank;
    for (number, len) in [0, 1, place.edge, 3 * place.edge + 1].into_iter().enumerate() {
        let tag = tag(10 + number as u64, 0, 1);
        place.exchange(vec![place.send(me, tag, len), place.receive(me, tag, len)]);
        place.exchange(vec![place.receive(me, tag, len), place.send(me, tag, len)]);
    }
}

/// The data check of nccl-tests, and MPI.jl's `largecount` with pieces that are smaller.
fn lengths(place: &Place<'_>) {
    let edge = place.edge;
    let lengths = [1, 2, 3, 63, 64, 65, 4096, edge - 25, edge - 24, edge - 1, edge, edge + 1, 2 * edge, 5 * edge + 3];
    for (number, len) in lengths.into_iter().enumerate() {
        place.exchange(all_to_all(place, 100 + number as u64, |_, _| len));
    }
}

/// `alltoallv` of MPI.jl and of mpi4py's `test_cco_vec`: another length for each pair, from one buffer.
fn parts_of_one_buffer(place: &Place<'_>) {
    let len = |from: usize, to: usize| (from * 5 + to * 3) % 7 * 100;
    let (me, tag) = (place.rank, tag(200, 3, 2));
    let ends: Vec<_> = (0..=place.size).map(|n| (0..n).map(|to| len(me, to)).sum::<usize>()).collect();
    let mut bytes = place.buffer(ends[place.size]);
    let all = bytes.as_mut_slice().unwrap();
    for to in 0..place.size {
        let part = &mut all[ends[to]..ends[to + 1]];
        part.iter_mut().enumerate().for_each(|(i, b)| *b = super::byte(me, to, tag, i));
    }
    let bytes = Arc::new(bytes);
    let send = |to| Message::Send { to, tag, bytes: bytes.clone(), range: ends[to]..ends[to + 1] };
    let sends: Vec<_> = (0..place.size).map(send).collect();
    place.exchange(
        sends.into_iter().chain((0..place.size).map(|from| place.receive(from, tag, len(from, me)))).collect(),
    );
}

/// Lengths that differ would be refused in another order.
fn in_order(place: &Place<'_>) {
    let tag = tag(300, 0, 0);
    let len = |i: usize| i * 37 % 401;
    let peers = || (0..place.size).flat_map(|peer| (0..50).map(move |i| (peer, i)));
    let sends = peers().map(|(peer, i)| place.send(peer, tag, len(i)));
    place.exchange(sends.chain(peers().map(|(peer, i)| place.receive(peer, tag, len(i)))).collect());
}

/// The last message is received first, in a call of its own.
fn in_another_order(place: &Place<'_>) {
    let (next, last) = ((place.rank + 1) % place.size, (place.rank + place.size - 1) % place.size);
    let len = |i: u64| 1 + i as usize * 97;
    thread::scope(|s| {
        s.spawn(|| place.exchange((0..20).map(|i| place.send(next, tag(400 + i, 0, 0), len(i))).collect()));
        for i in (0..20).rev() {
            place.exchange(vec![place.receive(last, tag(400 + i, 0, 0), len(i))]);
        }
    });
}

/// A small message stands behind a large one, whose receiver comes at any time of it.
fn receives_while_it_comes(place: &Place<'_>) {
    let (next, last) = ((place.rank + 1) % place.size, (place.rank + place.size - 1) % place.size);
    let large = 40 * place.edge + 1;
    for round in 0..10 {
        let (first, second) = (tag(450 + round, 0, 0), tag(450 + round, 1, 0));
        thread::scope(|s| {
            s.spawn(|| place.exchange(vec![place.send(next, first, large), place.send(next, second, 8)]));
            s.spawn(|| place.exchange(vec![place.receive(last, second, 8)]));
            thread::sleep(Duration::from_micros(300 * round));
            place.exchange(vec![place.receive(last, first, large)]);
        });
    }
}

/// mpi4py's and MPI.jl's `threads`: each thread has a rail, and none waits for another.
fn threads(place: &Place<'_>) {
    thread::scope(|s| {
        for rail in 0..6u32 {
            s.spawn(move || {
                for round in 0..15u64 {
                    let len = |from: usize, to: usize| {
                        (from * 131 + to * 57 + rail as usize * 911 + round as usize * 1009) % 5 * place.edge / 3
                    };
                    let tag = tag(500 + round, 0, rail);
                    let sends = (0..place.size).map(|to| place.send(to, tag, len(place.rank, to)));
                    let receives = (0..place.size).map(|from| place.receive(from, tag, len(from, place.rank)));
                    place.exchange(receives.chain(sends).collect());
                }
            });
        }
    });
}

fn close_tags(place: &Place<'_>) {
    let tags = [tag(600, 0, 0), tag(601, 0, 0), tag(600, 1, 0), tag(600, 15, 0), tag(600, 0, 1), tag(600, 0, 63)];
    let pairs = || (0..place.size).flat_map(|peer| tags.iter().rev().map(move |&tag| (peer, tag)));
    let sends = pairs().collect::<Vec<_>>().into_iter().rev().map(|(peer, tag)| place.send(peer, tag, 33));
    place.exchange(sends.chain(pairs().map(|(peer, tag)| place.receive(peer, tag, 33))).collect());
}

/// What is told as lost ends the wait with that error, and the memory stays.
pub(super) fn loss(place: &Place<'_>) {
    let (peer, start) = ((place.rank + 1) % place.size, Instant::now());
    let lost = || {
        let why = "the test says so".to_owned();
        (start.elapsed() > Duration::from_millis(30)).then(|| Error::HostLost { host: peer, op: "test", why })
    };
    let Message::Send { to, tag, bytes, range } = place.send(peer, tag(700, 0, 0), 64 * place.edge) else { return };
    let weak = Arc::downgrade(&bytes);
    // Nobody receives it, and nobody sends what is awaited.
    let messages = vec![Message::Send { to, tag, bytes, range }, place.receive(peer, super::tag(701, 0, 0), 8)];
    match place.transport.exchange(messages, &lost) {
        Err(Error::HostLost { host, .. }) => assert_eq!(host, peer),
        other => panic!("{:?}", other.map(|messages| messages.len())),
    }
    assert!(weak.upgrade().is_some(), "the memory of an unfinished message was freed");
}
