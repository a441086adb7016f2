//! Numbers for the operations and places of calls: what goes into a message of few words, and comes out as what it
//! stands for.
//!
//! There are as many as the program's text has calls. They are looked up in a report only; a call finds its own in a
//! cache of its thread.

use crate::error::Site;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::{cell::Cell, ptr};

/// An operation's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name(u16);

/// A place in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot(u32);

#[derive(Default)]
struct Table {
    names: Vec<&'static str>,
    sites: Vec<Site>,
}

static TABLE: Lazy<Mutex<Table>> = Lazy::new(Mutex::default);

/// Calls that a thread knows the numbers of.
const CACHED: usize = 16;

type Known = (&'static str, Site, Name, Spot);

thread_local! {
    static CACHE: [Cell<Option<Known>>; CACHED] = const { [const { Cell::new(None) }; CACHED] };
}

/// The numbers of a call.
#[inline]
pub(super) fn numbers(op: &'static str, site: Site) -> (Name, Spot) {
    // A function that passes on where it was called may make several operations there.
    let at = (ptr::from_ref(site).addr() / align_of_val(site) + op.len()) % CACHED;
    CACHE.with(|cache| match cache[at].get() {
        Some((known_op, known_site, name, spot)) if ptr::eq(known_op, op) && ptr::eq(known_site, site) => (name, spot),
        _ => {
            let (name, spot) = enter(op, site);
            cache[at].set(Some((op, site, name, spot)));
            (name, spot)
        }
    })
}

#[cold]
fn enter(op: &'static str, site: Site) -> (Name, Spot) {
    fn index<T: Copy>(all: &mut Vec<T>, new: T, same: impl Fn(T) -> bool) -> usize {
        all.iter().position(|&known| same(known)).unwrap_or_else(|| {
            all.push(new);
            all.len() - 1
        })
    }
    let mut table = TABLE.lock();
    // By text: a literal may be there more than once.
    let name = index(&mut table.names, op, |known| known == op);
    let spot = index(&mut table.sites, site, |known| ptr::eq(known, site));
    (Name(name as u16), Spot(spot as u32))
}

impl Name {
    pub(super) fn text(self) -> &'static str {
        TABLE.lock().names[usize::from(self.0)]
    }

    /// As it goes into a message, and out of it.
    pub(super) fn bits(self) -> u64 {
        u64::from(self.0)
    }

    pub(super) fn of_bits(bits: u64) -> Self {
        Name(bits as u16)
    }
}

impl Spot {
    pub(super) fn site(self) -> Site {
        TABLE.lock().sites[self.0 as usize]
    }

    /// As it goes into a message, and out of it.
    pub(super) fn bits(self) -> u64 {
        u64::from(self.0)
    }

    pub(super) fn of_bits(bits: u64) -> Self {
        Spot(bits as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{panic::Location, thread};

    /// All names at all places.
    fn all(names: &[&'static str], sites: &[Site]) -> Vec<(Name, Spot)> {
        names.iter().flat_map(|name| sites.iter().map(|site| numbers(name, site))).collect()
    }

    #[test]
    fn numbers_stand_for_what_they_were_made_of_on_every_thread() {
        // More than the cache has room for, so that some push others out.
        #[rustfmt::skip]
        let sites: [Site; 18] = [
            here(), here(), here(), here(), here(), here(), here(), here(), here(),
            here(), here(), here(), here(), here(), here(), here(), here(), here(),
        ];
        assert!(sites.iter().enumerate().all(|(k, site)| !sites[..k].contains(site)));
        let names = ["all_reduce", "barrier", "broadcast"];
        let (first, again) = (all(&names, &sites), all(&names, &sites));
        let elsewhere = thread::spawn(move || all(&names, &sites)).join().unwrap();
        assert!(first == again && first == elsewhere);
        for (k, (name, spot)) in first.into_iter().enumerate() {
            assert_eq!((name.text(), spot.site()), (names[k / sites.len()], sites[k % sites.len()]));
            assert_eq!((Name::of_bits(name.bits()), Spot::of_bits(spot.bits())), (name, spot));
        }
    }

    #[track_caller]
    fn here() -> Site {
        Location::caller()
    }
}
