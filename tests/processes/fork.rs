//! After a fork there are no device threads in the child: it is told so, and neither hangs nor crashes (pycuda#137,
//! vllm#32611). The test forks in a process of its own, which has but one application thread.

use crate::support::{TIMEOUT, in_a_process, task};
use gpu_pool::{Error, GpuPool};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

#[test]
fn a_forked_child_is_told_and_ends() {
    in_a_process("fork::parent", "fork");
}

/// The process that forks.
#[test]
fn parent() {
    if task().is_none() {
        return;
    }
    let pool = GpuPool::builder().host(2).build().unwrap();
    let mut state = pool.per_device(|dev, _| dev.upload(&[1.0f32; 100])).unwrap();
    let buffers = pool.run(|dev, _| dev.upload(&[1.0f32; 100])).unwrap();
    let (pinned, unified) = (pool.pinned::<u8>(10).unwrap(), pool.unified::<u8>(10).unwrap());
    let events = pool.run(|dev, _| dev.record()).unwrap();
    // SAFETY: the child runs what is to be tested here, on its only thread, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        -1 => panic!("no fork: {}", std::io::Error::last_os_error()),
        0 => {
            // A new pool in the child is not promised: locks and thread tables are as the parent's other threads left
            // them.
            let child = AssertUnwindSafe(|| {
                let told = |error: Option<Error>| matches!(error, Some(Error::Forked { built, now }) if built != now);
                let mut code = 0;
                let mut note = |bit: i32, ok: bool| code |= if ok { 0 } else { 1 << bit };
                note(0, told(pool.run(|_, _| Ok(())).err()));
                note(1, told(pool.on(&[0]).run(|_, _| Ok(())).err()));
                note(2, told(pool.per_device(|_, _| Ok(())).err()));
                note(3, told(pool.pinned::<u8>(1).err()) && told(pool.unified::<u8>(1).err()));
                note(4, told(state.run(|_, _, _| Ok(())).err()));
                drop(buffers);
                drop((pinned, unified, events));
                drop(state);
                note(5, told(pool.close().err()));
                code
            });
            let code = catch_unwind(child).unwrap_or(99);
            // SAFETY: ends the child without running the test harness's exit code.
            unsafe { libc::_exit(code) }
        }
        child => {
            let (mut status, start) = (0, Instant::now());
            // SAFETY: `status` is a live integer.
            let mut ended = || unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } != 0;
            while !ended() {
                if start.elapsed() > TIMEOUT / 2 {
                    // SAFETY: the child is this process's own and has not been waited for.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                    panic!("the child hung");
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(libc::WIFEXITED(status), "the child crashed: {status:#x}");
            assert_eq!(libc::WEXITSTATUS(status), 0, "what failed, by bit");
        }
    }
    // The parent has noticed nothing.
    assert_eq!(state.run(|dev, _, x| dev.download(x)).unwrap(), [[1.0; 100]; 2]);
    drop((buffers, pinned, unified, events));
    pool.close().unwrap();
}
