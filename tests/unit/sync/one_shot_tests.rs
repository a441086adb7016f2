use super::*;
use crate::sync::rounds;
use std::{sync::mpsc, task::Wake, thread};

struct Tell(mpsc::Sender<()>);

impl Wake for Tell {
    fn wake(self: std::sync::Arc<Self>) {
        let _ = self.0.send(());
    }
}

#[test]
fn a_value_arrives_and_wakes() {
    for round in 0..rounds(2000) {
        let (setter, mut getter) = one_shot();
        let (tell, told) = mpsc::channel();
        let waker = Waker::from(std::sync::Arc::new(Tell(tell)));
        thread::scope(|s| {
            s.spawn(move || setter.set(round));
            let value = loop {
                match getter.poll(&waker) {
                    Poll::Ready(value) => break value,
                    Poll::Pending => told.recv().unwrap(),
                }
            };
            assert_eq!(value, Some(round));
        });
    }
}

#[test]
fn only_the_last_waker_is_woken_and_a_dropped_setter_answers() {
    let (setter, mut getter) = one_shot::<String>();
    let (told, wakers): (Vec<_>, Vec<_>) = (0..2)
        .map(|_| {
            let (tell, told) = mpsc::channel();
            (told, Waker::from(std::sync::Arc::new(Tell(tell))))
        })
        .unzip();
    assert!(wakers.iter().all(|waker| getter.poll(waker).is_pending()));
    drop(setter);
    assert!(told[0].try_recv().is_err() && told[1].try_recv().is_ok() && getter.is_set());
    assert_eq!(getter.poll(&wakers[0]), Poll::Ready(None));
}

#[test]
fn a_value_that_nobody_gets_is_dropped() {
    let token = std::sync::Arc::new(());
    let (setter, getter) = one_shot();
    drop(getter);
    setter.set(token.clone());
    assert_eq!(std::sync::Arc::strong_count(&token), 1);
}
