//! What one device says to another, by broadcasts and through the ring, is heard in the order in which it was said.

use super::*;
use crate::fabric::call::Call;
use crate::sync::{EventCount, shim};
use proptest::prelude::*;
use std::time::{Duration, Instant};

fn gang(members: &[usize]) -> Gang {
    let wakers: Vec<_> = members.iter().map(|_| shim::Arc::new(EventCount::new())).collect();
    let gang = Gang::new(members.into(), wakers).with_broadcasts();
    gang.enter();
    gang
}

/// One device's end, and its part in a gang.
struct Member<'g> {
    endpoint: &'g mut Endpoint,
    gang: &'g Gang,
    rank: usize,
    broadcasts: Broadcasts,
}

impl<'g> Member<'g> {
    fn new(endpoint: &'g mut Endpoint, gang: &'g Gang, device: usize) -> Self {
        let rank = gang.members().iter().position(|member| *member == device).unwrap();
        Member { endpoint, gang, rank, broadcasts: Broadcasts::default() }
    }

    fn descriptor(what: usize) -> CompactDescriptor {
        CompactDescriptor::of_barrier(&Call { count: what, ..Call::new("barrier") }, (0x10, 2))
    }

    /// To all, if that is possible.
    fn announce(&mut self, what: usize) -> bool {
        self.endpoint.broadcast((self.gang, self.rank), &self.broadcasts, Self::descriptor(what).words().unwrap())
    }

    fn send(&mut self, to: usize, what: usize) -> bool {
        let body = Body::Compact(Self::descriptor(what));
        self.endpoint.push(to, Message::new(self.gang, &self.broadcasts, body, None)).is_ok()
    }

    /// What a device says next; `Err` when it is in a newer gang.
    fn hear(&mut self, from: usize) -> Result<Option<usize>, ()> {
        let rank = self.gang.members().iter().position(|member| *member == from).unwrap();
        let message = self.endpoint.poll(from, (self.gang, rank), &self.broadcasts).map_err(|NewerGang| ())?;
        Ok(message.map(|message| match message.body {
            Body::Broadcast(words) => CompactDescriptor::of_words(words, (0x10, 2)).call().count,
            Body::Compact(descriptor) => descriptor.call().count,
            _ => unreachable!("nothing else was said"),
        }))
    }
}

proptest! {
    // By turns in any way, as long as no broadcast is the next but one to what was not heard.
    #[test]
    fn in_the_order_in_which_it_was_said(steps in prop::collection::vec((any::<bool>(), 0usize..3), 1..80)) {
        let gang = gang(&[0, 1]);
        let mut ends = Endpoint::all(2);
        let [a, b] = &mut ends[..] else { unreachable!() };
        let (mut speaker, mut listener) = (Member::new(a, &gang, 0), Member::new(b, &gang, 1));
        let (mut said, mut heard, mut broadcasts) = (Vec::new(), Vec::new(), Vec::new());
        for (what, (to_all, looks)) in steps.into_iter().enumerate() {
            let unheard = broadcasts.iter().filter(|what| !heard.contains(*what)).count();
            if to_all && unheard < 2 && speaker.announce(what) {
                broadcasts.push(what);
                said.push(what);
            } else if speaker.send(1, what) {
                said.push(what);
            }
            for _ in 0..looks {
                heard.extend(listener.hear(0).unwrap());
            }
        }
        while let Some(what) = listener.hear(0).unwrap() {
            heard.push(what);
        }
        prop_assert_eq!(heard, said);
    }
}

