//! What a user, or bad luck, can do to the memory pool. Each test says why it fails on the pool as it was found.

use crate::support::{self, TIMEOUT, builder, guarded};
use gpu_pool::{DeviceBuffer, Error, GpuPool, PinnedBuffer, Result, error::Kind, kernel};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected};
use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

/// A header that lay in the list of spare ones keeps the region it had, and region numbers are used again after a trim:
/// so the block does not keep its own region alive. Safe code then reads memory that was given back.
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
    guarded(|| {
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

/// What a lost peer may still use is free in the eyes of `grow`, so nothing is mapped beside it; but nobody is given
/// it.
#[test]
fn a_lost_peer_does_not_take_the_memory_of_the_others() {
    let plan = FaultPlan::new().on(FaultRule::new(Injected::DeviceLost).device(1).op(FaultOp::StreamWait)).paused();
    let pool = builder().host(2).software_memory(1 << 30).faults(plan.clone()).timeout(TIMEOUT / 2).build().unwrap();
    let x: Vec<DeviceBuffer<u32>> = pool.on(&[0]).run(|dev, _| dev.zeros::<u32>(8 << 20)).unwrap();
    plan.resume();
    let lost = pool.on(&[1]).run(|dev, _| {
        let copy = x[0].copy_to(dev)?;
        dev.synchronize()?;
        Ok(copy.len())
    });
    assert!(matches!(lost, Err(Error::DeviceLost { device: 1, .. })), "{lost:?}");
    drop(x);
    let again = pool.on(&[0]).run(|dev, _| {
        let a = dev.zeros::<u32>(8 << 20);
        Ok((a.map(drop), dev.stats().reserved))
    });
    let (a, reserved) = again.unwrap().remove(0);
    assert!(a.is_ok(), "{reserved} of {} bytes were taken, and yet: {a:?}", 1 << 30);
}

/// A stream whose user is gone is handed out again only when nothing names it; but memory at rest names all its last
/// users.
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
    guarded(|| pinned_beside_a_stuck_copy(|builder| builder));
    // A bound of the devices' memory is none for memory that does not move.
    guarded(|| pinned_beside_a_stuck_copy(|builder| builder.memory_slack(1.0)));
}

fn pinned_beside_a_stuck_copy(set: fn(gpu_pool::Builder) -> gpu_pool::Builder) {
    {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::Stuck).op(FaultOp::CopyUp)).paused();
        let builder = set(builder().host(1).faults(plan.clone()));
        let pool = builder.timeout(Duration::from_millis(300)).build().unwrap();
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
    }
}

/// Room to align in is asked for where the driver's own alignment would do.
#[test]
fn an_aligned_request_of_all_there_is_fits() {
    let pool = builder().host(1).memory_limit(64 << 20).build().unwrap();
    pool.run(|dev, _| {
        // SAFETY: not read.
        let all = unsafe { dev.uninit_aligned::<u8>(64 << 20, 2 << 20) };
        all.unwrap();
        Ok(())
    })
    .unwrap();
}

/// Numbers that overflow.
#[test]
fn a_reserve_of_everything_is_an_error_and_no_panic() {
    let built =
        std::panic::catch_unwind(|| builder().host(1).timeout(TIMEOUT / 2).memory_reserve(u64::MAX).build().map(drop));
    assert!(
        matches!(built, Ok(Err(Error::OutOfMemory { .. } | Error::InvalidArgument { .. }))),
        "it panicked, or worked: {built:?}"
    );
}

#[test]
fn a_software_gpu_of_many_tebibytes_does_not_panic() {
    let pool = builder().host(1).software_memory(64 << 40).build().unwrap();
    // SAFETY: not read.
    let got = pool.run(|dev, _| Ok(unsafe { dev.uninit::<u8>(20 << 40) }.map(drop))).map(|mut all| all.remove(0));
    assert!(!matches!(got, Err(Error::Panicked { .. })), "{got:?}");
}

