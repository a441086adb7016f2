//! Scopes: who runs what, with which part of the data, in which order, and what holds when they have returned.

use crate::{
    on_both,
    support::{self, failure, guarded, slow_add, until},
};
use gpu_pool::{
    Builder, Error, GpuPool, Parts, ReduceOp, Shard, collective::Algorithm, each_mut, host::ExecutionOrder, rows_mut,
};
use gpu_pool_lab::{Topology, prelude::*};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering::*},
};
use std::{collections::HashSet, fmt, thread, time::Duration};

on_both! {
    1: fn results_come_back_in_device_order(gpus) {
        let n = gpus.up_to(8);
        let pool = gpus.pool(n);
        for _ in 0..20 {
            // The later devices finish first.
            let order = pool.run(|dev, shard| {
                thread::sleep(Duration::from_millis((n - dev.index()) as u64 / 2));
                assert_eq!((dev.rank(), dev.count(), shard.index(), shard.count()), (dev.index(), n, dev.index(), n));
                Ok(dev.index())
            });
            assert_eq!(order.unwrap(), (0..n).collect::<Vec<_>>());
        }
    }

    1: fn each_device_has_one_thread_for_life(gpus) {
        let pool = gpus.pool(gpus.up_to(4));
        let first = pool.run(|_, _| Ok(thread::current().id())).unwrap();
        assert_eq!(first.iter().collect::<HashSet<_>>().len(), pool.device_count());
        assert!(!first.contains(&thread::current().id()));
        for _ in 0..10 {
            assert_eq!(pool.run(|_, _| Ok(thread::current().id())).unwrap(), first);
        }
        let names = pool.run(|_, _| Ok(thread::current().name().map(str::to_owned))).unwrap();
        assert_eq!(names[0].as_deref(), Some("gpu-pool:0"));
    }

    1: fn closures_borrow_from_the_caller(gpus) {
        let pool = gpus.pool(gpus.up_to(4));
        let batch: Vec<f32> = (0..1001).map(|i| i as f32).collect();
        let seen = AtomicUsize::new(0);
        let parts: Vec<&[f32]> = pool
            .run(|dev, shard| {
                let part = shard.of(&batch);
                seen.fetch_add(part.len(), Relaxed);
                assert_eq!(dev.download(&dev.upload(part)?)?, part);
                Ok(part)
            })
            .unwrap();
        assert_eq!(parts.concat(), batch);
        assert_eq!(seen.into_inner(), batch.len());
    }

    1: fn run_mut_hands_out_disjoint_rows(gpus) {
        let pool = gpus.pool(gpus.up_to(3));
        for rows in [0usize, 1, 2, 7, 100] {
            let x: Vec<f32> = (0..rows * 3).map(|i| i as f32).collect();
            let mut y = vec![0.0f32; rows * 3];
            pool.run_mut(&mut y, 3, |dev, shard, rows| {
                assert_eq!(rows.len(), shard.rows(&x, 3).len());
                let mut d = dev.upload(shard.rows(&x, 3))?;
                dev.scale(&mut d, 2.0)?;
                dev.download_into(&d, rows)
            })
            .unwrap();
            assert!(y.iter().zip(&x).all(|(y, x)| *y == 2.0 * x), "{y:?}");
        }
        for (len, width) in [(10, 3), (10, 0)] {
            let error = failure(pool.run_mut(&mut vec![0u8; len], width, |_, _, _| Ok(())));
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
    }

    2: fn run_with_splits_several_things_at_once(gpus) {
        let pool = gpus.pool(2);
        let (mut a, mut counts) = (vec![0u32; 5], [0usize; 2]);
        let names = vec!["left".to_owned(), "right".to_owned()];
        let mut table = pool.unified::<f32>(5 * 2).unwrap();
        table.as_mut_slice().unwrap().fill(1.0);
        let back = pool
            .with((rows_mut(&mut a, 1), (each_mut(&mut counts), names), table.rows_mut(2))).run(|dev, shard, parts| {
                let (rows, (count, name), mut unified) = parts;
                rows.fill(dev.index() as u32 + 1);
                *count = rows.len();
                assert_eq!((rows.len(), unified.len()), (shard.range(5).len(), 2 * shard.range(5).len()));
                dev.scale(&mut unified, 10.0 * (dev.index() + 1) as f32)?;
                Ok(name)
            })
            .unwrap();
        assert_eq!(back, ["left", "right"]);
        assert_eq!((a, counts), (vec![1, 1, 1, 2, 2], [3, 2]));
        let expected: Vec<f32> = [vec![10.0; 6], vec![20.0; 4]].concat();
        assert_eq!(table.as_slice().unwrap(), expected);
        // As many items as devices, whole rows of unified memory.
        for error in [
            failure(pool.with(vec![1, 2, 3]).run(|_, _, _| Ok(()))),
            failure(pool.with(each_mut(&mut [0u8])).run(|_, _, _| Ok(()))),
            failure(pool.with(table.rows_mut(3)).run(|_, _, _| Ok(()))),
        ] {
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
    }

    1: fn try_run_carries_the_callers_own_error(gpus) {
        #[derive(Debug, PartialEq)]
        enum Mine {
            Mine(usize),
            Theirs(String),
        }
        impl From<Error> for Mine {
            fn from(e: Error) -> Self {
                Mine::Theirs(e.to_string())
            }
        }
        impl fmt::Display for Mine {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self:?}")
            }
        }
        let pool = gpus.pool(1);
        let ok: Result<Vec<usize>, Mine> = pool.try_run(|dev, _| Ok(dev.index()));
        assert_eq!(ok, Ok(vec![0]));
        let own: Result<Vec<()>, Mine> = pool.try_run(|dev, _| Err(Mine::Mine(dev.index())));
        assert_eq!(own, Err(Mine::Mine(0)));
        let theirs: Result<Vec<()>, Mine> = pool.try_run(|dev, _| Ok(dev.upload_into(&[1u8], &mut dev.zeros(2)?)?));
        assert!(matches!(&theirs, Err(Mine::Theirs(why)) if why.contains("upload")), "{theirs:?}");
        let panicked: Result<Vec<()>, Mine> = pool.try_run(|_, _| panic!("as expected"));
        assert!(matches!(&panicked, Err(Mine::Theirs(why)) if why.contains("as expected")), "{panicked:?}");
    }

    2: fn a_gang_of_some_devices_has_its_own_ranks(gpus) {
        let pool = gpus.pool(2);
        let who = |dev: &gpu_pool::Device, shard: Shard| Ok((dev.index(), dev.rank(), shard.index(), dev.count()));
        assert_eq!(pool.on(&[1, 0]).run(who).unwrap(), [(1, 0, 0, 2), (0, 1, 1, 2)]);
        assert_eq!(pool.on(&[1]).run(who).unwrap(), [(1, 0, 0, 1)]);
        for list in [&[][..], &[0, 0], &[2], &[0, 1, usize::MAX]] {
            let error = failure(pool.on(list).run(who));
            assert!(matches!(error, Error::InvalidArgument { op: "run", .. }), "{error}");
        }
    }

    1: fn one_device_gets_what_it_is_given_and_gives_one_result(gpus) {
        let n = gpus.up_to(2);
        let pool = gpus.pool(n);
        let batch = vec![1.0f32, 2.0, 3.0];
        let x = pool.on_device(n - 1).run(move |dev| dev.upload(&batch)).unwrap();
        assert_eq!(x.device(), n - 1);
        let (text, owned) = (String::from("moved"), Box::new(3));
        let told = pool.on_device(n - 1).run(move |dev| {
            assert_eq!((dev.index(), dev.rank(), dev.count()), (n - 1, 0, 1));
            Ok((text, dev.download(&x)?, *owned))
        });
        assert_eq!(told.unwrap(), (String::from("moved"), vec![1.0, 2.0, 3.0], 3));
        // A scope that does not begin drops the closure with what it has.
        let held = Arc::new(());
        let own = held.clone();
        let error = failure(pool.on_device(n).run(move |_| Ok(Arc::strong_count(&own))));
        assert!(matches!(error, Error::InvalidArgument { op: "run", .. }), "{error}");
        assert_eq!(Arc::strong_count(&held), 1);
        let own: Result<(), anyhow::Error> = pool.on_device(0).try_run(|_| Err(anyhow::anyhow!("had enough")));
        assert_eq!(own.unwrap_err().to_string(), "had enough");
        let panicked = failure(pool.on_device(0).run(|_| -> gpu_pool::Result<()> { panic!("as expected") }));
        assert!(matches!(panicked, Error::Panicked { device: 0, .. }), "{panicked}");
    }

    // Nothing but running at the same time lets these two come to an end.
    2: fn disjoint_gangs_run_at_the_same_time(gpus) {
        let pool = gpus.pool(2);
        let here = AtomicUsize::new(0);
        let meet = |device: usize| {
            pool.on(&[device]).run(|_, _| {
                here.fetch_add(1, SeqCst);
                until("the other gang runs", || here.load(SeqCst) == 2)
            })
        };
        thread::scope(|s| {
            let other = s.spawn(|| meet(1));
            meet(0).unwrap();
            other.join().unwrap().unwrap();
        });
    }

    // A scope drains: what closures asked for without waiting has happened when it returns.
    1: fn work_has_completed_when_a_scope_returns(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let done = pool
            .run(|dev, _| {
                let mut x = dev.zeros::<u32>(100)?;
                slow_add(dev, &mut x, 1, 60_000)?;
                let other = dev.stream()?;
                let mut y = dev.zeros::<u32>(100)?;
                slow_add(&dev.on(&other), &mut y, 1, 90_000)?;
                Ok([dev.record()?, dev.on(&other).record()?])
            })
            .unwrap();
        for event in done.iter().flatten() {
            assert!(event.is_complete().unwrap());
        }
    }

    // pytorch#8388: two DataParallel models driven from two threads lock up, each holding a GPU that the other needs.
    2: fn many_threads_may_call_scopes_with_collectives(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.pool(n);
        thread::scope(|s| {
            for caller in 0..8u32 {
                let pool = &pool;
                s.spawn(move || {
                    for round in 0..25u32 {
                        let value = (caller * 100 + round) as f32;
                        let sums = pool
                            .run(|dev, _| {
                                let mut x = dev.upload(&[value; 65])?;
                                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                                dev.download(&x)
                            })
                            .unwrap();
                        assert_eq!(sums, vec![vec![value * n as f32; 65]; n]);
                    }
                });
            }
        });
    }

    2: fn overlapping_gangs_take_turns(gpus) {
        let n = gpus.up_to(5);
        let pool = gpus.pool(n);
        thread::scope(|s| {
            for caller in 0..6usize {
                let pool = &pool;
                s.spawn(move || {
                    for round in 0..25usize {
                        // Two to n devices, in an order of the caller's own.
                        let first = (caller + round) % n;
                        let step = if caller % 2 == 0 { 1 } else { n - 1 };
                        let gang: Vec<usize> = (0..2 + round % (n - 1)).map(|i| (first + i * step) % n).collect();
                        let sums = pool
                            .on(&gang).run(|dev, _| {
                                let mut x = dev.upload(&[dev.index() as f64 + 1.0, caller as f64])?;
                                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                                dev.barrier()?;
                                dev.download(&x)
                            })
                            .unwrap();
                        let members: f64 = gang.iter().map(|&d| d as f64 + 1.0).sum();
                        assert_eq!(sums, vec![vec![members, (caller * gang.len()) as f64]; gang.len()]);
                    }
                });
            }
        });
    }

    // The second pool is of the very same devices: its gangs and the first one's are in one order on each of them.
    2: fn two_pools_of_the_same_devices_take_turns(gpus) {
        let n = gpus.up_to(4);
        let one = gpus.pool(n);
        let two = if gpus.is_cuda() { gpus.pool(n) } else { one.survivors().unwrap() };
        thread::scope(|s| {
            for caller in 0..6 {
                let (pool, all) = (if caller % 2 == 0 { &one } else { &two }, (0..n).collect::<Vec<_>>());
                s.spawn(move || {
                    for _ in 0..20 {
                        let gang = if caller < 2 { &all[..] } else { &all[..2] };
                        let sums = pool.on(gang).run(|dev, _| {
                            let mut x = dev.upload(&[1.0f32; 33])?;
                            dev.all_reduce(&mut x, ReduceOp::Sum)?;
                            dev.download(&x)
                        });
                        assert_eq!(sums.unwrap(), vec![vec![gang.len() as f32; 33]; gang.len()]);
                    }
                });
            }
        });
    }

    1: fn many_scopes_in_a_row(gpus) {
        let pool = gpus.pool(gpus.up_to(8));
        let count = AtomicUsize::new(0);
        for _ in 0..500 {
            pool.run(|_, _| Ok(count.fetch_add(1, Relaxed))).unwrap();
        }
        assert_eq!(count.into_inner(), 500 * pool.device_count());
    }

    1: fn a_pool_can_be_built_and_dropped_again_and_again(gpus) {
        for _ in 0..5 {
            let pool = gpus.pool(gpus.up_to(3));
            pool.run(|dev, _| dev.zeros::<u8>(10)).unwrap();
            pool.close().unwrap();
        }
    }
}

