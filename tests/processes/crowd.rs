//! Several devices of a pool on one GPU (`Builder::share_gpus`): the kernels of up to eight members meet where there is
//! one GPU.
//!
//! The driver asks for the number of hardware queues once, so each test runs in a process of its own, unless this one
//! was started with `CUDA_DEVICE_MAX_CONNECTIONS=32`. `GPU_POOL_SHARE=4 CUDA_DEVICE_MAX_CONNECTIONS=32` runs other
//! suites that way.

use crate::support::{self, Gpus, again, failure, on_cuda, printed, slow_add, until};
use gpu_pool::{Builder, DType, Device, Error, GpuPool, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{Check, prelude::*};
use std::{
    env,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const PLENTY: &str = "32";

/// Packets, barriers, and parts that are large.
const LENGTHS: [usize; 8] = [1, 33, 1000, 20_000, 27_001, 70_000, 300_001, 9_000_001];

/// Runs a test where there are queues enough.
fn crowd(name: &str, test: fn(Gpus)) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    if env::var(QUEUES).as_deref() == Ok(PLENTY) {
        return on_cuda(1, test);
    }
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poison| poison.into_inner());
    print!("{}", printed(again(&[&format!("crowd::{name}")], "").env(QUEUES, PLENTY), 1));
}

fn builder(ordinals: &[usize]) -> Builder {
    let builder = GpuPool::builder().cuda().devices(ordinals).share_gpus(true).module(&support::MODULE);
    builder.check(Check::Off).algorithm(Algorithm::Auto).timeout(Duration::from_secs(20))
}

fn pool(ordinals: &[usize]) -> GpuPool {
    builder(ordinals).build().unwrap()
}

/// A sum of so many elements, for which every order of additions is exact.
#[track_caller]
fn sum(dev: &Device, len: usize) -> Result<(), Error> {
    let n = dev.count();
    let own: Vec<f32> = (0..len).map(|i| (i % 97 + dev.rank()) as f32).collect();
    let mut x = dev.upload(&own)?;
    dev.all_reduce(&mut x, ReduceOp::Sum)?;
    for (i, got) in dev.download(&x)?.into_iter().enumerate() {
        let want = (n * (i % 97) + n * (n - 1) / 2) as f32;
        assert!(got == want, "element {i} of {len} on {n} devices is {got} and not {want}");
    }
    Ok(())
}

#[track_caller]
fn assert_works(pool: &GpuPool) {
    for len in [33, 300_001] {
        pool.run(|dev, _| sum(dev, len)).unwrap();
    }
}

#[track_caller]
fn assert_sums(pool: &GpuPool) {
    for len in LENGTHS {
        let how = pool.explain(DType::F32, ReduceOp::Sum, 4 * len).unwrap();
        pool.run(|dev, _| sum(dev, len)).unwrap_or_else(|error| panic!("{len} elements by {how}: {error}"));
    }
}

#[test]
fn sums_of_every_size_on_eight() {
    crowd("sums_of_every_size_on_eight", |_| {
        let pool = pool(&[0; 8]);
        let report = pool.report();
        println!("{report}");
        assert!(report.shares_gpus() && report.peers.iter().all(|peer| peer.verified), "{report}");
        assert!(report.collectives.starts_with("default, since devices share a GPU"), "{report}");
        // On any GPU with 64 multiprocessors or more.
        if report.devices[0].multiprocessors >= 64 {
            let meets = |dtype, len: usize| pool.explain(dtype, ReduceOp::Sum, 4 * len).unwrap().meets;
            assert_eq!((meets(DType::I32, 1000), meets(DType::I32, 300_001)), ("packets", "flags"));
            assert_eq!((meets(DType::F32, 1000), meets(DType::F32, 300_001)), ("data", "data"));
        }
        assert_sums(&pool);
        pool.close().unwrap();
    });
}

// Every number of members that there can be, since slices of eight hide mistakes of three.
#[test]
fn sums_of_two_to_eight() {
    crowd("sums_of_two_to_eight", |_| {
        for n in 2..8 {
            assert_works(&pool(&vec![0; n]));
        }
    });
}

#[test]
fn two_gpus_in_unequal_parts() {
    crowd("two_gpus_in_unequal_parts", |_| {
        on_two(|| {
            for ordinals in [vec![0, 0, 0, 1, 1], vec![0, 1, 0, 1, 0, 1, 0, 1], vec![1, 0, 0]] {
                assert_sums(&pool(&ordinals));
            }
        });
    });
}

fn on_two(test: fn()) {
    #[cfg(feature = "cuda")]
    if gpu_pool::extend::driver::cuda::device_count().unwrap_or(0) >= 2 {
        return test();
    }
    let _ = test;
    println!("skipped: needs 2 CUDA devices");
}