#[test]
fn any_software_memory_can_be_named() {
    let built =
        std::panic::catch_unwind(|| builder().host(1).timeout(TIMEOUT / 2).software_memory(u64::MAX).build().map(drop));
    assert!(!matches!(built, Err(_) | Ok(Err(Error::Timeout { .. } | Error::Panicked { .. }))), "{built:?}");
}

/// A graph writes what others own meanwhile, without the exclusive borrow that makes `order .. submit .. note` one
/// step. Its `note` of a write then forgets a use that came between, for which it never waited.
#[test]
fn a_graph_launch_and_what_another_device_does_meanwhile_are_ordered_or_reported() {
    const WORDS: usize = 4096;
    let pool = support::builder().host(2).module(&support::MODULE).build().unwrap();
    let slot: Mutex<Option<DeviceBuffer<u32>>> = Mutex::default();
    let (begun, back) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let done = pool.run(|dev, _| {
        if dev.index() == 0 {
            let mut x = dev.zeros::<u32>(WORDS)?;
            let mut others = (0..3000).map(|_| dev.zeros::<u32>(16)).collect::<Result<Vec<_>>>()?;
            let (graph, ()) = dev.capture(|dev| {
                dev.fill(&mut x, 1)?;
                others.iter_mut().try_for_each(|other| dev.fill(other, 1))
            })?;
            for round in 1..=10 {
                *slot.lock().unwrap() = Some(x);
                begun.store(round, SeqCst);
                dev.launch_graph(&graph)?;
                support::until("it is back", || back.load(SeqCst) == round || dev.check().is_err())?;
                dev.check()?;
                x = slot.lock().unwrap().take().unwrap();
                dev.synchronize()?;
            }
        } else {
            let mine = dev.zeros::<u32>(WORDS)?;
            for round in 1..=10 {
                while begun.load(SeqCst) != round {
                    dev.check()?;
                }
                let mut x = slot.lock().unwrap().take().unwrap();
                thread::sleep(Duration::from_micros(450 * round as u64));
                dev.copy(&mine, &mut x)?;
                *slot.lock().unwrap() = Some(x);
                back.store(round, SeqCst);
            }
        }
        Ok(())
    });
    // Nothing orders the two submissions: they may come in any order, or at once, which the checker says. What must not
    // happen is that the memory is used again too early, which it says in other words.
    match done {
        Ok(_) => {}
        Err(Error::Misuse { report, .. }) => assert_eq!(report.kind, Kind::Race, "{report}"),
        Err(error) => panic!("{error}"),
    }
}

