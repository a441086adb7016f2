//! The traffic of a device in a sum by inboxes: units that it sends and takes, and trips one after the other; and the
//! time that this takes at least. A model, for any number of members.
//!
//! Inboxes were measured between 2 and 4 devices. Between more, `inbox` asks [`most_in_one_trip`], and tests hold
//! `slots`' limit to this. Tests compare the kernels' source, too (`kernels/on_cpu/meeting/traffic.inc`, `check.cpp`).

/// Nanoseconds of a trip: from a store until the peer that polls has seen it. From a prototype on two H200s, in graphs:
/// 1 KB in 1.8 us, 1 MB in 5.0, 4 MB in 16.6, 16 MB in 56.8.
const TRIP: usize = 900;
/// Bytes that a device sends in a nanosecond, while as many come in. From the same times.
const LINK: usize = 320;

/// Up to how many bytes an all-reduce of more than two members takes one trip: there, what everything to everyone is
/// more than parts to owners and sums to all takes the link as long as two further trips.
pub(crate) const fn most_in_one_trip(members: usize) -> usize {
    2 * TRIP * LINK * members / ((members - 1) * (members - 2))
}

#[cfg(test)]
#[path = "../../../tests/unit/fabric/limits/traffic_tests.rs"]
mod tests;
