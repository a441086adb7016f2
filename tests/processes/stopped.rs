//! A process that is stopped for longer than the deadline (in a debugger, by `SIGSTOP`, with its virtual machine)
//! misses none by that: meanwhile nobody could get on, so nobody is late.
use crate::support::{TIMEOUT, again, guarded, task};
use gpu_pool::{GpuPool, LaunchDims, Module, kernel};
use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    sync::mpsc::channel,
    thread,
    time::Duration,
};

const DEADLINE: Duration = Duration::from_secs(4);
/// What everybody waits for, in short naps: a long one would be over as soon as the process goes on.
const NAPS: (usize, Duration) = (20, Duration::from_millis(50));
const STOPPED: Duration = Duration::from_secs(5);

static MODULE: Module = Module::ptx("");
kernel! {
    static SLEEPY: "sleepy" in MODULE, fn(x: &mut [u32]) |_| { sleep(); x.fill(1) }
}

fn sleep() {
    (0..NAPS.0).for_each(|_| thread::sleep(NAPS.1));
}

/// Does not outlive the test, stopped or not.
struct Guarded(Child);

impl Guarded {
    fn signal(&self, signal: i32) {
        // SAFETY: the child is this process's own and has not been waited for.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_stopped_process_misses_no_deadline() {
    guarded(|| {
        let child = again(&["stopped::the_process_that_is_stopped"], "wait").stdout(Stdio::piped()).spawn().unwrap();
        let mut child = Guarded(child);
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("all wait")), "it ended early");
        thread::sleep(Duration::from_millis(200));
        child.signal(libc::SIGSTOP);
        thread::sleep(STOPPED);
        child.signal(libc::SIGCONT);
        lines.for_each(|line| println!("{line}"));
        let status = child.0.wait().unwrap();
        assert!(status.success(), "{status}");
    });
}

/// What the test above runs and stops: waits for a peer, for a stream, and for a device's turn.
#[test]
fn the_process_that_is_stopped() {
    if task().is_some() {
        guarded(wait_in_every_way);
    }
}

fn wait_in_every_way() {
    let pool = |devices| GpuPool::builder().host(devices).module(&MODULE).timeout(DEADLINE).build().unwrap();
    let (peers, streams, turns) = (pool(2), pool(1), pool(1));
    let ((waiting, all), (begun, begins)) = (channel(), channel());
    let say = || waiting.send(()).unwrap();
    let [peer, stream, first, turn] = thread::scope(|s| {
        let peer = s.spawn(|| {
            peers.run(|dev, _| {
                match dev.index() {
                    0 => say(),
                    _ => sleep(),
                }
                dev.barrier()
            })
        });
        let stream = s.spawn(|| {
            streams.run(|dev, _| {
                let mut x = dev.zeros::<u32>(1)?;
                // SAFETY: the kernel is what its signature says.
                unsafe { dev.launch(&SLEEPY, LaunchDims::cover(1), (&mut x,))? };
                say();
                dev.synchronize()
            })
        });
        let first = s.spawn(|| {
            turns.run(|_, _| {
                begun.send(()).unwrap();
                sleep();
                Ok(())
            })
        });
        begins.recv_timeout(TIMEOUT / 4).unwrap();
        let turn = s.spawn(|| {
            say();
            turns.run(|_, _| Ok(()))
        });
        (0..3).for_each(|_| all.recv_timeout(TIMEOUT / 4).unwrap());
        println!("all wait");
        [peer, stream, first, turn].map(|thread| thread.join().unwrap())
    });
    let results =
        [("peer", peer.map(drop)), ("stream", stream.map(drop)), ("first", first.map(drop)), ("turn", turn.map(drop))];
    let failed: Vec<_> = results.into_iter().filter_map(|(what, result)| Some((what, result.err()?))).collect();
    assert!(failed.is_empty(), "{failed:?}");
}