/// The gates that are open. Each kernel has a gate with a number of its own.
static OPEN: Mutex<Vec<u32>> = Mutex::new(Vec::new());
/// The gates of kernels that are over.
static ENDED: Mutex<Vec<u32>> = Mutex::new(Vec::new());
kernel! {
    /// Lasts until the gate `add` is open; at most a minute.
    static HELD: "slow_add" in support::MODULE, fn(x: &mut [u32], n: u64, add: u32, micros: u32) |_dims| {
        let _ = (&x, n, micros);
        for _ in 0..6000 {
            if OPEN.lock().unwrap().contains(&add) {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        ENDED.lock().unwrap().push(add);
    }
}

fn open(gate: u32) {
    OPEN.lock().unwrap().push(gate);
}

fn hold(dev: &gpu_pool::Device, x: &mut DeviceBuffer<u32>, gate: u32) -> Result<()> {
    // SAFETY: the kernel touches nothing.
    unsafe { dev.launch(&HELD, gpu_pool::LaunchDims::cover(1), (x, 1u64, gate, 0u32)) }
}

/// A bound that nothing can be moved for does not bound: the pool takes more.
#[test]
fn a_slack_that_waits_in_vain_takes_more_memory() {
    guarded(|| {
        let builder = builder().host(1).module(&support::MODULE).software_memory(1 << 30);
        let pool = builder.memory_slack(1.0).timeout(Duration::from_secs(1)).build().unwrap();
        let got = pool.run(|dev, _| {
            let side = dev.stream()?;
            let mut x = dev.zeros::<u32>(4 << 20)?;
            let _behind = dev.zeros::<u32>(4 << 20)?;
            hold(&dev.on(&side), &mut x, 17)?;
            drop(x);
            let got = dev.zeros::<u8>(24 << 20).map(drop);
            open(17);
            Ok(got)
        });
        let got = got.unwrap().remove(0);
        assert!(got.is_ok(), "{got:?}");
    });
}

/// One stuck stream is waited for once, however many blocks it has used.
#[test]
fn a_stuck_stream_with_many_blocks_is_waited_for_once() {
    support::guarded_for(Duration::from_secs(30), || {
        let builder = builder().host(1).module(&support::MODULE).memory_limit(64 << 20);
        let pool = builder.timeout(Duration::from_secs(1)).build().unwrap();
        let got = pool.run(|dev, _| {
            let _large = dev.zeros::<u8>(16 << 20)?;
            let mut key = dev.zeros::<u32>(1)?;
            let mut all = (0..4096).map(|_| dev.zeros::<u32>(64)).collect::<Result<Vec<_>>>()?;
            hold(dev, &mut key, 18)?;
            all.iter_mut().try_for_each(|x| dev.fill(x, 1))?;
            // Each slab keeps a live block.
            let mut i = 0;
            all.retain(|_| {
                i += 1;
                i % 64 == 0
            });
            let got = dev.zeros::<u8>(56 << 20).map(drop);
            open(18);
            Ok(got)
        });
        assert!(matches!(got.unwrap().remove(0), Err(Error::OutOfMemory { .. })));
    });
}

/// The ladder's waits do not ask whether the gang has failed.
#[test]
fn a_member_that_is_short_of_memory_hears_of_an_abort() {
    let pool = builder().host(2).module(&support::MODULE).memory_limit(8 << 20).build().unwrap();
    let deaf = AtomicBool::new(true);
    let failed = pool.run(|dev, _| {
        if dev.index() == 1 {
            thread::sleep(Duration::from_millis(500));
            return Err::<(), _>(Error::custom("enough"));
        }
        let (_live, mut x) = (dev.zeros::<u32>(256 << 10)?, dev.zeros::<u32>(1 << 20)?);
        hold(dev, &mut x, 1)?;
        drop(x);
        let refused = dev.zeros::<u32>(7 << 18);
        deaf.store(ENDED.lock().unwrap().contains(&1), SeqCst);
        open(1);
        refused.map(drop)
    });
    assert!(failed.is_err());
    assert!(!deaf.load(SeqCst), "it was told of the abort only when the kernel was over");
}

/// Uses that are over are merged with one that is not, and then all that they cover counts as in use.
#[test]
fn memory_at_rest_is_had_without_a_wait_beside_memory_in_use() {
    let pool = builder().host(1).module(&support::MODULE).build().unwrap();
    let waits = pool.run(|dev, _| {
        let mut many = (0..27).map(|_| dev.zeros::<u32>(1 << 18)).collect::<Result<Vec<_>>>()?;
        let (mut last, mut key) = (many.split_off(21), dev.zeros::<u32>(1)?);
        // Freed in flight, so that their uses are kept; then over.
        hold(dev, &mut key, 2)?;
        many.iter_mut().try_for_each(|x| dev.fill(x, 1))?;
        drop(many);
        open(2);
        dev.synchronize()?;
        hold(dev, &mut key, 3)?;
        last.iter_mut().try_for_each(|x| dev.fill(x, 1))?;
        drop(last);
        let (stream, before) = (dev.stream()?, dev.stats());
        let y = dev.on(&stream).zeros::<u32>(1 << 18)?;
        let waits = dev.stats().waits - before.waits;
        open(3);
        drop(y);
        Ok(waits)
    });
    assert_eq!(waits.unwrap(), [0], "21 MiB are at rest");
}

/// A move that fails ends the ladder, though rungs are left that would do.
#[test]
fn a_move_that_fails_is_not_the_end() {
    let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(FaultOp::VmMove)).paused();
    let pool = builder().host(1).memory_limit(64 << 20).faults(plan.clone()).build().unwrap();
    plan.resume();
    let got = pool.run(|dev, _| {
        let mut all = (0..4).map(|_| dev.zeros::<u8>(16 << 20)).collect::<Result<Vec<_>>>()?;
        drop((all.remove(2), all.remove(0)));
        dev.synchronize()?;
        dev.zeros::<u8>(32 << 20).map(drop)
    });
    assert_eq!(plan.fired().len().min(1), 1, "nothing was moved");
    assert!(got.is_ok(), "{got:?}");
}

/// Each free unit is waited for by itself, for as long as the deadline, behind the same stuck stream.
#[test]
fn a_stuck_stream_is_waited_for_once() {
    /// How long a request waits that cannot be served.
    fn waits(deadline: Duration, gate: u32) -> Duration {
        let pool = builder().host(1).module(&support::MODULE).memory_limit(64 << 20).timeout(deadline).build().unwrap();
        let took = pool.run(|dev, _| {
            let mut all = (0..15).map(|_| dev.zeros::<u32>(1 << 20)).collect::<Result<Vec<_>>>()?;
            let mut keep = all.remove(7);
            hold(dev, &mut keep, gate)?;
            all.iter_mut().try_for_each(|x| dev.fill(x, 1))?;
            drop(all);
            let start = Instant::now();
            let got = dev.zeros::<u32>(13 << 20);
            let took = start.elapsed();
            open(gate);
            assert!(matches!(got, Err(Error::OutOfMemory { .. })), "{got:?}");
            Ok(took)
        });
        took.unwrap().remove(0)
    }
    guarded(|| {
        // A wait for each unit always takes 13 deadlines or more. One wait takes longer only on a busy machine.
        let deadline = Duration::from_millis(400);
        assert!((4..14).any(|gate| waits(deadline, gate) < deadline * 6), "the stream is waited for again and again");
    });
}

/// These hold.
#[test]
fn sizes_that_cannot_be_had_are_errors() {
    let pool = builder().host(1).build().unwrap();
    for bytes in [1 << 40, 1 << 50, isize::MAX as usize, usize::MAX] {
        assert!(matches!(pool.pinned::<u8>(bytes), Err(Error::OutOfMemory { .. })), "{bytes}");
        let device = pool.run(|dev, _| dev.zeros::<u8>(bytes).map(drop));
        assert!(matches!(device, Err(Error::OutOfMemory { .. })), "{bytes}: {device:?}");
    }
    pool.run(|dev, _| dev.download(&dev.upload(&[[0u8; 0]; 5])?)).unwrap();
}

#[test]
fn a_buffer_may_be_dropped_by_a_thread_that_ends() {
    thread_local! {
        static LAST: std::cell::RefCell<Vec<DeviceBuffer<u8>>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    for malloc in [false, true] {
        let mut built = builder().host(1);
        if malloc {
            built = built.memory_backing(gpu_pool::memory::BackingChoice::Malloc);
        }
        let pool = built.build().unwrap();
        let make = || pool.run(|dev, _| (0..3).map(|_| dev.zeros::<u8>(1 << 20)).collect::<Result<Vec<_>>>());
        let (early, late) = (make().unwrap().remove(0), make().unwrap().remove(0));
        let mut pool = Some(pool);
        for kept in [early, late] {
            thread::spawn(move || {
                // The place first, so that it goes after what the library keeps for the thread.
                LAST.with_borrow_mut(Vec::clear);
                let mut kept = kept;
                drop(kept.pop());
                LAST.with_borrow_mut(|last| last.append(&mut kept));
            })
            .join()
            .unwrap();
            // The second ones outlive the pool.
            pool.take().map_or(Ok(()), GpuPool::close).unwrap();
        }
    }
}
