//! What a user, or bad luck, can do to the memory pool. Each test says why it fails on the pool as it was found.

mod support;

use gpu_pool::{
    DeviceBuffer, Error, GpuPool, PinnedBuffer,
    testing::{FaultOp, FaultPlan, FaultRule, Injected},
};
use std::{
    collections::HashSet,
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::Duration,
};
use support::builder;

/// Runs `f` on a thread and fails when it does not come back.
fn comes_back<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, wait) = mpsc::channel();
    thread::spawn(move || done.send(f()));
    wait.recv_timeout(Duration::from_secs(20)).expect("it hangs, or it panicked")
}

/// A header that lay in the list of spare ones keeps the region it had, and region numbers are used again after a trim: so the
/// block does not keep its own region alive. Safe code then reads memory that was given back.
#[test]
fn a_pinned_buffer_outlives_its_pool_after_a_trim() {
    let pool = builder().host(1).build().unwrap();
    drop(pool.pinned::<u64>(1 << 20).unwrap());
    assert!(pool.trim().unwrap() > 0);
    let mut kept: PinnedBuffer<u64> = pool.pinned(1 << 20).unwrap();
    kept.as_mut_slice().unwrap().fill(7);
    pool.close().unwrap();
    assert!(kept.as_slice().expect("memory of a live buffer").iter().all(|&x| x == 7));
}

/// The callback is the user's code, and runs with the lock of the page-locked memory held.
#[test]
fn the_callback_of_pinned_memory_may_ask_the_pool() {
    comes_back(|| {
        let pool: Arc<OnceLock<GpuPool>> = Arc::default();
        let mine = pool.clone();
        let built = builder().host(1).on_out_of_memory(move |_| {
            let _ = mine.get().expect("the pool").trim();
            false
        });
        pool.set(built.build().unwrap()).unwrap();
        let refused = pool.get().unwrap().pinned::<u8>(1 << 50);
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    });
}

/// What a lost peer may still use is free in the eyes of `grow`, so nothing is mapped beside it; but nobody is given it.
#[test]
fn a_lost_peer_does_not_take_the_memory_of_the_others() {
    let plan = FaultPlan::new().on(FaultRule::new(Injected::DeviceLost).device(1).op(FaultOp::StreamWait)).paused();
    let pool = builder()
        .host(2)
        .software_memory(1 << 30)
        .faults(plan.clone())
        .timeout(Duration::from_secs(2))
        .build()
        .unwrap();
    let x: Vec<DeviceBuffer<u32>> = pool.run_on(&[0], |dev, _| dev.zeros::<u32>(8 << 20)).unwrap();
    plan.resume();
    let lost = pool.run_on(&[1], |dev, _| {
        let copy = x[0].copy_to(dev)?;
        dev.synchronize()?;
        Ok(copy.len())
    });
    assert!(matches!(lost, Err(Error::DeviceLost { device: 1, .. })), "{lost:?}");
    drop(x);
    let again = pool.run_on(&[0], |dev, _| {
        let a = dev.zeros::<u32>(8 << 20);
        Ok((a.map(drop), dev.stats().reserved))
    });
    let (a, reserved) = again.unwrap().remove(0);
    assert!(a.is_ok(), "{reserved} of {} bytes were taken, and yet: {a:?}", 1 << 30);
}

/// A stream whose user is gone is handed out again only when nothing names it; but memory at rest names all its last users.
#[test]
fn streams_that_were_given_back_are_used_again() {
    let pool = builder().host(1).software_memory(1 << 30).build().unwrap();
    let names = pool
        .run(|dev, _| {
            let mut names = HashSet::new();
            for i in (0..300usize).rev() {
                let stream = dev.stream()?;
                names.insert(format!("{stream:?}"));
                drop(dev.on(&stream).zeros::<u8>((i + 1) * (256 << 10))?);
                dev.on(&stream).synchronize()?;
            }
            Ok(names.len())
        })
        .unwrap();
    assert!(names[0] < 50, "{} streams exist, of which one at a time was in use", names[0]);
}

/// Page-locked memory that a copy still uses is preferred to fresh memory, and then waited for by the host.
#[test]
fn pinned_memory_is_had_while_a_copy_is_under_way() {
    comes_back(|| {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::Stuck).op(FaultOp::CopyUp)).paused();
        let pool = builder().host(1).faults(plan.clone()).timeout(Duration::from_millis(300)).build().unwrap();
        plan.resume();
        let got = pool.run(|dev, _| {
            let mine = pool.pinned::<u8>(4 << 20)?;
            let y = dev.upload_pinned(&mine)?;
            drop(mine); // in flight: its reuse is deferred
            let got = pool.pinned::<u8>(4 << 20).map(drop);
            drop(y);
            plan.release();
            Ok(got)
        });
        let got = got.unwrap().remove(0);
        assert!(got.is_ok(), "{got:?}");
    });
}

/// Room to align in is asked for where the driver's own alignment would do.
#[test]
fn an_aligned_request_of_all_there_is_fits() {
    let pool = builder().host(1).memory_limit(64 << 20).build().unwrap();
    pool.run(|dev, _| {
        // SAFETY: not read.
        let all = unsafe { dev.uninit_aligned::<u8>(64 << 20, 2 << 20) };
        Ok(all.map(drop).unwrap())
    })
    .unwrap();
}

/// Numbers that overflow.
#[test]
fn a_reserve_of_everything_is_an_error_and_no_panic() {
    let built = std::panic::catch_unwind(|| {
        builder().host(1).timeout(Duration::from_secs(2)).memory_reserve(u64::MAX).build().map(drop)
    });
    assert!(
        matches!(built, Ok(Err(Error::OutOfMemory { .. } | Error::InvalidArgument { .. }))),
        "it panicked, or worked: {built:?}"
    );
}

#[test]
fn a_software_gpu_of_many_tebibytes_does_not_panic() {
    let pool = builder().host(1).software_memory(64 << 40).build().unwrap();
    let got = pool.run(|dev, _| Ok(unsafe { dev.uninit::<u8>(20 << 40) }.map(drop))).map(|mut all| all.remove(0));
    assert!(!matches!(got, Err(Error::Panicked { .. })), "{got:?}");
}

#[test]
fn any_software_memory_can_be_named() {
    let built = std::panic::catch_unwind(|| {
        builder().host(1).timeout(Duration::from_secs(2)).software_memory(u64::MAX).build().map(drop)
    });
    assert!(!matches!(built, Err(_) | Ok(Err(Error::Timeout { .. } | Error::Panicked { .. }))), "{built:?}");
}