/// The issue's own example, on whatever devices there are.
#[test]
fn the_process_wide_pool_needs_no_set_up() {
    guarded(|| {
        let batch: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let sums: Vec<Vec<f32>> = GpuPool::scope(|dev, shard| {
            let x = dev.upload(shard.of(&batch))?;
            let mut s = dev.sum(&x)?;
            dev.all_reduce(&mut s, ReduceOp::Sum)?;
            dev.download(&s)
        })
        .unwrap();
        assert_eq!(sums, vec![vec![499_500.0]; GpuPool::global().unwrap().device_count()]);
        let error = failure(support::builder().host(1).build_global());
        assert!(matches!(error, Error::InvalidArgument { op: "build_global", .. }), "{error}");
        let failed: Result<Vec<()>, String> =
            GpuPool::global().unwrap().try_run::<(), Text>(|_, _| Err(Text("no".into()))).map_err(|t| t.0);
        assert_eq!(failed, Err("no".to_owned()));
    });

    struct Text(String);
    impl From<Error> for Text {
        fn from(e: Error) -> Self {
            Text(e.to_string())
        }
    }
    impl fmt::Display for Text {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(&self.0)
        }
    }
}

/// What it says is the user's code: called once, may panic, may take its time.
struct Says(Arc<dyn Fn() -> String + Send + Sync>);
impl From<Error> for Says {
    fn from(e: Error) -> Self {
        Says(Arc::new(move || e.to_string()))
    }
}
impl fmt::Display for Says {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0())
    }
}