// One device is far ahead with what it submits: none of that may be in front of a peer's kernel.
#[test]
fn many_calls_without_a_wait() {
    crowd("many_calls_without_a_wait", |_| {
        let n = 8;
        let found = pool(&vec![0; n]).run(|dev, _| {
            let side = dev.stream()?;
            let mut x = dev.upload(&vec![1.0f32; 8 * 1001])?;
            let mut y = dev.upload(&[dev.rank() as f32; 33])?;
            let mut busy = dev.zeros::<u32>(1)?;
            for k in 0..200 {
                if k % n == dev.rank() {
                    slow_add(dev, &mut busy, 1, 500)?;
                }
                dev.all_reduce(&mut x, ReduceOp::Avg)?;
                dev.scale(&mut x, 1.0)?;
                dev.broadcast(&mut x, k % n)?;
                dev.on(&side).all_reduce(&mut y, ReduceOp::Max)?;
                dev.reduce_scatter_in_place(&mut x, ReduceOp::Max)?;
                dev.all_gather_in_place(&mut x)?;
            }
            let mut all = dev.zeros::<f32>(8 * 1001)?;
            dev.all_to_all(&x, &mut all)?;
            Ok((dev.download(&all)?, dev.download(&y)?))
        });
        for (x, y) in found.unwrap() {
            assert!(x.iter().all(|x| *x == 1.0) && y.iter().all(|y| *y == (n - 1) as f32));
        }
    });
}

#[test]
fn a_panic_of_one_ends_the_others_and_the_pool_goes_on() {
    crowd("a_panic_of_one_ends_the_others_and_the_pool_goes_on", |_| {
        let pool = pool(&[0; 8]);
        for (round, len) in [1, 1000, 300_001, 9_000_001].into_iter().enumerate() {
            let (waiting, odd) = (AtomicUsize::new(0), (3 * round + 1) % 8);
            let error = failure(pool.run(|dev, _| {
                sum(dev, len)?;
                if dev.rank() == odd {
                    until("the others wait", || waiting.load(SeqCst) == 7)?;
                    panic!("mid-operation");
                }
                waiting.fetch_add(1, SeqCst);
                sum(dev, len)
            }));
            assert!(matches!(error, Error::Panicked { device, .. } if device == odd), "{error}");
            assert_works(&pool);
        }
        pool.close().unwrap();
    });
}

// Kernels of both pairs wait on the GPU at once; and neither pair is done before the other has begun.
#[test]
fn gangs_that_share_only_the_gpu_run_side_by_side() {
    crowd("gangs_that_share_only_the_gpu_run_side_by_side", |_| {
        let (pool, begun) = (pool(&[0; 4]), AtomicUsize::new(0));
        let pair = |members: &[usize]| {
            let done = pool.on(members).run(|dev, _| {
                begun.fetch_add(1, SeqCst);
                until("all have begun", || begun.load(SeqCst) == 4)?;
                for _ in 0..20 {
                    sum(dev, 1000)?;
                    sum(dev, 300_001)?;
                }
                Ok(())
            });
            done.unwrap();
        };
        thread::scope(|s| {
            s.spawn(|| pair(&[3, 0]));
            pair(&[1, 2]);
        });
    });
}

#[test]
fn pools_on_one_gpu_take_turns() {
    crowd("pools_on_one_gpu_take_turns", |_| {
        let pools = [pool(&[0; 4]), pool(&[0; 3]), pool(&[0])];
        thread::scope(|s| {
            for pool in &pools {
                s.spawn(|| (0..10).for_each(|_| assert_works(pool)));
            }
        });
    });
}

// A graph is submitted as a whole, so its kernels wait for peers that may not have been submitted.
#[test]
fn graphs() {
    crowd("graphs", |_| {
        let found = pool(&[0; 8]).run(|dev, _| {
            let mut small = dev.upload(&[1.0f32; 100])?;
            let mut large = dev.upload(&vec![1.0f32; 300_001])?;
            let (graph, ()) = dev.capture(|dev| {
                dev.all_reduce(&mut small, ReduceOp::Sum)?;
                dev.scale(&mut small, 0.125)?;
                dev.all_reduce(&mut large, ReduceOp::Sum)?;
                dev.scale(&mut large, 0.125)
            })?;
            (0..20).try_for_each(|_| dev.launch_graph(&graph))?;
            Ok((dev.download(&small)?, dev.download(&large)?))
        });
        for (small, large) in found.unwrap() {
            assert!(small.iter().chain(&large).all(|x| *x == 1.0));
        }
    });
}

// Where peers' memory cannot be named, kernels meet in the host's; and where nothing meets, events order all.
#[test]
fn without_peer_access_and_without_meetings() {
    crowd("without_peer_access_and_without_meetings", |_| {
        let kinds: [fn(Builder) -> Builder; 5] = [
            Builder::without_peer_access,
            |builder| builder.algorithm(Algorithm::Copies),
            |builder| builder.algorithm(Algorithm::Ring),
            |builder| builder.algorithm(Algorithm::Staged),
            |builder| builder.algorithm(Algorithm::Direct).check(Check::Races),
        ];
        for kind in kinds {
            let pool = kind(builder(&[0; 5])).build().unwrap();
            println!("{}", pool.explain(DType::F32, ReduceOp::Sum, 1 << 20).unwrap());
            assert_works(&pool);
        }
    });
}

#[test]
fn each_device_has_its_part_of_the_memory() {
    crowd("each_device_has_its_part_of_the_memory", |_| {
        let pool = pool(&[0; 8]);
        let part = usize::try_from(pool.report().devices[0].total_memory / 8).unwrap();
        let results = pool.run(|dev, _| match dev.zeros::<u8>(part + (8 << 20)) {
            Err(Error::OutOfMemory { .. }) => dev.zeros::<u8>(64 << 20).map(drop),
            other => other.map(|_| panic!("a device has taken more than its part")),
        });
        results.unwrap();
        assert_works(&pool);
    });
}
