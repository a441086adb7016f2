//! Small numbers for the names of operations and for places in the program: a compact descriptor and a record of the
//! flight recorder have no room for pointers.
//!
//! A call finds its own numbers in a cache of its thread, without the lock. Only a report looks a number up.
//!
//! Invariant: a number stands for one name, or one place, on all threads, for the life of the process. There are at
//! most as many numbers as the program's text has calls.

use super::Site;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::{cell::Cell, collections::HashMap, ptr};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpId(u16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SiteId(u32);

#[derive(Default)]
struct Table {
    names: Vec<&'static str>,
    sites: Vec<Site>,
    /// By text: a literal may be there more than once. Places by address.
    known: (HashMap<&'static str, usize>, HashMap<usize, usize>),
}

static TABLE: Lazy<Mutex<Table>> = Lazy::new(Mutex::default);

/// Calls whose numbers a thread keeps.
const CACHED: usize = 64;

type Cached = (&'static str, Site, OpId, SiteId);

thread_local! {
    static CACHE: [Cell<Option<Cached>>; CACHED] = const { [const { Cell::new(None) }; CACHED] };
}

#[inline]
pub(crate) fn ids(op: &'static str, site: Site) -> (OpId, SiteId) {
    // Several operations may have one place: a `track_caller` function passes its caller's place on.
    let at = (ptr::from_ref(site).addr() / size_of_val(site) + op.len()) % CACHED;
    CACHE.with(|cache| match cache[at].get() {
        Some((known_op, known_site, name, place)) if ptr::eq(known_op, op) && ptr::eq(known_site, site) => {
            (name, place)
        }
        _ => {
            let (name, place) = enter(op, site);
            cache[at].set(Some((op, site, name, place)));
            (name, place)
        }
    })
}

#[cold]
fn enter(op: &'static str, site: Site) -> (OpId, SiteId) {
    let Table { names, sites, known } = &mut *TABLE.lock();
    fn add<T>(all: &mut Vec<T>, new: T) -> usize {
        all.push(new);
        all.len() - 1
    }
    let name = *known.0.entry(op).or_insert_with(|| add(names, op));
    let place = *known.1.entry(ptr::from_ref(site).addr()).or_insert_with(|| add(sites, site));
    (OpId(name as u16), SiteId(place as u32))
}

impl OpId {
    pub(crate) fn text(self) -> &'static str {
        TABLE.lock().names[usize::from(self.0)]
    }

    pub(crate) fn bits(self) -> u64 {
        u64::from(self.0)
    }

    pub(crate) fn of_bits(bits: u64) -> Self {
        OpId(bits as u16)
    }
}

impl SiteId {
    pub(crate) fn site(self) -> Site {
        TABLE.lock().sites[self.0 as usize]
    }

    pub(crate) fn bits(self) -> u64 {
        u64::from(self.0)
    }

    pub(crate) fn of_bits(bits: u64) -> Self {
        SiteId(bits as u32)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/error/site_id_tests.rs"]
mod tests;