/// What the peers of a device that fails so are told.
fn told(pool: &GpuPool, says: impl Fn() -> String + Send + Sync + 'static) -> Vec<String> {
    let (told, says) = (Mutex::new(Vec::new()), Arc::new(says));
    let failed = pool.try_run::<(), _>(|dev, _| {
        if dev.rank() == 0 {
            return Err(Says(says.clone()));
        }
        let error = failure(dev.barrier());
        let Error::Aborted { by: 0, cause } = &error else { panic!("{error}") };
        told.lock().unwrap().push(cause.to_string());
        Err(error.into())
    });
    assert!(failed.is_err());
    told.into_inner().unwrap()
}

#[test]
fn peers_of_try_run_learn_the_text_of_the_error() {
    guarded(|| {
        let pool = support::builder().host(3).build().unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let text = told(&pool, move || format!("the label column is missing ({})", counted.fetch_add(1, Relaxed)));
        assert_eq!(text, ["the label column is missing (0)"; 2]);
        assert_eq!(calls.load(Relaxed), 1, "the text is asked for once");
        // One that panics harms nobody.
        let text = told(&pool, || panic!("no text"));
        assert!(text.iter().all(|text| text.contains("returned an error")), "{text:?}");
        assert_eq!(pool.run(|dev, _| dev.exchange(dev.rank())).unwrap(), [[0, 1, 2]; 3]);
        // One that takes its time keeps only those waiting who look at it.
        let (aborted, heard) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (waits, hears) = (aborted.clone(), heard.clone());
        let says = Says(Arc::new(move || {
            let told = until("peers are aborted", || waits.load(Relaxed) == 2);
            hears.store(1 + usize::from(told.is_ok()), Relaxed);
            "slow".to_owned()
        }));
        let failed = pool.try_run::<(), _>(|dev, _| {
            if dev.rank() == 0 {
                return Err(Says(says.0.clone()));
            }
            let error = failure(dev.barrier());
            assert!(matches!(error, Error::Aborted { by: 0, .. }));
            aborted.fetch_add(1, Relaxed);
            Err(error.into())
        });
        assert!(failed.is_err());
        assert_eq!(heard.load(Relaxed), 2);
    });
}

