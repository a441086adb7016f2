//! What a member says to its whole gang at once: one line that all others read, instead of a slot in a ring to each.
//!
//! A ring's slot and its two indices are lines that lie in the caches of two cores; to send to seven and to hear from seven, eight
//! threads fetched more than forty lines each, one meeting took 3 us, and 5.4 where the cores are of two sockets. With a headline
//! ([`crate::sync::Headline`]) a member writes one line, and reads seven.
//!
//! What is said by headline and what goes through a ring has one order, for each pair. A device posts a headline only when its rings to
//! all who are to read it are empty; and a message in a ring says how many headlines its sender had posted before.
//!
//! Nobody keeps room: of headlines of gangs that have failed some may be overwritten before they are read, and they are passed over. In a
//! gang that goes on none is ([`Headline`]'s contract): its members post one each for a meeting of all of them, and leave the meeting
//! when they have everybody's.

use super::board::NewerGang;
use crate::sync::Headline;
use std::sync::Arc;

/// What it says: first the place of the gang.
pub(super) type Words = [u64; 7];

/// One device's headlines, and how far it has read the others'; by ordinal in the pool.
pub(super) struct Headlines {
    own: Arc<Headline<7>>,
    posted: u64,
    others: Vec<Others>,
}

struct Others {
    headline: Arc<Headline<7>>,
    read: u64,
}

impl Headlines {
    /// Those of `count` devices.
    pub(super) fn all(count: usize) -> impl Iterator<Item = Headlines> {
        let all: Vec<Arc<Headline<7>>> = (0..count).map(|_| Arc::default()).collect();
        (0..count).map(move |k| Headlines {
            own: all[k].clone(),
            posted: 0,
            others: all.iter().map(|headline| Others { headline: headline.clone(), read: 0 }).collect(),
        })
    }

    pub(super) fn post(&mut self, words: Words) {
        self.posted += 1;
        self.own.post(self.posted, words);
    }

    /// How many this device has posted.
    pub(super) fn posted(&self) -> u64 {
        self.posted
    }

    /// How many of a device's have been read, or passed over.
    pub(super) fn read(&self, from: usize) -> u64 {
        self.others[from].read
    }

    /// The next headline of a device to this gang, if it is there, of its first `most`. `Err` when the next one is to a newer gang.
    #[inline]
    pub(super) fn poll(&mut self, from: usize, gang: u64, most: u64) -> Result<Option<Words>, NewerGang> {
        let from = &mut self.others[from];
        loop {
            if from.read >= most {
                return Ok(None);
            }
            let next = from.read + 1;
            let Some((number, words)) = from.headline.read(next) else { return Ok(None) };
            if number > next {
                // This one is gone; the one before what has taken its place may still be there.
                from.read = number - 2;
            } else if words[0] > gang {
                return Err(NewerGang);
            } else {
                from.read = next;
                if words[0] == gang {
                    return Ok(Some(words));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(gang: u64, what: u64) -> Words {
        [gang, what, 0, 0, 0, 0, 0]
    }

    fn pair() -> [Headlines; 2] {
        let mut both = Headlines::all(2);
        [both.next().unwrap(), both.next().unwrap()]
    }

    /// What member 0 has said to this gang; `None` for a newer one.
    fn hear(member: &mut Headlines, gang: u64) -> Option<Vec<u64>> {
        let mut heard = Vec::new();
        loop {
            match member.poll(0, gang, u64::MAX) {
                Ok(Some(words)) => heard.push(words[1]),
                Ok(None) => return Some(heard),
                Err(NewerGang) => return None,
            }
        }
    }

    #[test]
    fn headlines_of_older_gangs_are_passed_over_and_newer_ones_stay() {
        let [mut speaker, mut listener] = pair();
        speaker.post(say(3, 1));
        speaker.post(say(5, 2));
        assert_eq!((hear(&mut listener, 2), listener.read(0)), (None, 0), "both are to newer gangs");
        assert_eq!((hear(&mut listener, 4), listener.read(0)), (None, 1), "one is to an older gang");
        assert_eq!((hear(&mut listener, 5), listener.read(0)), (Some(vec![2]), 2));
        speaker.post(say(5, 3));
        speaker.post(say(5, 4));
        assert_eq!(hear(&mut listener, 5), Some(vec![3, 4]), "in their order");
        assert_eq!(hear(&mut listener, 5), Some(vec![]));
    }

    #[test]
    fn who_has_missed_some_goes_on_with_the_last_two() {
        for missed in 0..6 {
            let [mut speaker, mut listener] = pair();
            (0..missed).for_each(|k| speaker.post(say(1, k)));
            speaker.post(say(2, 10));
            speaker.post(say(2, 11));
            assert_eq!(hear(&mut listener, 2), Some(vec![10, 11]), "{missed}");
            assert_eq!((speaker.posted(), listener.read(0)), (missed + 2, missed + 2));
        }
    }
}
