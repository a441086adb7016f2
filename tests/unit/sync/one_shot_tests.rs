use super::*;
use crate::sync::rounds;
use std::{
    sync::{Arc, mpsc},
    task::Wake,
    thread,
};

struct Tell(mpsc::Sender<()>);

impl Wake for Tell {
    fn wake(self: Arc<Self>) {
        let _ = self.0.send(());
    }
}

fn waker() -> (Waker, mpsc::Receiver<()>) {
    let (tell, told) = mpsc::channel();
    (Waker::from(Arc::new(Tell(tell))), told)
}

#[test]
fn a_value_arrives_and_wakes() {
    for round in 0..rounds(2000) {
        let shot = OneShot::default();
        let (waker, told) = waker();
        thread::scope(|s| {
            s.spawn(|| assert_eq!(shot.set(round), None));
            let value = loop {
                match shot.poll(&waker) {
                    Poll::Ready(value) => break value,
                    Poll::Pending => told.recv().unwrap(),
                }
            };
            assert_eq!(value, Some(round));
        });
    }
}

#[test]
fn only_the_last_waker_is_woken_and_the_first_value_counts() {
    let shot = OneShot::default();
    let wakers = [waker(), waker()];
    assert!(wakers.iter().all(|(waker, _)| shot.poll(waker).is_pending()));
    assert_eq!((shot.set(1), shot.set(2)), (None, Some(2)));
    assert!(wakers[0].1.try_recv().is_err() && wakers[1].1.try_recv().is_ok() && shot.is_set());
    assert_eq!(shot.poll(&wakers[0].0), Poll::Ready(Some(1)));
    assert_eq!(shot.poll(&wakers[0].0), Poll::Ready(None));
}

/// The drop of a waker waits for a thread that sets the value.
#[test]
fn a_waker_is_not_dropped_under_the_lock() {
    struct Last(Arc<OneShot<u32>>);
    impl Wake for Last {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for Last {
        fn drop(&mut self) {
            let shot = self.0.clone();
            let (tell, told) = mpsc::channel();
            thread::spawn(move || tell.send(shot.set(1)));
            assert_eq!(told.recv_timeout(std::time::Duration::from_secs(20)), Ok(Some(1)));
        }
    }
    let shot = Arc::new(OneShot::default());
    let waker = Waker::from(Arc::new(Last(shot.clone())));
    assert!(shot.poll(&waker).is_pending());
    drop(waker);
    assert_eq!(shot.give_up(), None);
}

#[test]
fn a_value_without_a_getter_comes_back_and_the_waker_goes() {
    let shot = OneShot::default();
    let (waker, told) = waker();
    assert!(shot.poll(&waker).is_pending());
    drop(waker);
    assert_eq!(shot.give_up(), None);
    assert!(matches!(told.try_recv(), Err(mpsc::TryRecvError::Disconnected)));
    assert_eq!(shot.set(1), Some(1));
    let shot = OneShot::default();
    assert_eq!((shot.set(1), shot.give_up()), (None, Some(1)));
}
