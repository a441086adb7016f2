//! give and take: values between the devices of a gang.

use crate::{
    on_both, support,
    support::{Gpus, cases, failure, slow_add, until},
};
use gpu_pool::{Device, DeviceBuffer, Error, Event, GpuPool, LaunchDims, Module, PinnedBuffer, kernel};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{Explorer, FaultPlan, FaultRule, Injected};
use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*},
    thread,
    time::{Duration, Instant},
};

/// How long a device waits for a flag. Only a wrong program gets there.
const LIMIT: Duration = Duration::from_secs(120);

static MODULE: Module = Module::ptx(
    r#"
.version 7.5
.target sm_75
.address_size 64

.visible .entry await_flag(.param .u64 x, .param .u64 flag)
{
    .reg .pred %p<3>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [flag];
    mov.u64 %rd2, %globaltimer;
    mov.u64 %rd3, 120000000000;
    add.u64 %rd4, %rd2, %rd3;
WAIT:
    ld.volatile.u32 %r1, [%rd1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
    mov.u64 %rd5, %globaltimer;
    setp.lt.u64 %p2, %rd5, %rd4;
    @%p2 bra WAIT;
END:
    ret;
}
"#,
);

kernel! {
    /// Waits until the host has set the word at `flag`.
    static AWAIT_FLAG: "await_flag" in MODULE, fn(_x: &mut [u32], flag: u64) |_dims| {
        let start = Instant::now();
        while flag_at(flag).load(SeqCst) == 0 && start.elapsed() < LIMIT {
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// The word of a page-locked buffer, by its address.
fn flag_at(address: u64) -> &'static AtomicU32 {
    // SAFETY: the tests keep the buffer until all devices are done with it, and touch it as a flag only.
    unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

fn flag(dev: &Device) -> Result<(PinnedBuffer<u32>, u64), Error> {
    let mut word = dev.pinned::<u32>(1)?;
    word.as_mut_slice()?[0] = 0;
    let address = word.as_mut_slice()?.as_mut_ptr().expose_provenance() as u64;
    Ok((word, address))
}

/// How memory goes from device 0 to device 1: a function for each.
type Way = (fn(&Device, DeviceBuffer<u32>) -> Result<(), Error>, fn(&Device) -> Result<DeviceBuffer<u32>, Error>);

const WAYS: [Way; 3] = [
    (|dev, x| dev.give(x, 1, 7), |dev| dev.take::<DeviceBuffer<u32>>(0, 7)?.copy_to(dev)),
    (
        |dev, x| dev.send(&x, 1),
        |dev| {
            let mut y = dev.zeros(1000)?;
            dev.recv(&mut y, 0)?;
            Ok(y)
        },
    ),
    (|dev, x| dev.send_owned(x, 1), |dev| dev.recv_any(0)),
];

/// Device 0 hands memory over and then does something that ends only after device 1 is through.
fn only_what_came_before(pool: &GpuPool) {
    // The first round loads the kernel and fills the memory pools: there is no waiting for a driver in the second.
    for (round, (give, take)) in WAYS.iter().flat_map(|way| [(0, way), (1, way)]) {
        let done = pool.run(|dev, _| {
            if dev.rank() == 1 {
                let address = dev.take::<u64>(0, 1)?;
                let x = take(dev)?;
                dev.give((), 0, 2)?;
                dev.take::<()>(0, 3)?;
                let found = dev.download(&x);
                flag_at(address).store(1, SeqCst);
                return Ok(found? == [round; 1000]);
            }
            let (word, address) = flag(dev)?;
            let mut scratch = dev.zeros::<u32>(1)?;
            let x = dev.upload(&[round; 1000])?;
            if round == 0 {
                flag_at(address).store(1, SeqCst);
            }
            dev.give(address, 1, 1)?;
            give(dev, x)?;
            // SAFETY: the kernel fits its signature, and the flag lives until the stream is idle.
            unsafe { dev.launch(&AWAIT_FLAG, LaunchDims::cover(1), (&mut scratch, address))? };
            dev.take::<()>(1, 2)?;
            dev.give((), 1, 3)?;
            dev.synchronize()?;
            drop(word);
            Ok(true)
        });
        assert_eq!(done.unwrap(), [true; 2]);
    }
}

fn assert_works(pool: &GpuPool) {
    let n = pool.device_count();
    let found = pool.run(|dev, _| {
        dev.give(dev.rank(), (dev.rank() + 1) % n, 0)?;
        dev.take::<usize>((dev.rank() + n - 1) % n, 0)
    });
    assert_eq!(found.unwrap(), (0..n).map(|rank| (rank + n - 1) % n).collect::<Vec<_>>());
}

/// Counts those that are alive.
struct Counted(&'static AtomicUsize);
impl Counted {
    fn new(live: &'static AtomicUsize) -> Self {
        live.fetch_add(1, SeqCst);
        Counted(live)
    }
}
impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

struct PanicsInDrop;
impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        panic!("a value of the program panics when it is dropped");
    }
}

on_both! {
    2: fn values_come_in_any_order_of_tags_and_in_order_of_one_tag(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.run(n, |dev| {
            for to in 0..n {
                for k in 0..20u64 {
                    dev.give((dev.rank(), k), to, k)?;
                    dev.give(format!("{} {k}", dev.rank()), to, 100 + k % 2)?;
                }
            }
            for from in (0..n).rev() {
                for k in (0..20u64).rev() {
                    assert_eq!(dev.take::<(usize, u64)>(from, k)?, (from, k));
                }
                for k in (1..20).step_by(2).chain((0..20).step_by(2)) {
                    assert_eq!(dev.take::<String>(from, 100 + k % 2)?, format!("{from} {k}"));
                }
            }
            Ok(())
        });
        assert_works(&pool);
    }

    // The giver's work on the memory is over before the taker's begins, on whatever streams they are.
    2: fn buffers_travel_round_a_ring(gpus) {
        let n = gpus.up_to(4);
        for pool in [gpus.pool(n), gpus.staged(n)] {
            pool.run(|dev, _| {
                let (next, previous) = ((dev.rank() + 1) % n, (dev.rank() + n - 1) % n);
                let side = dev.stream()?;
                let mut x = dev.upload(&vec![dev.rank() as u32; 3000])?;
                for round in 0..3 * n as u64 {
                    let dev = if round % 2 == 0 { &dev.on(&side) } else { dev };
                    slow_add(dev, &mut x, 1, 300)?;
                    dev.give((round, x), next, round % 3)?;
                    let (came, there) = dev.take::<(u64, DeviceBuffer<u32>)>(previous, round % 3)?;
                    assert_eq!((came, there.device()), (round, previous));
                    x = there.copy_to(dev)?;
                }
                assert_eq!(dev.download(&x)?, vec![(dev.rank() + 3 * n) as u32; 3000]);
                Ok(())
            })
            .unwrap();
        }
    }

    // Memory goes through two hands and comes back: it belongs to its device all the time.
    3: fn a_buffer_is_passed_on_and_comes_home(gpus) {
        gpus.run(3, |dev| {
            match dev.rank() {
                0 => {
                    dev.give(dev.upload(&[1u32, 2, 3])?, 1, 0)?;
                    let mut home = dev.take::<DeviceBuffer<u32>>(2, 0)?;
                    slow_add(dev, &mut home, 10, 0)?;
                    assert_eq!(dev.download(&home)?, [11, 12, 13]);
                }
                1 => dev.give(dev.take::<DeviceBuffer<u32>>(0, 0)?, 2, 0)?,
                _ => {
                    let there = dev.take::<DeviceBuffer<u32>>(1, 0)?;
                    assert_eq!(there.device(), 0);
                    assert_eq!(dev.download(&there.copy_to(dev)?)?, [1, 2, 3]);
                    dev.give(there, 0, 0)?;
                }
            }
            Ok(())
        });
    }

    // What a device does after a hand-over does not hold the receiver up.
    2: fn the_receiver_waits_for_nothing_that_came_later(gpus) {
        only_what_came_before(&gpus.builder(2).module(&MODULE).timeout(LIMIT / 2).build().unwrap());
    }
    2: fn the_receiver_of_a_staged_copy_waits_for_nothing_that_came_later(gpus) {
        let builder = gpus.builder(2).module(&MODULE).timeout(LIMIT / 2);
        only_what_came_before(&builder.without_peer_access().build().unwrap());
    }

    // c10d's tests of send and recv of unknown shapes (`test_stage.py` sends shapes ahead of the tensors).
    2: fn messages_of_unknown_length(gpus) {
        for pool in [gpus.pool(2), gpus.staged(2)] {
            pool.run(|dev, _| {
                let other = 1 - dev.rank();
                for len in [0usize, 1, 1000, 300_000] {
                    for to in [other, dev.rank()] {
                        dev.send_owned(dev.upload(&vec![len as f64; len])?, to)?;
                        dev.send(&dev.upload(&vec![1u8; len])?, to)?;
                        dev.send_owned(dev.upload(&vec![len as f32; len])?, to)?;
                    }
                    for from in [other, dev.rank()] {
                        let x = dev.recv_any::<f64>(from)?;
                        assert_eq!((x.device(), dev.download(&x)?), (dev.index(), vec![len as f64; len]));
                        assert_eq!(dev.download(&dev.recv_any::<u8>(from)?)?, vec![1; len]);
                        let mut y = dev.zeros::<f32>(len)?;
                        dev.recv(&mut y, from)?;
                        assert_eq!(dev.download(&y)?, vec![len as f32; len]);
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }

    2: fn what_is_refused(gpus) {
        let pool = gpus.pool(2);
        pool.run(|dev, _| {
            for error in [failure(dev.give(1, 2, 0)), failure(dev.take::<u32>(2, 0)), failure(dev.recv_any::<u32>(9))] {
                assert!(matches!(error, Error::InvalidArgument { site, .. } if site.file() == file!()), "{error}");
            }
            let error = failure(dev.take::<u32>(dev.rank(), 5));
            assert!(error.to_string().contains("sent no value with tag 5"), "{error}");
            dev.give(dev.zeros::<u32>(1)?, 1 - dev.rank(), 6)?;
            let error = failure(dev.send_owned(dev.take::<DeviceBuffer<u32>>(1 - dev.rank(), 6)?, 0));
            assert!(matches!(error, Error::WrongDevice { site, .. } if site.file() == file!()), "{error}");
            dev.barrier()
        })
        .unwrap();
        // A graph has neither.
        let error = pool.run(|dev, _| dev.capture(|dev| dev.give(1, 0, 0)).map(drop)).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert_works(&pool);
    }

    // One that takes what is of another type, or what nobody gives: the wait ends with the gang.
    2: fn waits_end_with_the_gang(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let waits = AtomicBool::new(false);
        let error = failure(pool.run(|dev, _| {
            if dev.rank() == 1 {
                until("the other waits", || waits.load(SeqCst))?;
                return Err::<(), _>(Error::custom("no value today"));
            }
            waits.store(true, SeqCst);
            let error = failure(dev.take::<u32>(1, 3));
            assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
            Err(error)
        }));
        assert_eq!(error.to_string(), "no value today");
        assert_works(&pool);

        let error = failure(pool.run(|dev, _| if dev.rank() == 0 { dev.take::<u32>(1, 3).map(drop) } else { Ok(()) }));
        assert!(matches!(error, Error::Mismatch { what: "participation", a: 0, b: 1, .. }), "{error}");
        assert!(error.to_string().contains("take(u32)"), "{error}");
        assert_works(&pool);

        let error = failure(pool.run(|dev, _| match dev.rank() {
            0 => dev.take::<u32>(1, 3).map(drop),
            1 => dev.give(1i64, 0, 3).and_then(|()| dev.barrier()),
            _ => dev.barrier(),
        }));
        assert!(matches!(error, Error::Mismatch { what: "dtype", a: 0, b: 1, a_site, b_site, .. }
            if a_site.file() == file!() && b_site.line() == a_site.line() + 1), "{error}");
        assert_works(&pool);
        // They know of a failure before they begin.
        pool.run(|dev, _| {
            if dev.rank() == 1 {
                return Err(Error::custom("at once"));
            }
            until("the failure is known", || dev.check().is_err())?;
            assert!(matches!(dev.give(1, 0, 0), Err(Error::Aborted { .. })));
            assert!(matches!(dev.take::<u32>(0, 0), Err(Error::Aborted { .. })));
            Ok(())
        })
        .unwrap_err();
        assert_works(&pool);
    }

    // They are dropped once, later scopes do not see them, and a panic in a drop harms nobody.
    2: fn values_that_nobody_takes(gpus) {
        static HOST: AtomicUsize = AtomicUsize::new(0);
        static CUDA: AtomicUsize = AtomicUsize::new(0);
        let live = if gpus.is_cuda() { &CUDA } else { &HOST };
        let pool = gpus.pool(2);
        for fails in [false, true, false] {
            let result = pool.run(|dev, _| {
                for tag in 0..5 {
                    dev.give((Counted::new(live), dev.zeros::<u32>(10)?), 1 - dev.rank(), tag)?;
                }
                dev.give(PanicsInDrop, 1 - dev.rank(), 9)?;
                if fails { Err(Error::custom("fails")) } else { Ok(()) }
            });
            assert_eq!(result.is_err(), fails);
            pool.run(|dev, _| {
                let other = 1 - dev.rank();
                dev.give(1u8, other, 0)?;
                dev.take::<u8>(other, 0)
            })
            .unwrap();
            // When the next scope begins, if not before.
            assert_eq!(live.load(SeqCst), 0);
        }
        assert_works(&pool);
        assert_eq!(live.load(SeqCst), 0);
        pool.close().unwrap();
    }

    3: fn groups_have_their_own_values(gpus) {
        let found = gpus.pool(3).run(|dev, _| {
            let (a, b) = (dev.group(&[0, 1, 2])?, dev.group(&[2, 1, 0])?);
            let me = dev.rank();
            a.give(me, (a.rank() + 1) % 3, 0)?;
            b.give(10 + me, (b.rank() + 1) % 3, 0)?;
            dev.give(20 + me, (me + 1) % 3, 1)?;
            Ok((b.take::<usize>((b.rank() + 2) % 3, 0)?, a.take::<usize>((a.rank() + 2) % 3, 0)?))
        });
        assert_eq!(found.unwrap(), [(11, 2), (12, 0), (10, 1)]);
    }

    // With the checker: what a thread knows goes with the value, so page-locked memory may be written by its new owner.
    2: fn the_checker_knows_of_a_hand_over(gpus) {
        gpus.run(2, |dev| {
            if dev.rank() == 0 {
                let mut pinned = dev.pinned::<u32>(100)?;
                dev.download_pinned(&dev.upload(&[3u32; 100])?, &mut pinned)?;
                assert_eq!(pinned.as_slice()?, [3; 100]);
                let x = dev.zeros::<u32>(100)?;
                dev.give((pinned, dev.record()?, x), 1, 0)
            } else {
                let (mut pinned, zeroed, mut x) = dev.take::<(PinnedBuffer<u32>, Event, DeviceBuffer<u32>)>(0, 0)?;
                pinned.as_mut_slice()?.fill(4);
                let mut y = dev.upload_pinned(&pinned)?;
                // SAFETY: the event orders the only other use of `x`.
                let free = unsafe { dev.unordered() };
                free.wait(&zeroed)?;
                let mut z = dev.zeros::<u32>(100)?;
                dev.synchronize()?;
                free.copy(&x.peer(), &mut z)?;
                assert_eq!(dev.download(&z)?, [0; 100]);
                free.copy(&y, &mut x)?;
                y = x.copy_to(dev)?;
                assert_eq!(dev.download(&y)?, [4; 100]);
                Ok(())
            }
        });
    }
}

/// Each device adds one to what it has got, and hands it on in both ways.
fn ring(pool: &GpuPool) -> Result<(), Error> {
    let n = pool.device_count();
    let found = pool.run(|dev, _| {
        let (next, previous) = ((dev.rank() + 1) % n, (dev.rank() + n - 1) % n);
        let side = dev.stream()?;
        let mut x = dev.upload(&[dev.rank() as u32; 10])?;
        for round in 0..n as u64 {
            slow_add(dev, &mut x, 1, 0)?;
            dev.give(x, next, round % 2)?;
            x = dev.take::<DeviceBuffer<u32>>(previous, round % 2)?.copy_to(&dev.on(&side))?;
            dev.send_owned(x, next)?;
            x = dev.recv_any(previous)?;
        }
        dev.download(&x)
    })?;
    for (rank, x) in found.iter().enumerate() {
        let from = (rank + n) % n; // 2 n hops.
        assert_eq!(*x, [(from + n) as u32; 10]);
    }
    Ok(())
}

#[test]
fn in_many_interleavings() {
    let explorer =
        Explorer::new().devices(3).seeds(cases(5, 100)).configure(|builder| builder.module(&support::MODULE));
    if let Err(failure) = explorer.run(ring) {
        panic!("{failure}");
    }
}

/// Each driver call of a ring fails once. The error is typed, and the pool works afterwards.
#[test]
fn with_a_call_that_fails() {
    for fault in [Injected::Error, Injected::OutOfMemory] {
        for n in (1..).step_by(cases(3, 1)) {
            let plan = FaultPlan::new().on(FaultRule::new(fault).device(1).nth(n)).paused();
            let pool = Gpus::software().builder(3).faults(plan.clone()).build().unwrap();
            plan.resume();
            let done = ring(&pool);
            plan.pause();
            if plan.fired().is_empty() {
                done.unwrap();
                break;
            }
            if let Err(error) = done {
                assert!(matches!(error, Error::Driver { device: 1, .. } | Error::OutOfMemory { .. }), "{error}");
            }
            ring(&pool).unwrap();
        }
    }
}
