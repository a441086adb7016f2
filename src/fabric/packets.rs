//! Collectives as packets from each member to each other one, for collectives whose parts are all of one size.
//!
//! This is fastest for small messages: every member sends at once what the others need, with flags in the data, and
//! waits only for what it receives (`kernels/push.cu`). Larger ones have one flag per block (`kernels/eager.cu`).

use super::{Counts, MOST, Route, Shape};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packets {
    /// Elements that one member sends to another.
    pub each: usize,
    pub route: Route,
    /// The first element of the source for rank 0.
    pub source: usize,
    /// The first element of the destination that is from rank 0.
    pub destination: usize,
}

impl Packets {
    /// Whether each sender sends its whole buffer to every receiver, although the receivers could share the work:
    /// all-reduce, reduce and broadcast, but not all-gather.
    pub(crate) fn are_whole(&self) -> bool {
        self.route.out == 0 && (self.route.folds == 1 || self.route.into == 0)
    }
}

impl Shape {
    pub(crate) fn packets(&self, n: usize, me: usize) -> Option<Packets> {
        if n > MOST {
            return None;
        }
        let all = if n == MOST { u16::MAX } else { (1 << n) - 1 };
        let alone = |rank: usize| 1_u16 << rank;
        let each_of = |counts: &Counts| match counts {
            Counts::Each(each) => Some(*each),
            Counts::By(_) => None,
        };
        let (each, senders, receivers, folds, source, destination) = match self {
            Shape::AllReduce { len } => (*len, all, all, true, (0, 0), (0, 0)),
            Shape::Reduce { len, root } => (*len, all, alone(*root), true, (0, 0), (0, 0)),
            Shape::ReduceScatter { counts, in_place } => {
                let each = each_of(counts)?;
                (each, all, all, true, (0, each), (if *in_place { me * each } else { 0 }, 0))
            }
            Shape::AllGather { counts, in_place } => {
                let each = each_of(counts)?;
                (each, all, all, false, (if *in_place { me * each } else { 0 }, 0), (0, each))
            }
            Shape::Broadcast { len, root } => (*len, alone(*root), all & !alone(*root), false, (0, 0), (0, 0)),
            Shape::Gather { counts, root } => {
                let each = each_of(counts)?;
                (each, all, alone(*root), false, (0, 0), (0, each))
            }
            Shape::Scatter { counts, root } => {
                let each = each_of(counts)?;
                (each, alone(*root), all, false, (0, each), (0, 0))
            }
            Shape::AllToAll { send, receive } => {
                let each = each_of(send.first()?)?;
                let even = |all: &[Counts]| all.iter().all(|counts| *counts == Counts::Each(each));
                if !even(send) || !even(receive) {
                    return None;
                }
                (each, all, all, false, (0, each), (0, each))
            }
        };
        let route = Route { senders, receivers, folds: folds.into(), out: source.1 as u64, into: destination.1 as u64 };
        Some(Packets { each, route, source: source.0, destination: destination.0 })
    }
}

#[cfg(test)]
#[path = "../../tests/unit/fabric/packets_tests.rs"]
mod tests;
