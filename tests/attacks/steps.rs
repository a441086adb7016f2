//! What once went wrong when operations run one at a time, in virtual time, and with planned faults.

use crate::support::guarded;
use gpu_pool::{
    Error, GpuPool, Kernel, LaunchDims, Module, ReduceOp, Result,
    extend::driver::host::{ExecutionOrder, Trace},
};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{Check, Explorer, FaultPlan, Topology};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::*},
    },
    task::Poll,
    thread,
    time::Duration,
};

static MODULE: Module = Module::ptx("");

/// Spins until a thread of the host lets it go.
static AWAIT: Kernel<(&mut [u32],)> = Kernel::resumable(&MODULE, "await", await_go);

fn await_go(_: LaunchDims, out: &mut [u32]) -> Poll<()> {
    if !GO.load(Acquire) {
        return Poll::Pending;
    }
    out[0] = 1;
    Poll::Ready(())
}

static GO: AtomicBool = AtomicBool::new(false);

/// Attempts of a kernel that has not finished are made again and again in real time; they once took virtual time, each.
#[test]
fn virtual_time_does_not_count_attempts() {
    let time = |late| {
        GO.store(false, Release);
        let pool = GpuPool::builder().topology(Topology::nvswitch(1)).module(&MODULE).build().unwrap();
        thread::scope(|s| {
            s.spawn(|| {
                thread::sleep(late);
                GO.store(true, Release);
            });
            let times = pool.run(|dev, _| {
                let mut out = dev.zeros::<u32>(1)?;
                let start = dev.record_timed()?;
                // SAFETY: the kernel is what its signature says.
                unsafe { dev.launch(&AWAIT, LaunchDims::cover(1), (&mut out,))? };
                let end = dev.record_timed()?;
                assert_eq!(dev.download(&out)?, [1]);
                end.elapsed_since(&start)
            });
            times.unwrap()[0]
        })
    };
    guarded(move || {
        let at_once = time(Duration::ZERO);
        assert_eq!(time(Duration::from_millis(50)), at_once);
        assert_eq!(time(Duration::from_millis(250)), at_once);
    });
}

/// The streams of a pair were numbered by whichever device thread needed one first, so traces differed.
#[test]
fn staged_copies_have_one_trace_for_each_seed() {
    fn trace() -> Trace {
        let pool =
            GpuPool::builder().host(3).schedule(ExecutionOrder::Seeded(4)).without_peer_access().build().unwrap();
        pool.run(|dev, _| {
            // The threads come to their first copy in any order.
            thread::yield_now();
            let mut x = dev.upload(&vec![dev.index() as f32; 1000])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        })
        .unwrap();
        pool.trace().unwrap()
    }
    guarded(|| {
        let first = trace();
        for _ in 0..10 {
            assert_eq!(trace(), first);
        }
    });
}

/// A plan's counts went on from one run to the next: what failed in the first could not be repeated, and seeds drew
/// other faults than alone.
#[test]
fn explored_faults_start_over_with_each_run() {
    fn program(pool: &GpuPool) -> Result<()> {
        let ended = pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(100)?;
            (0..6).try_for_each(|_| dev.scale(&mut x, 2.0))
        });
        ended.map(drop)
    }
    guarded(|| {
        for plan in ["1:launch:4:error", "seed=3; *:launch:p0.2:error"] {
            let plan: FaultPlan = plan.parse().unwrap();
            let explorer = Explorer::new().devices(2).seeds(5).configure(|b| b.faults(plan.clone()));
            let failure = explorer.run(program).unwrap_err();
            assert!(failure.replays(), "{failure}");
            let again = explorer.clone().replay(failure.choices()).run(program);
            assert!(again.is_err());
            let seed = failure.seed().unwrap();
            let again = explorer.first_seed(seed).seeds(1).without_shrinking().run(program);
            assert!(again.is_err());
        }
        // Paused again, too.
        let plan = "*:any:p1:error".parse::<FaultPlan>().unwrap().paused();
        let explorer = Explorer::new().devices(2).seeds(3).configure(|b| b.faults(plan.clone()));
        let explored = explorer.run(|pool| {
            program(pool)?;
            plan.resume();
            assert!(program(pool).is_err());
            Ok(())
        });
        assert_eq!(explored.unwrap().runs, 3);
    });
}

/// It computed zeros, in real time, and told nobody.
#[test]
fn a_dry_pool_needs_a_topology() {
    let error = GpuPool::builder().host(2).check(Check::Off).dry().build().map(drop).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
}

/// Sizes that this computer could not hold: the kernel refuses to promise an allocation beyond its memory, and that was
/// passed on as a device that is full.
#[test]
fn dry_buffers_may_be_larger_than_this_computer() {
    guarded(|| {
        let machine = Topology::nvswitch(2).with_devices(|_, device| device.memory = 3 << 40);
        let pool = GpuPool::builder().topology(machine).dry().build().unwrap();
        let time = || {
            let times = pool.run(|dev, _| {
                let mut x = dev.zeros::<f32>(1 << 39)?; // 2 TiB
                let start = dev.record_timed()?;
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                let end = dev.record_timed()?;
                dev.synchronize()?;
                assert!(dev.zeros::<f32>(1 << 39).is_err(), "there is no room for two");
                end.elapsed_since(&start)
            });
            times.unwrap()
        };
        assert!(time()[0] > Duration::from_secs(1));
    });
}

/// Who used a neighbour's buffer waited for as much as the neighbour happened to have submitted by then.
#[test]
fn what_is_waited_for_on_a_neighbours_stream_does_not_depend_on_time() {
    let program = |pool: &GpuPool| {
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(1000)?;
            dev.fill(&mut x, 1.0)?;
            let all = dev.exchange(Arc::new(x))?;
            let mut copy = all[(dev.rank() + 1) % dev.count()].copy_to(dev)?;
            let mut more = dev.zeros::<f32>(1000)?;
            for _ in 0..5 {
                dev.scale(&mut more, 2.0)?;
            }
            dev.axpy(1.0, &more, &mut copy)?;
            dev.download(&copy)
        })
        .unwrap();
    };
    for seed in [1, 17] {
        let trace = || {
            let pool = GpuPool::builder().host(3).schedule(ExecutionOrder::Seeded(seed)).build().unwrap();
            program(&pool);
            pool.trace().unwrap().to_string()
        };
        let first = trace();
        (0..20).for_each(|_| assert_eq!(trace(), first));
    }
    let times = || {
        let pool = GpuPool::builder().topology(Topology::nvswitch(2)).build().unwrap();
        let times = pool.run(|dev, _| {
            let x = dev.zeros::<f32>(1000)?;
            let start = dev.record_timed()?;
            let all = dev.exchange(Arc::new(x))?;
            let copy = all[1 - dev.rank()].copy_to(dev)?;
            let end = dev.record_timed()?;
            dev.synchronize()?;
            drop(copy);
            end.elapsed_since(&start)
        });
        times.unwrap()
    };
    let first = times();
    (0..30).for_each(|_| assert_eq!(times(), first));
}