#[test]
fn parts_go_to_a_gang_of_some_devices() {
    guarded(|| {
        let pool = support::builder().host(4).build().unwrap();
        let (mut rows, mut counts) = (vec![0u32; 7], [0usize; 2]);
        let names = vec!["first".to_owned(), "second".to_owned()];
        let parts = (rows_mut(&mut rows, 1), each_mut(&mut counts), names);
        let found = pool.on(&[3, 1]).with(parts).run(|dev, shard, (rows, count, name)| {
            rows.fill(dev.index() as u32);
            *count = rows.len();
            assert_eq!((dev.count(), shard.count(), dev.rank()), (2, 2, shard.index()));
            Ok((dev.index(), name))
        });
        assert_eq!(found.unwrap(), [(3, "first".to_owned()), (1, "second".to_owned())]);
        assert_eq!((rows, counts), (vec![3, 3, 3, 3, 1, 1, 1], [4, 3]));
        for list in [&[][..], &[0, 0], &[4], &[0, 1, usize::MAX]] {
            let error = failure(pool.on(list).with(vec![(); list.len()]).run(|_, _, ()| Ok(())));
            assert!(matches!(error, Error::InvalidArgument { op: "run", .. }), "{error}");
        }
        let error = failure(pool.on(&[0, 1]).with(vec![(); 3]).run(|_, _, ()| Ok(())));
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    });
}

