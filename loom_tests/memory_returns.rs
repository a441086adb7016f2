//! Models of returned boxes (L1 to L6 of the memory pool's protocols): each box is returned once, with all work done on
//! it; also if it is reused, if it races with the close, or if its sender does nothing any more.

use super::support::{Watched, bite, check};
use crate::sync::{
    EventCount, Flag, Link, Linked, Returns,
    shim::{Arc, thread},
    site::flag,
};

/// A box with content: an access by a thread that does not own the box is a race.
struct Parcel {
    content: Watched<usize>,
    link: Link<Parcel>,
}

// SAFETY: always the same field, and no other code uses it.
unsafe impl Linked for Parcel {
    fn link(&self) -> &Link<Parcel> {
        &self.link
    }
}

fn parcel(content: usize) -> Box<Parcel> {
    Box::new(Parcel { content: Watched::new(content), link: Link::default() })
}

fn push(home: &Returns<Parcel>, lane: usize, content: usize) {
    assert!(home.push(lane, parcel(content)).is_ok(), "nobody closes");
}

fn contents(taken: impl Iterator<Item = Box<Parcel>>) -> Vec<usize> {
    taken.map(|parcel| parcel.content.get()).collect()
}

fn shared(lanes: usize) -> Arc<Returns<Parcel>> {
    Arc::new(Returns::new(lanes))
}

fn start<R: 'static>(
    home: &Arc<Returns<Parcel>>,
    work: impl FnOnce(&Returns<Parcel>) -> R + 'static,
) -> thread::JoinHandle<R> {
    let home = home.clone();
    thread::spawn(move || work(&home))
}

/// L1, L2: two senders, in one lane or in two, push two boxes each while the owner takes. Each box arrives once, with
/// its content, in its sender's order.
fn two_senders(lanes: [usize; 2]) {
    let home = shared(1 + lanes[1]);
    let senders =
        [0, 1].map(|sender| start(&home, move |home| (0..2).for_each(|i| push(home, lanes[sender], 10 * sender + i))));
    let mut all = contents(home.take());
    senders.into_iter().for_each(|sender| sender.join().unwrap());
    all.extend(contents(home.take()));
    assert!(home.is_empty());
    let of = |sender: usize| all.iter().copied().filter(|content| content / 10 == sender).collect::<Vec<_>>();
    assert_eq!((of(0), of(1), all.len()), (vec![0, 1], vec![10, 11], 4), "each once, in order: {all:?}");
}

#[test]
fn two_senders_share_a_lane() {
    check(|| two_senders([0, 0]));
}

#[test]
fn two_senders_have_lanes() {
    check(|| two_senders([0, 1]));
}

/// L2: the sender's work is visible, also outside of the box, and so is the work of a taker of an earlier box.
#[test]
fn what_was_done_before_is_seen() {
    check(|| {
        let (home, beside) = (shared(1), Arc::new(Watched::new(0)));
        let sender = start(&home, {
            let beside = beside.clone();
            move |home| {
                push(home, 0, 1);
                beside.set(5);
                push(home, 0, 2);
            }
        });
        let taken = contents(home.take());
        if taken.contains(&2) {
            assert_eq!((beside.get(), taken), (5, vec![1, 2]));
        }
        sender.join().unwrap();
    });
}

/// L3: a box is returned, handed out, written by another thread and pushed again, while a third thread is in the middle
/// of a push that saw this box as head. No box is lost or doubled, and no thread sees old content.
#[test]
fn a_box_goes_round_under_a_push() {
    check(|| {
        let (home, out) = (shared(1), shared(1));
        push(&home, 0, 1);
        let pusher = start(&home, |home| push(home, 0, 10));
        let user = start(&home, {
            let out = out.clone();
            move |home| {
                for parcel in out.take() {
                    parcel.content.set(parcel.content.get() + 1);
                    assert!(home.push(0, parcel).is_ok());
                }
            }
        });
        let mut all = Vec::new();
        for parcel in home.take() {
            if parcel.content.get() == 10 {
                all.push(parcel);
            } else {
                // The box is handed out to the user, with new content.
                parcel.content.set(2);
                assert!(out.push(0, parcel).is_ok());
            }
        }
        all.extend(home.take());
        pusher.join().unwrap();
        user.join().unwrap();
        let waiting = contents(out.take());
        let mut all = contents(all.into_iter().chain(home.take()));
        all.extend(waiting.iter().map(|content| content + 1));
        all.sort_unstable();
        assert_eq!(all, [3, 10]);
    });
}

