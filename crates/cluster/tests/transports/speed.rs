//! Times of a transport between two processes, for people. `GPU_POOL_LONG=1 cargo test --release --lib speed_of --
//! --nocapture` prints them.

use super::{Place, tag};
use gpu_pool::PinnedBuffer;
use gpu_pool_cluster::extend::Message;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Medians of what the first two processes do.
pub(super) fn measure(place: &Place<'_>) {
    if place.rank > 1 {
        return;
    }
    let name = place.transport.name();
    for (len, rounds) in [(4, 2000), (64 << 10, 500), (1 << 20, 100), (16 << 20, 20)] {
        let there_and_back = median(place, rounds, 0, len, len, false) / 2;
        let one_way = median(place, rounds, 1, len, 0, false);
        let both = median(place, rounds, 2, len, len, true);
        if place.rank == 0 {
            let speed = |time: Duration| len as f64 / time.as_secs_f64() / 1e9;
            println!(
                "{name}: {len} B: {:.1} us, {:.2} GB/s one way; {:.1} us, {:.2} GB/s each way at once",
                there_and_back.as_secs_f64() * 1e6,
                speed(one_way),
                both.as_secs_f64() * 1e6,
                speed(both),
            );
        }
    }
    // What two rails of two processes do for an all-reduce of 16 MiB: each swaps a quarter, two times.
    let start = Instant::now();
    const ROUNDS: usize = 10;
    thread::scope(|s| {
        (0..2).for_each(|rail| drop(s.spawn(move || median(place, 2 * ROUNDS, 10 + rail, 4 << 20, 4 << 20, true))));
    });
    if place.rank == 0 {
        println!(
            "{name}: the messages of an all-reduce of 16 MiB: {:.2} ms",
            start.elapsed().as_secs_f64() * 1e3 / ROUNDS as f64
        );
        let (from, mut to) = (vec![1u8; 16 << 20], vec![2u8; 16 << 20]);
        let start = Instant::now();
        (0..10).for_each(|_| std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from)));
        println!("a copy of 16 MiB: {:.2} GB/s", 10.0 * 16.777216e6 / start.elapsed().as_secs_f64() / 1e9);
    }
    place.meet(3000);
}

/// Process 0 sends `there` bytes and gets `back` bytes: `at_once`, or as an answer.
fn median(place: &Place<'_>, rounds: usize, rail: u32, there: usize, back: usize, at_once: bool) -> Duration {
    let (me, peer) = (place.rank, 1 - place.rank);
    let (out, into) = if me == 0 { (there, back) } else { (back, there) };
    let bytes = Arc::new(place.buffer(out));
    let send = || Message::Send { to: peer, tag: tag(5000, 0, rail), bytes: bytes.clone(), range: 0..out };
    let carry = |messages| place.transport.exchange(messages, &|| None).unwrap();
    let mut room: Option<PinnedBuffer<u8>> = Some(place.buffer(into));
    let mut times: Vec<_> = (0..rounds)
        .map(|_| {
            let into = Message::Receive { from: peer, tag: tag(5000, 0, rail), into: room.take().unwrap(), len: into };
            let start = Instant::now();
            let done = match (at_once, me) {
                (true, _) => carry(vec![send(), into]).pop(),
                (false, 0) => {
                    carry(vec![send()]);
                    carry(vec![into]).pop()
                }
                (false, _) => {
                    let done = carry(vec![into]).pop();
                    carry(vec![send()]);
                    done
                }
            };
            let time = start.elapsed();
            if let Some(Message::Receive { into, .. }) = done {
                room = Some(into);
            }
            time
        })
        .collect();
    times.sort();
    times[rounds / 2]
}