/// A split of the user's may be wrong.
#[test]
fn a_part_for_each_device_or_none() {
    struct One;
    impl Parts for One {
        type Part = ();
        fn split(self, _: &[Shard]) -> gpu_pool::Result<Vec<()>> {
            Ok(vec![()])
        }
    }
    let pool = support::builder().host(2).build().unwrap();
    for error in
        [failure(pool.with(One).run(|_, _, ()| Ok(()))), failure(pool.on(&[1, 0]).with(One).run(|_, _, ()| Ok(())))]
    {
        assert!(matches!(&error, Error::InvalidArgument { why, .. } if why == "1 parts for 2 devices"), "{error}");
    }
}

/// pytorch#5039, #15161: nine rows on four devices are 3, 2, 2, 2 and never 3, 3, 3, nothing.
#[test]
fn shards_are_balanced_and_empty_ones_still_run() {
    guarded(|| {
        let pool = support::builder().host(4).build().unwrap();
        for (len, expected) in [(9, [3, 2, 2, 2]), (4, [1; 4]), (3, [1, 1, 1, 0]), (1, [1, 0, 0, 0]), (0, [0; 4])] {
            let data = vec![1.0f32; len];
            // The collective only ends if those without rows take part.
            let out = pool.run(|dev, shard| {
                let part = shard.of(&data);
                let mut sum = dev.sum(&dev.upload(part)?)?;
                dev.all_reduce(&mut sum, ReduceOp::Sum)?;
                Ok((part.len(), dev.download(&sum)?[0]))
            });
            assert_eq!(out.unwrap(), expected.map(|n| (n, len as f32)));
        }
    });
}

