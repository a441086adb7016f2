//! What a device does in a sum by inboxes, counted: units that it sends and takes, and trips one after the other; and
//! the time that this takes at least. A model, for any number of members.
//!
//! Inboxes were measured between two devices only. Between more, `Limits` and its table ask [`most_in_one_trip`], and
//! tests hold the other limits to [`Traffic::nanoseconds`]. What is counted here is counted on the kernels' own source,
//! too: `kernels/on_cpu/meeting/traffic.inc` is written by a test of this file, and `check.cpp` there runs its rows.
//!
//! Plain arithmetic, which uses nothing else of the crate.

/// Nanoseconds of a kernel in a graph that sends nothing, and of a trip: from a store until the peer that polls has
/// seen it. Bytes that a device sends in a nanosecond, while as many come in. From two H200s in graphs, in one trip and
/// through slots: 1 KB in 1.8 us, 1 MB in 5.0, 4 MB in 16.6, 16 MB in 56.8.
const START: usize = 900;
const TRIP: usize = 900;
const LINK: usize = 320;

/// Bytes of a unit, which is polled whole.
const UNIT: usize = 16;

/// What one member does in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Units that it stores to peers.
    pub sent: usize,
    /// Units that it takes: it polls each of them, at least once, and wipes it.
    pub taken: usize,
    /// Stores that wait for each other, one after the other, until the last member's kernel ends.
    pub trips: usize,
}

impl Traffic {
    /// Of member `me` of `members`, where every member sends `each` bytes to each that receives. Who does not gets a
    /// unit, as a sign of life.
    pub(crate) fn in_one_trip(each: usize, members: usize, me: usize, receives: impl Fn(usize) -> bool) -> Traffic {
        let to = |rank| if receives(rank) { each.div_ceil(UNIT) } else { 1 };
        let sent = (0..members).filter(|&rank| rank != me).map(to).sum();
        Traffic { sent, taken: (members - 1) * to(me), trips: 1 }
    }

    /// Of member `me`, through slots: slice `b`, of so many bytes, goes to member `b`, who adds it up. Then the sums go
    /// to all, if they `return`. A block has up to `pieces` pieces of a slice.
    pub(crate) fn through_slots(slices: &[usize], me: usize, pieces: usize, returns: bool) -> Traffic {
        let units = |bytes: &usize| bytes.div_ceil(UNIT);
        let (peers, own) = (slices.len() - 1, units(&slices[me]));
        let others = slices.iter().map(units).sum::<usize>() - own;
        // A block begins a step when its peers have told that they have taken what was in the slots. The last trip is
        // that of the last such word.
        match returns {
            true => Traffic { sent: others + peers * own, taken: peers * own + others, trips: pieces + 2 },
            false => Traffic { sent: others, taken: peers * own, trips: 2 + (pieces - 1) / 2 },
        }
    }

    /// How long it takes: trips, and what goes over the link.
    pub(crate) fn nanoseconds(self) -> usize {
        START + self.trips * TRIP + self.sent.max(self.taken) * UNIT / LINK
    }
}

/// Up to how many bytes an all-reduce of more than two members takes one trip: there, what everything to everyone is
/// more than parts to owners and sums to all takes the link as long as two further trips.
pub(crate) const fn most_in_one_trip(members: usize) -> usize {
    2 * TRIP * LINK * members / ((members - 1) * (members - 2))
}

#[cfg(test)]
#[path = "traffic_tests.rs"]
mod tests;
