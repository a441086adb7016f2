//! The program's own code panics where the library calls it: the other process gets the cause, the next scope works,
//! and no memory is lost.

use super::super::loopback::Hosts;
use crate::{Device, Error, GpuPool, ReduceOp, panics};
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread,
    time::Duration,
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

/// Fails if `f` hangs.
fn guarded(f: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        f();
        let _ = done.send(());
    });
    assert_ne!(ended.recv_timeout(Duration::from_secs(100)), Err(mpsc::RecvTimeoutError::Timeout), "hung");
    thread.join().unwrap();
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
                let _quiet = panics::hush();
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
        assert_eq!(in_use(&hosts), before);
    });
}
