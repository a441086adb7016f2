//! Measures the SPSC ring against rtrb, crossbeam-channel and std's bounded channel: two threads, 8-byte elements.
//!
//! All are driven through their non-blocking calls with the same wait (pauses, then yields). So the structures are
//! compared, not the waiting; parking belongs to the event count, not to the ring. Targets: at least 0.95 of rtrb and 3
//! times crossbeam-channel.
//!
//! Needs two free cores: a third busy thread turns every case into a measurement of the scheduler. `single` depends on
//! which thread is ahead. A consumer right behind the producer fetches lines that are still being written, so a ring
//! that is mostly full runs several times as fast as the same ring mostly empty.
//!
//! * `single/<capacity>`: millions of elements per second, pushed and popped one by one
//! * `batch_32/<capacity>`: the same, up to 32 per call; the channels have no such call and transfer one by one
//! * `round_trip/<capacity>`: nanoseconds there and back through a pair of rings, means of 64 consecutive trips

mod support;

use std::{
    sync::{Barrier, mpsc},
    thread,
    time::Instant,
};

use crossbeam::utils::Backoff;
use gpu_pool::extend::sync::ring;
use support::{Bench, MOPS, NANOSECONDS, Side};

const BATCH: usize = 32;

/// The common interface of the four. `false` and `None` mean full and empty.
trait Spsc {
    const NAME: &'static str;
    type Tx: Send;
    type Rx: Send;

    fn pair(capacity: usize) -> (Self::Tx, Self::Rx);
    fn push(tx: &mut Self::Tx, item: u64) -> bool;
    fn pop(rx: &mut Self::Rx) -> Option<u64>;

    /// Pushes some of the items from `first` on, at most `BATCH` and not past `end`; returns how many.
    fn push_batch(tx: &mut Self::Tx, first: u64, _end: u64) -> usize {
        usize::from(Self::push(tx, first))
    }

    /// Pops at most `BATCH` into `sink`; returns how many.
    fn pop_batch(rx: &mut Self::Rx, mut sink: impl FnMut(u64)) -> usize {
        Self::pop(rx).map_or(0, |item| {
            sink(item);
            1
        })
    }
}

/// A queue: its name, its two ends, the call that makes it, and how an element goes in and out. Methods may follow.
macro_rules! spsc {
    (
        $queue:ident, $name:literal, $tx:ty, $rx:ty, $pair:expr;
        |$to:ident, $item:ident| $push:expr; |$from:ident| $pop:expr;
        $($more:item)*
    ) => {
        struct $queue;

        impl Spsc for $queue {
            const NAME: &'static str = $name;
            type Tx = $tx;
            type Rx = $rx;

            fn pair(capacity: usize) -> (Self::Tx, Self::Rx) {
                $pair(capacity)
            }
            fn push($to: &mut Self::Tx, $item: u64) -> bool {
                $push.is_ok()
            }
            fn pop($from: &mut Self::Rx) -> Option<u64> {
                $pop
            }
            $($more)*
        }
    };
}

spsc! { Ours, "gpu-pool", ring::Producer<u64>, ring::Consumer<u64>, ring::channel;
    |tx, item| tx.push(item); |rx| rx.pop();

    fn push_batch(tx: &mut Self::Tx, first: u64, end: u64) -> usize {
        tx.push_batch(&mut (first..end.min(first + BATCH as u64)))
    }
    fn pop_batch(rx: &mut Self::Rx, sink: impl FnMut(u64)) -> usize {
        rx.pop_batch(BATCH, sink)
    }
}

spsc! { Rtrb, "rtrb", rtrb::Producer<u64>, rtrb::Consumer<u64>, rtrb::RingBuffer::new;
    |tx, item| tx.push(item); |rx| rx.pop().ok();

    fn push_batch(tx: &mut Self::Tx, first: u64, end: u64) -> usize {
        let wanted = (end - first).min(BATCH as u64) as usize;
        // The fast path asks for the whole batch and does not refresh the cached index; `slots` reads the other side's
        // index.
        let chunk = match tx.write_chunk_uninit(wanted) {
            Ok(chunk) => chunk,
            Err(rtrb::chunks::ChunkError::TooFewSlots(0)) => return 0,
            Err(rtrb::chunks::ChunkError::TooFewSlots(free)) => {
                tx.write_chunk_uninit(free).expect("only this side fills")
            }
        };
        chunk.fill_from_iter(first..end)
    }
    fn pop_batch(rx: &mut Self::Rx, sink: impl FnMut(u64)) -> usize {
        let chunk = match rx.read_chunk(BATCH) {
            Ok(chunk) => chunk,
            Err(rtrb::chunks::ChunkError::TooFewSlots(0)) => return 0,
            Err(rtrb::chunks::ChunkError::TooFewSlots(held)) => rx.read_chunk(held).expect("only this side empties"),
        };
        let count = chunk.len();
        chunk.into_iter().for_each(sink);
        count
    }
}