/// L5: the close races with a push to either lane. Each box is in the last take or is returned to its pusher, and that
/// pusher sees everything done before the close.
#[test]
fn a_push_against_the_close() {
    check(|| {
        let (home, why) = (shared(2), Arc::new(Watched::new(0)));
        let senders = [0, 1].map(|lane| {
            let why = why.clone();
            start(&home, move |home| match home.push(lane, parcel(lane)) {
                Ok(()) => None,
                Err(parcel) => {
                    assert_eq!(why.get(), 9);
                    Some(parcel)
                }
            })
        });
        why.set(9);
        let mut kept = contents(home.close());
        assert!(home.is_empty());
        let back: Vec<_> = senders.into_iter().filter_map(|sender| sender.join().unwrap()).collect();
        kept.extend(contents(back.into_iter()));
        kept.sort_unstable();
        assert_eq!(kept, [0, 1], "each in the last take or returned");
        assert!(home.push(0, parcel(2)).is_err() && home.take().next().is_none());
    });
}

/// L5: a taker that has loaded the head before the close does not reopen the lane.
#[test]
fn a_take_against_the_close() {
    check(|| {
        let home = shared(1);
        push(&home, 0, 1);
        let taker = start(&home, |home| contents(home.take()));
        let mut all = contents(home.close());
        let late = home.push(0, parcel(2));
        assert!(late.is_err(), "closed for good");
        all.extend(taker.join().unwrap());
        assert_eq!(all, [1]);
    });
}

/// A peer's push. The mutant collects boxes at the sender, as batching allocators do.
fn free(home: &Returns<Parcel>, batch: &mut Vec<Box<Parcel>>) {
    let freed = parcel(1);
    if flag("model.returns.batches_at_the_sender") {
        batch.push(freed);
    } else {
        assert!(home.push(1, freed).is_ok());
    }
}

/// L6: a peer has freed a box, has reported that, and does nothing more until the owner has finished. The owner finds
/// the box without the peer's help. This is the reason not to batch at the sender.
#[test]
fn what_a_parked_peer_has_freed_is_there() {
    check(|| {
        let (home, event, told, go) = (shared(2), EventCount::new(), Flag::new(), Flag::new());
        let world = Arc::new((event, told, go));
        let peer = start(&home, {
            let world = world.clone();
            move |home| {
                let (event, told, go) = &*world;
                let mut batch = Vec::new();
                free(home, &mut batch);
                told.raise();
                event.notify();
                event.wait_until(None, || go.is_raised().then_some(()));
            }
        });
        let (event, told, go) = &*world;
        event.wait_until(None, || told.is_raised().then_some(()));
        assert!(!home.is_empty());
        assert_eq!(contents(home.take()), [1], "freed, so there");
        go.raise();
        event.notify();
        peer.join().unwrap();
    });
}

/// L6: an owner without memory sleeps until a box is returned, and the push wakes it. The peer then waits for the
/// owner, so no other thread can wake the owner.
#[test]
fn an_owner_that_waits_for_a_free_wakes_up() {
    check(|| {
        let (home, freed, served) = (shared(2), EventCount::new(), (EventCount::new(), Flag::new()));
        let world = Arc::new((freed, served));
        let peer = start(&home, {
            let world = world.clone();
            move |home| {
                let (freed, (event, served)) = &*world;
                let mut batch = Vec::new();
                free(home, &mut batch);
                freed.notify();
                event.wait_until(None, || served.is_raised().then_some(()));
            }
        });
        let (freed, (event, served)) = &*world;
        let taken = freed.wait_until(None, || home.take().next());
        assert_eq!(taken.unwrap().content.get(), 1);
        served.raise();
        event.notify();
        peer.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("memory_returns");
}
