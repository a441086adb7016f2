//! A process that was stopped for longer than the deadline goes on when it goes on: in that time nobody could get on, so nobody is
//! late. (In a debugger, by `SIGSTOP`, with its virtual machine.)
#![cfg(unix)]

mod support;

use gpu_pool::{GpuPool, LaunchDims, Module, kernel};
use std::{
    env,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    sync::mpsc::channel,
    thread,
    time::Duration,
};
use support::guarded;

const CHILD: &str = "GPU_POOL_TEST_STOPPED_CHILD";
const DEADLINE: Duration = Duration::from_secs(2);
/// What everybody waits for, in naps: when the process goes on in its midst, only one nap has ended.
const NAPS: (usize, Duration) = (20, Duration::from_millis(50));
const STOPPED: Duration = Duration::from_secs(3);

static MODULE: Module = Module::ptx("");
kernel! {
    static SLEEPY: "sleepy" in MODULE, fn(x: &mut [u32]) |_| { sleep(); x.fill(1) }
}

fn sleep() {
    (0..NAPS.0).for_each(|_| thread::sleep(NAPS.1));
}

#[test]
fn a_stopped_process_misses_no_deadline() {
    guarded(|| {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["the_process_that_is_stopped", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("all wait")), "it ended early: {}", child.wait().unwrap());
        // SAFETY: the child is this process's own and has not been waited for.
        let signal = |signal| assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        thread::sleep(Duration::from_millis(200));
        signal(libc::SIGSTOP);
        thread::sleep(STOPPED);
        signal(libc::SIGCONT);
        lines.for_each(|line| println!("{line}"));
        let status = child.wait().unwrap();
        assert!(status.success(), "{status}");
    });
}

/// What the test above runs and stops: waits for a peer, for a stream, and for a device's turn.
#[test]
fn the_process_that_is_stopped() {
    if env::var_os(CHILD).is_none() {
        return;
    }
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
        begins.recv().unwrap();
        let turn = s.spawn(|| {
            say();
            turns.run(|_, _| Ok(()))
        });
        (0..3).for_each(|_| all.recv().unwrap());
        println!("all wait");
        [peer, stream, first, turn].map(|thread| thread.join().unwrap())
    });
    let results =
        [("peer", peer.map(drop)), ("stream", stream.map(drop)), ("first", first.map(drop)), ("turn", turn.map(drop))];
    let failed: Vec<_> = results.into_iter().filter_map(|(what, result)| Some((what, result.err()?))).collect();
    assert!(failed.is_empty(), "{failed:?}");
}