/// Members that meet again and again and say something more in between, each by broadcast or through the ring as it
/// comes.
#[test]
fn members_that_meet_hear_all_of_it_in_order() {
    // Beside busy threads each round costs time slices.
    const ROUNDS: usize = 4_000;
    const TIMEOUT: Duration = Duration::from_secs(600);
    let gang = gang(&[0, 1]);
    let mut ends = Endpoint::all(2);
    // What member `rank` says in a round: numbers, the first to all if that can be.
    let says =
        |rank: usize, round: usize| (3 * round..3 * round + 1 + (round * 7 + rank * 3) % 5 / 2).collect::<Vec<_>>();
    let broadcasts: usize = std::thread::scope(|s| {
        let both: Vec<_> = ends
            .iter_mut()
            .enumerate()
            .map(|(device, end)| {
                let gang = &gang;
                s.spawn(move || {
                    let (mut own, mut posted) = (Member::new(end, gang, device), 0);
                    for round in 0..ROUNDS {
                        for (k, what) in says(device, round).into_iter().enumerate() {
                            let announced = k == 0 && round % 11 > 0 && own.announce(what);
                            posted += usize::from(announced);
                            assert!(
                                announced || own.send(1 - device, what),
                                "a round has three messages, and the ring more room"
                            );
                        }
                        for what in says(1 - device, round) {
                            let begun = Instant::now();
                            let heard = loop {
                                if let Some(heard) = own.hear(1 - device).unwrap() {
                                    break heard;
                                }
                                assert!(begun.elapsed() < TIMEOUT, "{what} never came, or the other has failed");
                                std::thread::yield_now();
                            };
                            assert_eq!(heard, what);
                        }
                    }
                    posted
                })
            })
            .collect();
        both.into_iter().map(|member| member.join().unwrap()).sum()
    });
    assert!((1..2 * ROUNDS).contains(&broadcasts), "{broadcasts}: both ways");
}

#[test]
fn a_broadcast_waits_for_what_is_in_the_ring() {
    let gang = gang(&[0, 1, 2]);
    let mut ends = Endpoint::all(3);
    let [a, b, _] = &mut ends[..] else { unreachable!() };
    let (mut speaker, mut listener) = (Member::new(a, &gang, 0), Member::new(b, &gang, 1));
    assert!(speaker.announce(1) && speaker.send(1, 2));
    assert!(!speaker.announce(3), "somebody would hear it before what is on its way");
    assert_eq!([listener.hear(0), listener.hear(0), listener.hear(0)], [Ok(Some(1)), Ok(Some(2)), Ok(None)]);
    assert!(speaker.announce(3));
    assert_eq!(listener.hear(0), Ok(Some(3)));
}

// A member that is slow hears what one has said to the gang that it has left since, however much that one says in
// others.
#[test]
fn who_has_gone_on_was_heard() {
    for by_ring in [false, true] {
        let (first, elsewhere, second) = (gang(&[0, 1]), [gang(&[0, 2]), gang(&[2, 0])], gang(&[1, 0]));
        let mut ends = Endpoint::all(3);
        let [a, b, _] = &mut ends[..] else { unreachable!() };
        let mut speaker = Member::new(a, &first, 0);
        assert!(speaker.announce(1) && (!by_ring || speaker.send(1, 2)));
        for (place, what) in [(&elsewhere[0], 10), (&elsewhere[1], 20), (&second, 3)] {
            let mut speaker = Member::new(a, place, 0);
            // Nobody listens, so one more would be too many where somebody is to.
            for k in 0..2 {
                // To device 2 it can be a broadcast; to device 1 it cannot as long as there is something in the ring.
                let said = speaker.announce(what + k);
                assert_eq!(said, place.members().contains(&2) || !by_ring);
                assert!(said || speaker.send(1, what + k));
            }
        }
        let mut listener = Member::new(b, &first, 1);
        assert_eq!(listener.hear(0), Ok(Some(1)));
        if by_ring {
            assert_eq!(
                [listener.hear(0), listener.hear(0)],
                [Ok(Some(2)), Err(())],
                "what comes next is to a newer gang"
            );
        } else {
            assert_eq!(listener.hear(0), Ok(None));
        }
        let mut listener = Member::new(b, &second, 1);
        assert_eq!([(); 3].map(|()| listener.hear(0)), [Ok(Some(3)), Ok(Some(4)), Ok(None)]);
    }
}

// Of a gang that has failed: what nobody has taken is dropped when the next one comes by.
#[test]
fn what_an_older_gang_has_left_is_dropped() {
    let (failed, next) = (gang(&[0, 1]), gang(&[0, 1]));
    let mut ends = Endpoint::all(2);
    let [a, b] = &mut ends[..] else { unreachable!() };
    let mut speaker = Member::new(a, &failed, 0);
    assert!(speaker.announce(1) && speaker.send(1, 2) && speaker.send(1, 3));
    let mut speaker = Member::new(a, &next, 0);
    assert!(!speaker.announce(4) && speaker.send(1, 4));
    let mut listener = Member::new(b, &next, 1);
    assert_eq!([listener.hear(0), listener.hear(0)], [Ok(Some(4)), Ok(None)]);
    assert!(listener.endpoint.took() && !listener.endpoint.took());
    assert!(speaker.announce(5));
    assert_eq!([listener.hear(0), listener.hear(0)], [Ok(Some(5)), Ok(None)]);
}
