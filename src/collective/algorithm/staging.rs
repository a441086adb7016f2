//! The plan of each collective where no device can access another's memory, for `shm`, `shm_events` and `host_reduce`.
//! All data cross through *stages*: page-locked memory of the host. Each member writes its own stage and reads the
//! others'. A member's part has four kinds of work:
//!
//! ```text
//! puts    own source -> own stage: one lane for each member, or one lane for all
//! fold    the others' lanes for this member, and the own source, in rank order -> own destination, own stage
//! pulls   the others' stages -> own destination: the results of their folds, or what they put
//! stays   own source -> own destination
//! ```
//!
//! An all-reduce of two members is one exchange: each folds all elements. With more members each folds one slice and
//! puts the result on its stage: `S` down, and `2(n-1)/n` of `S` up; a ring takes `2(n-1)/n` both ways. Invariant:
//! slices are those of [`plan`](crate::fabric::plan), and sources are folded in rank order.

use crate::fabric::{Pair, Shape, Tiling, plan::slice, tiling};
use smallvec::SmallVec;
use std::ops::Range;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Staging {
    /// Lanes of every stage: one for all members, or one for each by rank; the own one is for the result of its fold.
    pub lanes: usize,
    /// `(lane, range of the own source)`
    pub puts: SmallVec<[(usize, Range<usize>); 8]>,
    pub fold: Option<Fold>,
    /// `(member, its lane, start in the own destination, elements)`
    pub pulls: SmallVec<[(usize, usize, usize, usize); 8]>,
    pub two: bool,
    /// `(start in the own source, start in the own destination, elements)`
    pub stays: Option<(usize, usize, usize)>,
    /// Most elements that any member has in a lane, or keeps.
    pub most: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fold {
    pub source: usize,
    pub len: usize,
    /// The start in the own destination, if the result goes there.
    pub destination: Option<usize>,
    /// Whether the result goes to the own lane of the own stage.
    pub result: bool,
}

impl Shape {
    /// Member `me`'s part of `n`, at least two. Slices begin at multiples of `grain` elements.
    pub(crate) fn staging(&self, n: usize, me: usize, grain: usize) -> Staging {
        let one = Staging { lanes: 1, ..Staging::default() };
        match self {
            Shape::AllReduce { len } if n == 2 => {
                let fold = Fold { source: 0, len: *len, destination: Some(0), result: false };
                Staging { puts: [(0, 0..*len)].into_iter().collect(), fold: Some(fold), most: *len, ..one }
            }
            Shape::Reduce { len, root } if n == 2 => {
                let fold = Fold { source: 0, len: *len, destination: Some(0), result: false };
                let puts = (me != *root).then_some((0, 0..*len)).into_iter().collect();
                Staging { puts, fold: (me == *root).then_some(fold), most: *len, ..one }
            }
            _ => self.in_slices(n, me, grain),
        }
    }

    /// For folds by the host's threads (`host_reduce`): the own source must be on the own stage, too, and the own
    /// result is pulled from there. Two members share a fold as more members do, since the fold takes longest.
    pub(crate) fn hosted(&self, n: usize, me: usize, grain: usize) -> Staging {
        let mut plan = self.in_slices(n, me, grain);
        if let Some(fold) = &mut plan.fold {
            plan.puts.push((me, fold.source..fold.source + fold.len));
            plan.pulls.extend(fold.destination.take().map(|start| (me, me, start, fold.len)));
            fold.result = true;
        }
        plan
    }

    fn in_slices(&self, n: usize, me: usize, grain: usize) -> Staging {
        let others = || (1..n).map(move |k| (me + k) % n);
        let common = Staging { lanes: n, ..Staging::default() };
        let one = Staging { lanes: 1, ..Staging::default() };
        let flow = |a, b| self.flow(a, b);
        let from = |flow: Pair| flow.from.start..flow.from.start + flow.len;
        let moves = |lane, of| Staging {
            pulls: others().filter_map(|k| flow(k, me).map(|flow| (k, lane, flow.to.start, flow.len))).collect(),
            stays: flow(me, me).map(|flow| (flow.from.start, flow.to.start, flow.len)),
            most: if let Shape::Broadcast { len, .. } = self { *len } else { self.largest(n, grain) },
            ..of
        };
        match self {
            Shape::AllReduce { len } | Shape::Reduce { len, .. } => {
                let part = |k| slice(k, n, *len, grain);
                let gets = |k| !matches!(self, Shape::Reduce { root, .. } if *root != k);
                let gives = others().any(gets);
                let own = part(me);
                let destination = gets(me).then_some(own.start);
                let pull = |k| (k, k, part(k).start, part(k).len());
                Staging {
                    puts: others().map(|k| (k, part(k))).collect(),
                    fold: Some(Fold { source: own.start, len: own.len(), destination, result: gives }),
                    pulls: others().filter(|_| gets(me)).map(pull).collect(),
                    two: true,
                    most: part(0).len(),
                    ..common
                }
            }
            Shape::ReduceScatter { .. } => {
                let own = flow(me, me).expect("each member has a part");
                let destination = Some(own.to.start);
                Staging {
                    puts: others().filter_map(|k| Some((k, from(flow(me, k)?)))).collect(),
                    fold: Some(Fold { source: own.from.start, len: own.len, destination, result: false }),
                    most: self.largest(n, grain),
                    ..common
                }
            }
            Shape::AllGather { .. } | Shape::Broadcast { .. } | Shape::Gather { .. } => Staging {
                puts: others().find_map(|k| Some((0, from(flow(me, k)?)))).into_iter().collect(),
                ..moves(0, one)
            },
            Shape::Scatter { .. } | Shape::AllToAll { .. } => {
                Staging { puts: others().filter_map(|k| Some((k, from(flow(me, k)?)))).collect(), ..moves(me, common) }
            }
        }
    }
}

/// Bytes of all lanes for which another block is worth starting: its threads move as many at once.
const LEAST: usize = 4 << 10;
/// One goes down while another goes up. (The best of 1 to 8 between two H200s, with 64 blocks and slots of 16 KiB.)
const PIECES: usize = 3;

/// Cuts lanes of up to `most` bytes for at most `blocks` blocks, each with a slot of `slot` bytes: a tile per lane.
pub(crate) fn cutting(most: usize, lanes: usize, blocks: usize, slot: usize) -> Tiling {
    let blocks = (most * lanes).div_ceil(LEAST).clamp(1, blocks);
    Tiling::new(most, blocks, PIECES, LEAST / lanes, tiling::share(slot, lanes))
}

#[cfg(test)]
#[path = "../../../tests/unit/collective/algorithm/staging/tests.rs"]
mod tests;
