use gpu_pool::extend::sync::Link;
use gpu_pool::extend::sync::*;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

/// `token` counts the live parcels.
#[derive(Debug)]
struct Parcel {
    sender: usize,
    number: usize,
    _token: Arc<()>,
    link: Link<Parcel>,
}

// SAFETY: always the same field, and no other code uses it.
unsafe impl Linked for Parcel {
    fn link(&self) -> &Link<Parcel> {
        &self.link
    }
}

fn parcel(sender: usize, number: usize, token: &Arc<()>) -> Box<Parcel> {
    Box::new(Parcel { sender, number, _token: token.clone(), link: Link::default() })
}

fn numbers(taken: Taken<Parcel>) -> Vec<usize> {
    taken.map(|parcel| parcel.number).collect()
}

/// Senders push to `lanes[i]`, their own or a shared lane, while the owner takes.
fn all_come_home(lanes: [usize; 3]) {
    const EACH: usize = crate::rounds(30_000);
    let (home, token) = (Returns::new(4), Arc::new(()));
    let mut next = [0; 3];
    thread::scope(|s| {
        for (sender, lane) in lanes.into_iter().enumerate() {
            let (home, token) = (&home, &token);
            s.spawn(move || {
                (0..EACH).for_each(|number| home.push(lane, parcel(sender, number, token)).unwrap());
            });
        }
        while next.iter().sum::<usize>() < 3 * EACH {
            for parcel in home.take() {
                assert_eq!(parcel.number, next[parcel.sender], "in the sender's order, once");
                next[parcel.sender] += 1;
            }
        }
    });
    assert!(home.is_empty());
    assert_eq!(Arc::strong_count(&token), 1);
}

#[test]
fn all_come_home_by_their_own_lanes() {
    all_come_home([1, 2, 3]);
}

#[test]
fn all_come_home_by_one_lane() {
    all_come_home([0, 0, 0]);
}

#[test]
fn lanes_come_one_after_the_other_each_oldest_first() {
    let (home, token) = (Returns::new(3), Arc::new(()));
    for (lane, number) in [(2, 20), (0, 0), (1, 10), (0, 1), (2, 21), (1, 11)] {
        home.push(lane, parcel(lane, number, &token)).unwrap();
    }
    assert_eq!(numbers(home.take()), [0, 1, 10, 11, 20, 21]);
    assert_eq!(home.take().count(), 0);
}

/// A push to a lane that does not exist uses lane 0, since pushes happen in drops.
#[test]
fn a_lane_that_does_not_exist_is_the_first() {
    let (home, token) = (Returns::new(2), Arc::new(()));
    home.push(7, parcel(0, 1, &token)).unwrap();
    home.push(usize::MAX, parcel(0, 2, &token)).unwrap();
    home.push(0, parcel(0, 3, &token)).unwrap();
    assert_eq!(numbers(home.take()), [1, 2, 3]);
}

#[test]
#[should_panic(expected = "without a lane")]
fn no_lanes() {
    Returns::<Parcel>::new(0);
}

#[test]
fn once_closed_boxes_come_back_and_stay_alive() {
    let (home, token) = (Returns::new(2), Arc::new(()));
    home.push(0, parcel(0, 1, &token)).unwrap();
    home.push(1, parcel(0, 2, &token)).unwrap();
    assert_eq!(numbers(home.close()), [1, 2]);
    assert_eq!(home.push(1, parcel(0, 3, &token)).unwrap_err().number, 3);
    let back = [4, 5, 6].map(|i| home.push(0, parcel(0, i, &token)).unwrap_err());
    assert_eq!(back.each_ref().map(|parcel| parcel.number), [4, 5, 6]);
    assert_eq!(Arc::strong_count(&token), 1 + 3);
    assert_eq!(home.take().count() + home.close().count(), 0, "closed for good");
    assert!(home.is_empty() && home.push(0, parcel(0, 7, &token)).is_err());
}

/// Each push that races with the close is in the last take or returned.
#[test]
fn closing_against_pushing_loses_and_doubles_nothing() {
    for _ in 0..crate::rounds(100) {
        let (home, token, sent) = (Returns::new(3), Arc::new(()), AtomicUsize::new(0));
        let (kept, back) = thread::scope(|s| {
            let senders: Vec<_> = (0..3)
                .map(|lane| {
                    let (home, token, sent) = (&home, &token, &sent);
                    s.spawn(move || {
                        let mut number = 0;
                        while home.push(lane, parcel(lane, number, token)).is_ok() {
                            number += 1;
                            sent.fetch_add(1, Ordering::Relaxed);
                        }
                        number
                    })
                })
                .collect();
            let mut kept = 0;
            while sent.load(Ordering::Relaxed) < 30 {
                kept += home.take().count();
                thread::yield_now();
            }
            kept += home.close().count();
            (kept, senders.into_iter().map(|sender| sender.join().unwrap()).sum::<usize>())
        });
        assert_eq!(kept, back);
        assert_eq!(Arc::strong_count(&token), 1);
    }
}

/// A close between the load and the exchange of a take must not be undone by the take.
#[test]
fn takers_and_a_closer_share_without_loss() {
    for _ in 0..crate::rounds(100) {
        let (home, token, over) = (Returns::new(2), Arc::new(()), AtomicBool::new(false));
        let (pushed, taken) = thread::scope(|s| {
            let sender = s.spawn(|| (0..).take_while(|&i| home.push(1, parcel(0, i, &token)).is_ok()).count());
            let taker = s.spawn(|| {
                let mut taken = 0;
                while !over.load(Ordering::Relaxed) {
                    taken += home.take().count();
                }
                taken
            });
            (0..3).for_each(|_| thread::yield_now());
            let last = home.close().count();
            let pushed = sender.join().unwrap();
            over.store(true, Ordering::Relaxed);
            (pushed, taker.join().unwrap() + last)
        });
        assert_eq!(pushed, taken);
    }
}

#[test]
fn what_nobody_takes_is_dropped_once() {
    let (home, token) = (Returns::new(2), Arc::new(()));
    (0..10).for_each(|i| home.push(i % 2, parcel(0, i, &token)).unwrap());
    assert!(!home.is_empty());
    let mut taken = home.take();
    assert!(taken.next().is_some());
    (0..5).for_each(|i| home.push(i % 2, parcel(0, i, &token)).unwrap());
    assert_eq!(Arc::strong_count(&token), 1 + 9 + 5);
    drop(taken);
    assert_eq!(Arc::strong_count(&token), 1 + 5);
    drop(home);
    assert_eq!(Arc::strong_count(&token), 1);
}

/// The node is the box: it comes out at the same address.
#[test]
fn the_same_box_goes_round() {
    let (home, token) = (Returns::new(1), Arc::new(()));
    let mut boxed = parcel(0, 0, &token);
    let address = &raw const *boxed;
    for round in 0..10 {
        boxed.number = round;
        home.push(0, boxed).unwrap();
        boxed = home.take().next().unwrap();
        assert!(boxed.number == round && &raw const *boxed == address);
    }
}
