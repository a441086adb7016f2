//! Models of the inbox: each element reaches one taker, with its sender's writes, in its sender's order.

use super::support::{bite, check, spawn};
use crate::sync::{Inbox, shim::Arc};

#[test]
fn two_senders_one_taker() {
    check(|| {
        let inbox = Arc::new(Inbox::new());
        let senders: Vec<_> = (0..2)
            .map(|sender| spawn(&inbox, move |inbox| (0..2 - sender).for_each(|i| inbox.push((sender, i)))))
            .collect();
        let mut taken: Vec<_> = inbox.take().collect();
        taken.extend(inbox.take());
        senders.into_iter().for_each(|s| s.join().unwrap());
        taken.extend(inbox.take());
        assert!(inbox.take().next().is_none());
        assert_eq!(taken.len(), 3, "no element is lost or doubled");
        let of_first: Vec<_> = taken.iter().filter(|(sender, _)| *sender == 0).collect();
        assert_eq!(of_first, [&(0, 0), &(0, 1)], "in the sender's order");
    });
}

#[test]
fn two_takers_share() {
    check(|| {
        let inbox = Arc::new(Inbox::new());
        let sender = spawn(&inbox, move |inbox| (0..2).for_each(|i| inbox.push(i)));
        let taker = spawn(&inbox, move |inbox| inbox.take().collect::<Vec<_>>());
        let mut taken: Vec<_> = inbox.take().collect();
        sender.join().unwrap();
        taken.extend(taker.join().unwrap());
        taken.extend(inbox.take());
        taken.sort_unstable();
        assert_eq!(taken, [0, 1]);
    });
}

#[test]
fn teeth() {
    bite("inbox");
}
