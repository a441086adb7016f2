//! Pools of software GPUs that pass for one GPU: what goes by a GPU's identity still tells its devices apart.

use gpu_pool::{Builder, Error, GpuPool, ReduceOp, extend::driver::host::on_one_gpu};
use gpu_pool_lab::{Check, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::{
    sync::{Barrier, mpsc},
    thread,
    time::Duration,
};

fn builder() -> Builder {
    GpuPool::builder().check(Check::Off)
}

/// A pool of so many devices on one GPU.
fn crowd(count: usize) -> GpuPool {
    on_one_gpu(|| builder().host(count).build()).unwrap()
}

#[track_caller]
fn assert_works(pool: &GpuPool) {
    let n = pool.device_count();
    let sums = pool.run(|dev, _| {
        let mut x = dev.upload(&[dev.rank() as f32; 100])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    });
    assert_eq!(sums.unwrap(), vec![[(n * (n - 1) / 2) as f32; 100]; n]);
}

#[test]
fn software_gpus_are_not_shared() {
    let error = builder().host(2).devices(&[1, 1]).share_gpus(true).build().unwrap_err();
    assert!(error.to_string().contains("listed twice"), "{error}");
    let pool = builder().host(2).share_gpus(true).build().unwrap();
    assert!(!pool.report().shares_gpus() && !pool.report().to_string().contains("on the GPU of"));
}

// Issue 5: a gang that takes its GPU's lock for each of its devices waits for itself.
#[test]
fn a_gang_is_on_its_gpu_as_a_whole() {
    let pool = crowd(4);
    for _ in 0..10 {
        assert_works(&pool);
    }
    let report = pool.report();
    assert!(
        report.shares_gpus() && report.to_string().contains("device 3: software GPU, 4.0 GiB, on the GPU of device 0")
    );
    pool.close().unwrap();
}

#[test]
fn gangs_that_share_only_the_gpu_run_side_by_side() {
    let (pool, met) = (crowd(4), Barrier::new(4));
    let pair = |members: &[usize]| {
        let ranks = pool.on(members).run(|dev, _| {
            met.wait();
            dev.barrier()?;
            Ok(dev.rank())
        });
        assert_eq!(ranks.unwrap(), [0, 1]);
    };
    thread::scope(|s| {
        s.spawn(|| pair(&[0, 3]));
        pair(&[2, 1]);
    });
}

#[test]
fn pools_on_one_gpu_take_turns() {
    let (first, second) = on_one_gpu(|| (builder().host(3).build().unwrap(), builder().host(2).build().unwrap()));
    let (begun, begins) = mpsc::channel();
    let (end, ends) = mpsc::channel::<()>();
    let ends = parking_lot::Mutex::new(ends);
    thread::scope(|s| {
        // Only its last device is in the way, where the other pool has none.
        s.spawn(|| {
            first.on(&[2]).run(|_, _| {
                begun.send(()).unwrap();
                ends.lock().recv().map_err(Error::custom)
            })
        });
        begins.recv().unwrap();
        let (ran, runs) = mpsc::channel();
        s.spawn(|| second.run(move |_, _| ran.send(()).map_err(Error::custom)));
        // Nothing can come of it yet; so this is no matter of time, but for who is in the wrong.
        assert!(runs.recv_timeout(Duration::from_millis(100)).is_err(), "it did not wait for its turn");
        end.send(()).unwrap();
        assert_eq!(runs.iter().count(), 2);
    });
    thread::scope(|s| {
        for pool in [&first, &second, &first] {
            s.spawn(|| (0..20).for_each(|_| assert_works(pool)));
        }
    });
}

// A device that waits for another one of the same GPU must not count its own wait as the other's progress.
#[test]
fn a_device_that_never_comes_is_named() {
    let pool = on_one_gpu(|| builder().host(3).timeout(Duration::from_secs(1)).build()).unwrap();
    let error = pool.run(|dev, _| {
        if dev.rank() != 1 {
            return dev.barrier();
        }
        while dev.check().is_ok() {
            thread::yield_now();
        }
        Ok(())
    });
    assert!(matches!(&error, Err(Error::Timeout { missing, .. }) if missing == &[1]), "{error:?}");
    assert_works(&pool);
}

#[test]
fn each_device_has_its_part_of_the_memory() {
    let fits = |builder: Builder, bytes: usize| {
        let pool = on_one_gpu(|| builder.host(4).software_memory(64 << 20).build()).unwrap();
        let taken = pool.run(|dev, _| dev.zeros::<u8>(bytes).map(drop));
        assert!(matches!(taken, Ok(_) | Err(Error::OutOfMemory { .. })), "{taken:?}");
        taken.is_ok()
    };
    assert!(fits(builder(), 15 << 20) && !fits(builder(), 17 << 20));
    assert!(
        fits(builder().memory_limit_percent(50.0), 7 << 20) && !fits(builder().memory_limit_percent(50.0), 9 << 20)
    );
    // Who says how much, gets that.
    assert!(fits(builder().memory_limit(20 << 20), 19 << 20));
}

#[test]
fn a_fault_is_of_the_device_that_was_meant() {
    let rule = FaultRule::new(Injected::Error).device(2).op(FaultOp::CopyToPeer).peer(1);
    let plan = FaultPlan::new().on(rule).paused();
    let pool = on_one_gpu(|| builder().host(3).faults(plan.clone()).build()).unwrap();
    plan.resume();
    let copy = |from: usize, to: usize| {
        let copied = pool.run(|dev, _| {
            let all = dev.exchange(std::sync::Arc::new(parking_lot::Mutex::new(dev.zeros::<u8>(64)?)))?;
            if dev.rank() == from {
                let own = all[from].lock();
                dev.copy(&*own, &mut *all[to].lock())?;
            }
            dev.synchronize()?;
            dev.barrier()
        });
        copied.map(drop)
    };
    copy(0, 1).unwrap();
    copy(2, 0).unwrap();
    assert!(matches!(copy(2, 1), Err(Error::Driver { device: 2, code: 999, .. })));
}
