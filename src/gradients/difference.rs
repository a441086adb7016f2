//! The error for members that disagree about their gradients or settings, for the exchange and `gpu-pool-train`.

use crate::{
    Group,
    error::{Error, Site},
};

/// A thing in which two members differ, and both sides of it.
pub type Difference = (&'static str, String, String);

/// The error for member 0 and member `rank` of a group, which differ.
pub fn mismatch(group: &Group<'_>, rank: usize, (what, a_call, b_call): Difference, sites: [Site; 2]) -> Error {
    let [a_site, b_site] = sites;
    Error::Mismatch { what, a: group.ordinal(0), a_call, a_site, b: group.ordinal(rank), b_call, b_site }
}
