//! Each fault at each call of one device's driver: the first, the second, and so on until a run gets by without.
//! Without `GPU_POOL_LONG=1` every fifth call fails in turn.

use super::{assert_works, collectives, is_typed, plan, ramp};
use crate::{
    on_both,
    support::{Gpus, bytes, cases},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultRule, Injected};
use parking_lot::Mutex;
use std::sync::{Arc, LazyLock};

const TRANSIENT: [Injected; 2] = [Injected::Error, Injected::OutOfMemory];
const STICKY: [Injected; 2] = [Injected::LaunchFailed, Injected::DeviceLost];
/// More than one piece of staging memory.
static LARGE: LazyLock<Vec<u8>> = LazyLock::new(|| bytes((2 << 20) + 5, 77));
/// More calls than any run here makes.
const ENOUGH: u64 = 5000;

/// `work` with the `n`-th call of the victim failing, for every `n`; with what was left of the pool afterwards.
fn sweep(gpus: Gpus, victim: usize, staged: bool, faults: &[Injected], work: impl Fn(&GpuPool) -> Result<(), Error>) {
    // Staging buffers are large, and there are two for each ordered pair.
    let count = gpus.up_to(if staged { 2 } else { 3 });
    let _open = kept_open(gpus, count);
    for &fault in faults {
        let mut survived = 0;
        for n in (1..).step_by(stride(gpus)) {
            assert!(n < ENOUGH, "{fault} is injected over and over");
            let plan = plan(FaultRule::new(fault).device(victim).nth(n));
            let builder = gpus.builder(count).faults(plan.clone());
            let pool = if staged { builder.without_peer_access() } else { builder }.build().unwrap();
            plan.resume();
            let done = work(&pool);
            plan.pause();
            let fired = plan.fired();
            match &done {
                Ok(()) => survived += u64::from(!fired.is_empty()),
                Err(error) => assert!(is_typed(error, victim, fault), "{fired:?} became {error}"),
            }
            if fired.is_empty() {
                done.unwrap();
                println!("{fault}: {} calls, of those tried {survived} could be done without", n - 1);
                break;
            }
            if TRANSIENT.contains(&fault) {
                assert_works(&pool);
            } else {
                assert_quarantined(&pool, victim, count);
            }
            pool.close().unwrap();
        }
    }
}

/// A pool that keeps the contexts of GPUs alive while others come and go, which would take a second each.
fn kept_open(gpus: Gpus, count: usize) -> Option<GpuPool> {
    gpus.is_cuda().then(|| gpus.pool(count))
}

/// Calls from one attempt to the next. To build a pool for every call takes minutes with GPUs, and long without.
fn stride(gpus: Gpus) -> usize {
    if gpus.is_cuda() { 7 } else { cases(5, 1) }
}

/// The victim is lost, for good, and the others work on: within the pool, and in one of their own.
#[track_caller]
fn assert_quarantined(pool: &GpuPool, victim: usize, count: usize) {
    let error = pool.run(|dev, _| collectives(dev)).unwrap_err();
    assert!(matches!(error, Error::DeviceLost { device, .. } if device == victim), "{error}");
    assert_eq!(pool.report().lost, (0..count).map(|i| i == victim).collect::<Vec<_>>());
    let others: Vec<usize> = (0..count).filter(|&i| i != victim).collect();
    pool.on(&others).run(|dev, _| collectives(dev)).unwrap();
    let rest = pool.survivors().unwrap();
    assert_eq!(rest.device_count(), count - 1);
    assert_works(&rest);
    rest.close().unwrap();
}

/// A scope in which peers of the one that fails are told so.
fn told(pool: &GpuPool, f: impl Fn(&Device) -> Result<(), Error> + Sync) -> Result<(), Error> {
    let errors = Mutex::new(Vec::new());
    let result = pool.run(|dev, _| f(dev).inspect_err(|error| errors.lock().push((dev.index(), error.clone()))));
    let errors = errors.into_inner();
    if let Err(cause) = &result {
        for (device, error) in &errors {
            let fits = match error {
                Error::Aborted { cause: own, .. } => own.to_string() == cause.to_string(),
                // Several may meet the lost one by themselves, each in its own operation.
                Error::DeviceLost { .. } => true,
                error => error.to_string() == cause.to_string(),
            };
            assert!(fits, "the scope ends with {cause}, but device {device} is told {error}");
        }
    } else {
        assert!(errors.is_empty(), "{errors:?}");
    }
    result.map(drop)
}

fn work_of_collectives(pool: &GpuPool) -> Result<(), Error> {
    told(pool, |dev| {
        collectives(dev)?;
        collectives(dev)
    })
}