spsc! { Crossbeam, "crossbeam-channel",
    crossbeam_channel::Sender<u64>, crossbeam_channel::Receiver<u64>, crossbeam_channel::bounded;
    |tx, item| tx.try_send(item); |rx| rx.try_recv().ok();
}

spsc! { Std, "std sync_channel", mpsc::SyncSender<u64>, mpsc::Receiver<u64>, mpsc::sync_channel;
    |tx, item| tx.try_send(item); |rx| rx.try_recv().ok();
}

/// Repeats `step` until it returns something.
#[inline]
fn until<R>(mut step: impl FnMut() -> Option<R>) -> R {
    let backoff = Backoff::new();
    loop {
        if let Some(result) = step() {
            return result;
        }
        backoff.snooze();
    }
}

/// Millions of elements per second. The clock runs in the consumer, from the common start to the last element.
fn throughput<S: Spsc>(
    capacity: usize,
    items: u64,
    produce: impl Fn(&mut S::Tx, u64) -> usize + Sync,
    consume: impl Fn(&mut S::Rx, &mut u64) -> usize,
) -> f64 {
    let (tx, mut rx) = S::pair(capacity);
    let start = Barrier::new(2);
    thread::scope(|scope| {
        let (start, produce) = (&start, &produce);
        scope.spawn(move || {
            // Moved onto this thread's stack: next to each other in one frame the two handles share a cache line. Since
            // rings keep their private indices in them, that made both rings 3 to 10 times slower (2 x Xeon, 105 MiB
            // L3).
            let mut tx = tx;
            start.wait();
            let mut next = 0;
            while next < items {
                next += until(|| Some(produce(&mut tx, next)).filter(|&count| count > 0)) as u64;
            }
        });
        start.wait();
        let clock = Instant::now();
        let (mut received, mut sum) = (0, 0);
        while received < items {
            received += until(|| Some(consume(&mut rx, &mut sum)).filter(|&count| count > 0)) as u64;
        }
        let seconds = clock.elapsed().as_secs_f64();
        assert_eq!(sum, items * (items - 1) / 2, "{} lost or invented elements", S::NAME);
        items as f64 / seconds / 1e6
    })
}

fn single<'a, S: Spsc>(capacity: usize, items: u64) -> Side<'a> {
    Side::new(S::NAME, move || {
        throughput::<S>(
            capacity,
            items,
            |tx, next| usize::from(S::push(tx, next)),
            |rx, sum| {
                S::pop(rx).map_or(0, |item| {
                    *sum += item;
                    1
                })
            },
        )
    })
}

fn batch<'a, S: Spsc>(capacity: usize, items: u64) -> Side<'a> {
    Side::new(S::NAME, move || {
        throughput::<S>(
            capacity,
            items,
            |tx, next| S::push_batch(tx, next, items),
            |rx, sum| S::pop_batch(rx, |item| *sum += item),
        )
    })
}

fn round_trip<'a, S: Spsc>(capacity: usize, samples: usize) -> Side<'a> {
    const TRIPS: u64 = 64;
    Side::sampling(S::NAME, move |out| {
        let (mut to, there) = S::pair(capacity);
        let (back, mut from) = S::pair(capacity);
        let start = Barrier::new(2);
        thread::scope(|scope| {
            let start = &start;
            scope.spawn(move || {
                let (mut there, mut back) = (there, back);
                start.wait();
                for _ in 0..samples as u64 * TRIPS {
                    let item = until(|| S::pop(&mut there));
                    until(|| S::push(&mut back, item).then_some(()));
                }
            });
            start.wait();
            for _ in 0..samples {
                let clock = Instant::now();
                for trip in 0..TRIPS {
                    until(|| S::push(&mut to, trip).then_some(()));
                    assert_eq!(until(|| S::pop(&mut from)), trip);
                }
                out.push(clock.elapsed().as_nanos() as f64 / TRIPS as f64);
            }
        });
    })
}

fn main() {
    let mut bench = Bench::new("ring");
    let items = bench.size(1_000_000, 200_000) as u64;
    let samples = bench.size(200, 50);
    for capacity in [64, 1024] {
        bench.compare(
            &format!("single/{capacity}"),
            MOPS,
            single::<Ours>(capacity, items),
            vec![single::<Rtrb>(capacity, items), single::<Crossbeam>(capacity, items), single::<Std>(capacity, items)],
        );
        bench.compare(
            &format!("batch_{BATCH}/{capacity}"),
            MOPS,
            batch::<Ours>(capacity, items),
            vec![batch::<Rtrb>(capacity, items), batch::<Crossbeam>(capacity, items), batch::<Std>(capacity, items)],
        );
        bench.compare(
            &format!("round_trip/{capacity}"),
            NANOSECONDS,
            round_trip::<Ours>(capacity, samples),
            vec![
                round_trip::<Rtrb>(capacity, samples),
                round_trip::<Crossbeam>(capacity, samples),
                round_trip::<Std>(capacity, samples),
            ],
        );
    }
    bench.finish();
}