/// llama.cpp#4055: cards of different speeds need different shares.
#[test]
fn weights_divide_the_rows() {
    guarded(|| {
        let pool = support::builder().host(3).weights(&[5.0, 1.0, 2.0]).build().unwrap();
        let ranges = pool.run(|_, shard| Ok(shard.range(81))).unwrap();
        assert_eq!(ranges, [0..51, 51..61, 61..81]);
        // A gang of some devices divides by their weights.
        assert_eq!(pool.on(&[2, 1]).run(|_, shard| Ok(shard.range(9))).unwrap(), [0..6, 6..9]);
        let mut out = vec![9; 80];
        pool.run_mut(&mut out, 10, |dev, _, rows| {
            rows.fill(dev.index());
            Ok(())
        })
        .unwrap();
        assert_eq!(out, [vec![0; 50], vec![1; 10], vec![2; 20]].concat());
        for bad in [&[1.0, 1.0][..], &[1.0, 0.0, 1.0], &[1.0, f64::NAN, 1.0], &[1.0, -1.0, 1.0]] {
            let error = failure(support::builder().host(3).weights(bad).build());
            assert!(matches!(error, Error::InvalidArgument { op: "weights", .. }), "{error}");
        }
        let measured = support::builder().host(2).weights_measured().build().unwrap();
        let lens = measured.run(|_, shard| Ok(shard.range(1000).len())).unwrap();
        assert!(lens.iter().sum::<usize>() == 1000 && lens.iter().all(|&len| len > 0), "{lens:?}");
    });
}

#[test]
fn any_number_of_software_devices() {
    guarded(|| {
        for n in [1, 2, 3, 5, 8, 16, 64] {
            let pool = support::builder().host(n).build().unwrap();
            assert_eq!(pool.device_count(), n);
            let sums = pool
                .run(|dev, shard| {
                    let mut x = dev.upload(&[shard.index() as f32, 1.0, 2.0])?;
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    dev.download(&x)
                })
                .unwrap();
            assert_eq!(sums, vec![vec![(n * (n - 1) / 2) as f32, n as f32, 2.0 * n as f32]; n]);
        }
        for n in [0, 65] {
            let error = failure(support::builder().host(n).build());
            assert!(matches!(error, Error::InvalidArgument { op: "build", .. }), "{error}");
        }
    });
}

#[test]
fn devices_are_chosen_and_ordered_by_the_caller() {
    guarded(|| {
        let pool = support::builder().host(4).devices(&[3, 1]).build().unwrap();
        let ordinals = pool.run(|dev, _| Ok((dev.index(), dev.info().ordinal))).unwrap();
        assert_eq!(ordinals, [(0, 3), (1, 1)]);
        for list in [&[][..], &[1, 1]] {
            let error = failure(support::builder().host(4).devices(list).build());
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
        let error = failure(support::builder().host(4).devices(&[0, 4]).build());
        assert!(matches!(&error, Error::NoDevice { reason } if reason.contains('4')), "{error}");
    });
}

/// An error of the build names both settings, and in which order they were set makes no difference.
#[test]
fn settings_that_contradict_each_other_are_refused_by_name() {
    let builder = || support::builder().host(2);
    let machine = || Topology::nvswitch(2);
    let seeded = || ExecutionOrder::Seeded(7);
    let contradictions: [(Builder, &[&str]); 8] = [
        (
            builder().memory_limit(4 << 20).memory_reserve(8 << 20),
            &["memory_limit(4194304)", "memory_reserve(8388608)"],
        ),
        (
            builder().software_memory(16 << 20).memory_limit_percent(25.0).memory_reserve(8 << 20),
            &["memory_limit_percent(25)", "memory_reserve(8388608)", "4194304"],
        ),
        (builder().software_memory(16 << 20).memory_reserve(32 << 20), &["memory_reserve(33554432)", "16777216"]),
        (builder().timeout(Duration::ZERO), &["timeout"]),
        (builder().without_peer_access().algorithm(Algorithm::Direct), &["without_peer_access", "Direct"]),
        (builder().topology(machine()).schedule(seeded()), &["topology", "schedule(Seeded(7))"]),
        (builder().schedule(seeded()).topology(machine()), &["topology", "schedule(Seeded(7))"]),
        (builder().dry(), &["dry", "topology"]),
    ];
    guarded(move || {
        for (builder, names) in contradictions {
            let error = failure(builder.build());
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            let text = error.to_string();
            assert!(names.iter().all(|name| text.contains(name)), "{names:?}: {text}");
        }
        // The longest deadline is one.
        let pool = builder().timeout(Duration::MAX).build().unwrap();
        let sums = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        });
        assert_eq!(sums.unwrap(), [[2.0], [2.0]]);
    });
}