/// Uploads and downloads, small, large and from page-locked memory; copies within, to and from the next device.
fn work_of_copies(pool: &GpuPool) -> Result<(), Error> {
    let kept: Vec<Arc<DeviceBuffer<u8>>> =
        pool.run(|dev, _| dev.upload(&bytes(7_000, dev.index() as u8)))?.into_iter().map(Arc::new).collect();
    told(pool, |dev| {
        let next = (dev.index() + 1) % dev.count();
        let own = bytes(7_000, dev.index() as u8);
        assert_eq!(dev.download(&*kept[dev.index()])?, own);
        let theirs = kept[next].copy_to(dev)?;
        assert_eq!(dev.download(&theirs)?, bytes(7_000, next as u8));
        let mut within = dev.zeros::<u8>(7_000)?;
        dev.copy(&*kept[dev.index()], &mut within)?;
        assert_eq!(dev.download(&within)?, own);
        assert!(dev.download(&dev.upload(&LARGE)?)? == *LARGE);
        let mut pinned = dev.pinned::<f32>(1000)?;
        pinned.as_mut_slice()?.copy_from_slice(&ramp(dev.index(), 1000));
        let up = dev.upload_pinned(&pinned)?;
        let mut down = dev.pinned::<f32>(1000)?;
        dev.download_pinned(&up, &mut down)?;
        assert_eq!(down.as_slice()?, ramp(dev.index(), 1000));
        dev.synchronize()
    })?;
    // A copy that writes to the peer.
    let targets: Vec<_> =
        pool.run(|dev, _| dev.zeros::<u8>(7_000))?.into_iter().map(|target| Mutex::new(Some(target))).collect();
    told(pool, |dev| {
        let next = (dev.index() + 1) % dev.count();
        let mut target = targets[next].lock().take().expect("each has one sender");
        dev.copy(&*kept[dev.index()], &mut target)?;
        assert_eq!(dev.download(&target.copy_to(dev)?)?, bytes(7_000, dev.index() as u8));
        Ok(())
    })
}

fn work_of_state(pool: &GpuPool) -> Result<(), Error> {
    let mut state = pool.per_device(|dev, _| dev.upload(&ramp(dev.index(), 50)))?;
    state.run(|dev, _, x| {
        dev.scale(x, 2.0)?;
        assert_eq!(dev.download(x)?, ramp(dev.index(), 50).iter().map(|x| 2.0 * x).collect::<Vec<_>>());
        Ok(())
    })?;
    state.reset(|dev, _| dev.upload(&[dev.index() as f32]))?;
    let held = state.run(|dev, _, x| dev.download(x))?;
    assert_eq!(held, (0..pool.device_count()).map(|i| vec![i as f32]).collect::<Vec<_>>());
    Ok(())
}

on_both! {
    2: fn collectives_with_a_call_that_fails(gpus) { sweep(gpus, 1, false, &TRANSIENT, work_of_collectives) }
    2: fn copies_with_a_call_that_fails(gpus) { sweep(gpus, 1, false, &TRANSIENT, work_of_copies) }
    2: fn staged_copies_with_a_call_that_fails(gpus) { sweep(gpus, 1, true, &[Injected::Error], work_of_copies) }
    2: fn staged_collectives_with_a_call_that_fails(gpus) {
        sweep(gpus, 1, true, &[Injected::Error], work_of_collectives)
    }
    2: fn state_with_a_call_that_fails(gpus) { sweep(gpus, 1, false, &TRANSIENT, work_of_state) }

    // nccl#2353: a hang without a word; xmr-stak#2054: the bad GPU takes the others with it.
    2: fn collectives_with_a_device_that_is_lost(gpus) { sweep(gpus, 1, false, &STICKY, work_of_collectives) }
    2: fn copies_with_a_device_that_is_lost(gpus) { sweep(gpus, 1, false, &[Injected::DeviceLost], work_of_copies) }
    2: fn staged_copies_with_a_device_that_is_lost(gpus) {
        sweep(gpus, 1, true, &[Injected::DeviceLost], work_of_copies)
    }
    // The pool's page-locked memory came from the first device.
    2: fn copies_with_a_first_device_that_is_lost(gpus) {
        sweep(gpus, 0, false, &[Injected::DeviceLost], work_of_copies)
    }
    2: fn staged_copies_with_a_first_device_that_is_lost(gpus) {
        sweep(gpus, 0, true, &[Injected::DeviceLost], work_of_copies);
    }
    2: fn state_with_a_device_that_is_lost(gpus) { sweep(gpus, 1, false, &[Injected::DeviceLost], work_of_state) }

    2: fn a_build_with_a_call_that_fails(gpus) {
        let count = gpus.up_to(3);
        let _open = kept_open(gpus, count);
        for (fault, victim) in TRANSIENT.into_iter().chain(STICKY).flat_map(|fault| [(fault, 0), (fault, 1)]) {
            for n in (1..ENOUGH).step_by(stride(gpus)) {
                let plan = plan(FaultRule::new(fault).device(victim).nth(n));
                plan.resume();
                let built = gpus.builder(count).faults(plan.clone()).build();
                plan.pause();
                let fired = plan.fired();
                match built {
                    Ok(pool) if fired.is_empty() || TRANSIENT.contains(&fault) => {
                        assert_works(&pool);
                        pool.close().unwrap();
                    }
                    // At the last call of all, nobody had to notice.
                    Ok(pool) => assert_quarantined(&pool, victim, count),
                    Err(error) => assert!(is_typed(&error, victim, fault), "{fired:?} became {error}"),
                }
                if fired.is_empty() {
                    println!("{fault}: {} calls", n - 1);
                    break;
                }
            }
        }
    }
}
