//! Models of the one-shot: the value arrives, and a getter that was pending is woken, whoever comes first.

use super::support::{bite, check, spawn};
use crate::sync::{
    EventCount, Flag, OneShot,
    shim::{Arc, Mutex},
};
use std::task::{Poll, Wake, Waker};

/// A waker that ends a wait of the model.
#[derive(Default)]
struct Tell {
    event: EventCount,
    woken: Flag,
}

impl Wake for Tell {
    fn wake(self: std::sync::Arc<Self>) {
        self.woken.raise();
        self.event.notify();
    }
}

impl Tell {
    fn wait(&self) {
        self.event.wait_until(None, || self.woken.is_raised().then_some(()));
    }
}

#[test]
fn a_value_arrives_and_wakes() {
    check(|| {
        let getter = Arc::new(OneShot::default());
        let setting = spawn(&getter, |setter| assert_eq!(setter.set(Box::new(7)), None));
        let tell = std::sync::Arc::new(Tell::default());
        let waker = Waker::from(tell.clone());
        let value = match getter.poll(&waker) {
            Poll::Ready(value) => value,
            Poll::Pending => {
                tell.wait();
                match getter.poll(&waker) {
                    Poll::Ready(value) => value,
                    Poll::Pending => panic!("woken without a value"),
                }
            }
        };
        assert_eq!(value, Some(Box::new(7)));
        setting.join().unwrap();
    });
}

/// A thread that looks by itself.
#[test]
fn a_value_is_there_when_the_flag_is() {
    check(|| {
        let getter = Arc::new(OneShot::default());
        let setting = spawn(&getter, |setter| assert_eq!(setter.set(Box::new(7)), None));
        if getter.is_set() {
            assert_eq!(getter.poll(Waker::noop()), Poll::Ready(Some(Box::new(7))));
        }
        setting.join().unwrap();
    });
}

/// A future that is polled again with another waker: the last one is woken.
#[test]
fn the_last_waker_is_woken() {
    check(|| {
        let getter = Arc::new(OneShot::default());
        let setting = spawn(&getter, |setter| assert_eq!(setter.set(Box::new(7)), None));
        let tells = [(); 2].map(|()| std::sync::Arc::new(Tell::default()));
        let mut value = getter.poll(&Waker::from(tells[0].clone()));
        if value.is_pending() {
            value = getter.poll(&Waker::from(tells[1].clone()));
        }
        if value.is_pending() {
            tells[1].wait();
            value = getter.poll(&Waker::from(tells[1].clone()));
        }
        assert_eq!(value, Poll::Ready(Some(Box::new(7))));
        setting.join().unwrap();
    });
}

/// A queue under a lock, and a thread that sleeps when it has nothing to do, as the visits of `src/jobs`: under the
/// lock the submitter sees whether the thread will look again, and wakes it otherwise.
#[test]
fn no_job_stays_in_the_queue() {
    #[derive(Default)]
    struct Core {
        /// Jobs, and whether a visit of the thread is under way or was posted.
        state: Mutex<(u32, bool)>,
        posts: Mutex<u32>,
        waker: EventCount,
    }
    check(|| {
        let core = Arc::new(Core { state: Mutex::new((0, false)), posts: Mutex::new(0), waker: EventCount::new() });
        let submitters = [(); 2].map(|()| {
            spawn(&core, |core| {
                let mut state = core.state.lock();
                state.0 += 1;
                let visiting = std::mem::replace(&mut state.1, true);
                drop(state);
                if !visiting {
                    *core.posts.lock() += 1;
                    core.waker.notify();
                }
            })
        });
        let mut ran = 0;
        while ran < 2 {
            core.waker.wait_until(None, || {
                let mut posts = core.posts.lock();
                (*posts > 0).then(|| *posts -= 1)
            });
            loop {
                let mut state = core.state.lock();
                if state.0 == 0 {
                    if !crate::sync::site::flag("model.jobs.forgets_to_leave") {
                        state.1 = false;
                    }
                    break;
                }
                state.0 -= 1;
                ran += 1;
                if crate::sync::site::flag("model.jobs.leaves_with_jobs") {
                    state.1 = false;
                    break;
                }
            }
        }
        submitters.into_iter().for_each(|submitter| submitter.join().unwrap());
        assert_eq!((core.state.lock().0, *core.posts.lock()), (0, 0));
    });
}

#[test]
fn teeth() {
    bite("one_shot");
}
