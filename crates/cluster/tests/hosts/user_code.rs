//! The program's own code panics where the library calls it: the other process gets the cause, the next scope works,
//! and no memory is lost.

use crate::loopback::Hosts;
use gpu_pool::extend::cluster::silence_panics;
use gpu_pool::{
    Builder, Device, DeviceBuffer, Error, GpuPool, ReduceOp,
    collective::{Pack, Transfer, Unpack},
};
use gpu_pool_cluster::prelude::*;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// An error whose methods panic as told.
struct Rude {
    shows: bool,
    drops: bool,
}

impl fmt::Display for Rude {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        assert!(!self.shows, "a panic in Display");
        f.write_str("rude")
    }
}

impl fmt::Debug for Rude {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("a panic in Debug")
    }
}

impl std::error::Error for Rude {}

impl From<Error> for Rude {
    fn from(_: Error) -> Rude {
        Rude { shows: true, drops: true }
    }
}

impl Drop for Rude {
    fn drop(&mut self) {
        assert!(!self.drops || thread::panicking(), "a panic in Drop");
    }
}

/// A scope of both processes, with sums of `1 + 2 + 3`.
fn works(hosts: &Hosts) {
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let mut x = dev.upload(&[world.rank() as f32 + 1.0; 1000])?;
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    });
    assert!(found.iter().all(|x| x.iter().all(|x| *x == 6.0)), "{found:?}");
}

fn in_use(hosts: &Hosts) -> Vec<u64> {
    hosts.pools.iter().flat_map(GpuPool::memory_stats).map(|stats| stats.in_use).collect()
}

/// A device counts what it has freed when its part of a scope has ended, which may be after the scope's call.
fn is_flat(hosts: &Hosts, before: &[u64]) {
    let start = Instant::now();
    while in_use(hosts) != before {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}, not {before:?}", in_use(hosts));
        works(hosts);
    }
}

/// Fails if `f` hangs.
pub fn guarded(f: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        f();
        let _ = done.send(());
    });
    assert_ne!(ended.recv_timeout(Duration::from_secs(100)), Err(mpsc::RecvTimeoutError::Timeout), "hung");
    if let Err(panic) = thread.join() {
        panic!("{}", panic.downcast_ref::<String>().map_or("a panic", String::as_str));
    }
}

/// Process 1 fails on its device, with an error of this crate or with its own; process 0 waits for it in a sum. Once
/// such a scope kept 4 MiB of each device, and the scope of an error of one's own never ended.
#[test]
fn an_error_that_panics_fails_only_its_scope() {
    guarded(|| {
        let hosts = Hosts::with(&[2, 1], |builder| builder.timeout(Duration::from_secs(20)));
        works(&hosts);
        let before = in_use(&hosts);
        for (shows, drops, own, joins) in (0..16).map(|n| (n & 1 > 0, n & 2 > 0, n & 4 > 0, n & 8 > 0)) {
            let cause = match (shows, own) {
                (false, _) => "rude",
                (true, true) => "the closure returned an error, whose text panicked",
                (true, false) => "an error of the caller, whose text panicked",
            };
            let ended = hosts.each(|host, pool| {
                let _quiet = silence_panics();
                let work = |dev: &Device| -> Result<(), Error> {
                    let mut x = dev.zeros::<f32>(1 << 20)?;
                    if host == 0 || joins {
                        dev.world()?.barrier()?;
                    }
                    if host == 0 {
                        return dev.world()?.all_reduce(&mut x, ReduceOp::Sum);
                    }
                    Ok(())
                };
                if host == 1 && own {
                    let run = || {
                        let run = |dev: &Device, _| match work(dev) {
                            Ok(()) => Err(Rude { shows, drops }),
                            Err(_) => Ok(()),
                        };
                        pool.try_run(run).err().map(std::mem::forget)
                    };
                    return catch_unwind(AssertUnwindSafe(run)).unwrap().map(|()| String::new());
                }
                let run = |dev: &Device, _| {
                    work(dev)?;
                    if host == 1 { Err(Error::custom(Rude { shows, drops })) } else { Ok(()) }
                };
                let error = pool.run(run).map(drop).unwrap_err();
                let text = error.to_string();
                let _ = catch_unwind(AssertUnwindSafe(|| drop(error)));
                Some(text)
            });
            let (there, here) = (ended[0].as_ref().unwrap(), ended[1].as_ref().unwrap());
            assert!(there.contains("host 1") && there.contains(cause), "{there}: {shows} {drops} {own} {joins}");
            assert!(own || here.contains(cause), "{here}");
            works(&hosts);
        }
        is_flat(&hosts, &before);
    });
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Nowhere,
    Serialize,
    Deserialize,
    Pack,
    Unpack,
}

impl At {
    fn strike(self, at: At) {
        assert!(self != at, "a panic in {at:?}");
    }
}

/// A value whose code panics as told.
struct Bomb(At, Option<DeviceBuffer<f32>>);

impl Serialize for Bomb {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.strike(At::Serialize);
        (self.0 == At::Deserialize).serialize(to)
    }
}

impl<'de> Deserialize<'de> for Bomb {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let at = if bool::deserialize(from)? { At::Deserialize } else { At::Nowhere };
        at.strike(At::Deserialize);
        Ok(Bomb(at, None))
    }
}

impl Transfer for Bomb {
    fn transfer(self, dev: &Device) -> gpu_pool::Result<Self> {
        Ok(Bomb(self.0, self.1.transfer(dev)?))
    }
    fn pack(self, into: &mut Pack) -> gpu_pool::Result<()> {
        self.1.pack(into)?;
        self.0.strike(At::Pack);
        (self.0 == At::Unpack).pack(into)
    }
    fn unpack(from: &mut Unpack<'_>) -> gpu_pool::Result<Self> {
        let memory = Option::unpack(from)?;
        let at = if bool::unpack(from)? { At::Unpack } else { At::Nowhere };
        at.strike(At::Unpack);
        Ok(Bomb(at, memory))
    }
}

/// Process 1 sends a value whose code panics there or here. All are told, whatever carries bytes.
#[test]
fn a_value_that_panics_on_its_way_fails_only_its_scope() {
    guarded(|| {
        let set = |builder: Builder| builder.timeout(Duration::from_secs(20)).register_transfer::<Bomb>();
        for hosts in [Hosts::with(&[2, 1], set), Hosts::on_devices_with(&[2, 1], set)] {
            works(&hosts);
            let before = in_use(&hosts);
            for at in [At::Serialize, At::Deserialize, At::Pack, At::Unpack] {
                let ended = hosts.run(|dev| {
                    let _quiet = silence_panics();
                    let world = dev.world()?;
                    let own = if world.rank() == 2 { at } else { At::Nowhere };
                    match (at, world.rank()) {
                        (At::Serialize | At::Deserialize, _) => drop(world.exchange_serde(&Bomb(own, None))?),
                        (_, 2) => world.give(Bomb(own, Some(dev.zeros(1 << 20)?)), 0, 7)?,
                        (_, 0) => drop(world.take::<Bomb>(2, 7)?),
                        _ => {}
                    }
                    world.barrier()
                });
                for error in ended.into_iter().map(Result::unwrap_err) {
                    let text = error.to_string();
                    assert!(matches!(error, Error::Panicked { .. } | Error::AbortedByHost { .. }), "{text}");
                    assert!(text.contains(&format!("a panic in {at:?}")), "{text}");
                }
                works(&hosts);
                is_flat(&hosts, &before);
            }
        }
    });
}
