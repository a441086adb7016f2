//! Chooses the algorithm that carries a collective out, and says why, for calls, graphs and
//! [`GpuPool::explain`](crate::GpuPool::explain). Invariant: it is pure: all members must come to one answer, so it
//! depends only on their [`Case`].

use super::{
    algorithm::{self, Algorithm},
    case::Case,
};
use crate::fabric::types::Algorithm as Wish;

/// All algorithms. The first one that fits carries a collective out.
static TABLE: [&dyn Algorithm; 15] = [
    &algorithm::ring_ce::RingCe,
    &algorithm::host_reduce::HostReduce,
    &algorithm::exchange_ce::ExchangeCe,
    &algorithm::ce::Ce,
    &algorithm::inbox::Inbox,
    &algorithm::slots::Slots,
    &algorithm::ring::Ring,
    &algorithm::exchange::Exchange,
    &algorithm::ll::Ll,
    &algorithm::ll_two_shot::LlTwoShot,
    &algorithm::eager::Eager,
    &algorithm::fused::Fused,
    &algorithm::shm::Shm,
    &algorithm::fused_events::FusedEvents,
    &algorithm::shm_events::ShmEvents,
];

/// The algorithm, and the reason: the first one in the table that was asked for and can, else the first one that fits.
pub(crate) fn choose(case: &Case<'_>) -> (&'static dyn Algorithm, &'static str) {
    let asked = || TABLE.iter().find_map(|&algorithm| Some((algorithm, algorithm.asked_for(case)?)));
    let wished = !matches!(case.machine.wish, Wish::Auto | Wish::Direct);
    let fits = || TABLE.iter().find_map(|&algorithm| Some((algorithm, algorithm.fits(case)?)));
    let chosen = if wished { asked().or_else(fits) } else { fits() };
    chosen.expect("with peer access one kernel fits, and without it copies do")
}

#[cfg(test)]
#[path = "../../tests/unit/collective/choose_tests.rs"]
mod tests;