/// The report says what there is and how it is connected.
#[test]
fn the_report_names_devices_and_routes() {
    guarded(|| {
        let direct = support::builder().host(3).build().unwrap();
        let staged = support::builder().host(3).without_peer_access().build().unwrap();
        for from in 0..3 {
            for to in (0..3).filter(|&to| to != from) {
                let (a, b) = (direct.report(), staged.report());
                assert_eq!((a.peer(from, to).from, a.peer(from, to).to), (from, to));
                assert_eq!(a.peer(from, to).route, gpu_pool::collective::Route::Direct);
                assert!(a.peer(from, to).verified && a.peer(from, to).note.is_empty());
                assert_eq!(b.peer(from, to).route, gpu_pool::collective::Route::Staged);
                assert!(!b.peer(from, to).note.is_empty());
            }
        }
        let report = direct.report();
        let none = std::panic::catch_unwind(|| report.peer(0, 3).to);
        assert!(none.is_err(), "another pair's line");
        assert_eq!(direct.report().lost, [false; 3]);
        assert!(direct.report().to_string().contains("device 2: software GPU"));
    });
}

/// The last handle may be anywhere; a pool that is shared works from all threads.
#[test]
fn a_shared_pool_outlives_its_maker() {
    guarded(|| {
        let pool = Arc::new(support::builder().host(2).build().unwrap());
        let users: Vec<_> = (0..4)
            .map(|_| {
                let pool = pool.clone();
                thread::spawn(move || pool.run(|dev, _| dev.exchange(dev.index())).unwrap())
            })
            .collect();
        drop(pool);
        for user in users {
            assert_eq!(user.join().unwrap(), [[0, 1], [0, 1]]);
        }
    });
}

/// The values of a thread end in the opposite order of their beginnings: those of this crate may be gone before.
#[test]
fn a_scope_in_the_drop_of_a_value_of_a_thread() {
    struct Late(Arc<GpuPool>, std::sync::mpsc::Sender<bool>);
    impl Drop for Late {
        fn drop(&mut self) {
            let scope = self.0.run(|dev, _| dev.zeros::<u8>(8).map(drop));
            let job = self.0.jobs().build().and_then(|jobs| jobs.submit(|_| Ok(()))?.wait());
            self.1.send(scope.is_ok() && job.is_ok()).unwrap();
        }
    }
    thread_local! {
        static LATE: std::cell::RefCell<Option<Late>> = const { std::cell::RefCell::new(None) };
    }
    guarded(|| {
        let pool = Arc::new(support::builder().host(1).build().unwrap());
        let (tell, told) = std::sync::mpsc::channel();
        let user = thread::spawn(move || {
            LATE.set(Some(Late(pool.clone(), tell)));
            pool.run(|_, _| Ok(())).unwrap();
        });
        user.join().unwrap();
        assert!(told.recv().unwrap());
    });
}
