//! What each member does where no device can name another's memory: everything crosses through *stages*, page-locked
//! memory of the host of which each member fills its own and reads all others'.
//!
//! ```text
//! puts    own source -> own stage      a lane for each member, or one for all
//! fold    what the others put for this member, with the own source, in rank order -> own destination, own stage
//! pulls   the others' stages -> own destination: results of their folds, or what they put
//! stays   own source -> own destination
//! ```
//!
//! An all-reduce of two members is one exchange: each folds everything (`S` down and `S` up for a buffer of `S` bytes,
//! and no less is possible). Of more members each folds a slice and puts the result on its stage: `S` down, and
//! `2 (n - 1) / n` of `S` up, where a ring takes `2 (n - 1) / n` both ways. Slices are those of [`plan`](super::plan), and
//! sources are folded by rank, so the bits are those of every other way.

use super::plan::{Shape, slice};
use crate::fabric::tiling::{self, Tiling};
use smallvec::SmallVec;
use std::ops::Range;

/// One member's part, in elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Staging {
    /// Lanes of every stage: one for all, or one for each member by rank. Then the own lane is for the result of the
    /// own fold.
    pub lanes: usize,
    /// `(lane, where in the own source)`
    pub puts: SmallVec<[(usize, Range<usize>); 8]>,
    pub fold: Option<Fold>,
    /// `(member, its lane, where in the own destination, elements)`
    pub pulls: SmallVec<[(usize, usize, usize, usize); 8]>,
    /// Whether pulls are of the results of folds.
    pub two: bool,
    /// `(where in the own source, where in the own destination, elements)`
    pub stays: Option<(usize, usize, usize)>,
    /// The most elements that any member has in a lane, or keeps.
    pub most: usize,
}

/// The others' lanes for this member (or the one for all) and the own source, folded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fold {
    pub source: usize,
    pub len: usize,
    /// Where in the own destination, if it goes there.
    pub destination: Option<usize>,
    /// Whether it goes to the own lane of the own stage.
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

    /// The same for folds by the host's threads ([`host_reduce`](super::algorithm::host_reduce)): the own source has to
    /// be on the own stage, too, and the own result is pulled from there like the others'. Two members share a fold as
    /// more do, since that is what takes longest.
    pub(crate) fn hosted(&self, n: usize, me: usize, grain: usize) -> Staging {
        let mut plan = self.in_slices(n, me, grain);
        if let Some(fold) = &mut plan.fold {
            plan.puts.push((me, fold.source..fold.source + fold.len));
            plan.pulls.extend(fold.destination.take().map(|start| (me, me, start, fold.len)));
            fold.result = true;
        }
        plan
    }

    /// Where there is a fold, each member has a slice of it.
    fn in_slices(&self, n: usize, me: usize, grain: usize) -> Staging {
        let others = || (1..n).map(move |k| (me + k) % n);
        let common = Staging { lanes: n, ..Staging::default() };
        let one = Staging { lanes: 1, ..Staging::default() };
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
            Shape::ReduceScatter { counts, in_place } => {
                let own = counts.part(me);
                let destination = Some(if *in_place { own.start } else { 0 });
                Staging {
                    puts: others().map(|k| (k, counts.part(k))).collect(),
                    fold: Some(Fold { source: own.start, len: own.len(), destination, result: false }),
                    most: self.largest(n, grain),
                    ..common
                }
            }
            Shape::AllGather { counts, in_place } => {
                let own = counts.part(me);
                let start = if *in_place { own.start } else { 0 };
                let pull = |k| (k, 0, counts.part(k).start, counts.part(k).len());
                Staging {
                    puts: [(0, start..start + own.len())].into_iter().collect(),
                    pulls: others().map(pull).collect(),
                    stays: (!in_place).then_some((0, own.start, own.len())),
                    most: self.largest(n, grain),
                    ..one
                }
            }
            Shape::Broadcast { len, root } => Staging {
                puts: (me == *root).then_some((0, 0..*len)).into_iter().collect(),
                pulls: (me != *root).then_some((*root, 0, 0, *len)).into_iter().collect(),
                most: *len,
                ..one
            },
            Shape::Gather { counts, root } => {
                let own = counts.part(me);
                let pull = |k| (k, 0, counts.part(k).start, counts.part(k).len());
                Staging {
                    puts: (me != *root).then_some((0, 0..own.len())).into_iter().collect(),
                    pulls: others().filter(|_| me == *root).map(pull).collect(),
                    stays: (me == *root).then_some((0, own.start, own.len())),
                    most: self.largest(n, grain),
                    ..one
                }
            }
            Shape::Scatter { counts, root } => {
                let own = counts.part(me);
                Staging {
                    puts: others().filter(|_| me == *root).map(|k| (k, counts.part(k))).collect(),
                    pulls: (me != *root).then_some((*root, me, 0, own.len())).into_iter().collect(),
                    stays: (me == *root).then_some((own.start, 0, own.len())),
                    most: self.largest(n, grain),
                    ..common
                }
            }
            Shape::AllToAll { send, receive } => {
                let pull = |k: usize| (k, me, receive[me].part(k).start, receive[me].part(k).len());
                let (from, to) = (send[me].part(me), receive[me].part(me));
                Staging {
                    puts: others().map(|k| (k, send[me].part(k))).collect(),
                    pulls: others().map(pull).collect(),
                    stays: Some((from.start, to.start, from.len())),
                    most: self.largest(n, grain),
                    ..common
                }
            }
        }
    }
}

/// Bytes of all lanes for which another block is worth starting. A block moves no less of them at once, because its
/// threads move as many at once.
const LEAST: usize = 4 << 10;
/// Pieces that are worth cutting: one goes down while another goes up. (Of 1, 2, 3, 4 and 8 the best between two
/// H200s, with 64 blocks and slots of 16 KiB; more blocks matter more.)
const PIECES: usize = 3;

/// Cuts lanes of up to `most` bytes for at most `blocks` blocks. A block has a slot of `slot` bytes, with a tile of
/// each lane.
pub(crate) fn cutting(most: usize, lanes: usize, blocks: usize, slot: usize) -> Tiling {
    let blocks = (most * lanes).div_ceil(LEAST).clamp(1, blocks);
    Tiling::new(most, blocks, PIECES, LEAST / lanes, tiling::share(slot, lanes))
}

#[cfg(test)]
mod tests;
