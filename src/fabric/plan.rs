//! The plan of each collective: the part of the work that one member does, on the memory of all members.
//!
//! The algorithms ask [`Shape::work`] or [`Shape::copies`]. Everything here is pure. There are two kinds of work:
//!
//! ```text
//! combine   d[i] = s0[i] + s1[i] + ..  for all destinations d
//!           sums: all_reduce, reduce_scatter, reduce
//!           copies of one source: all_gather, broadcast, gather, scatter
//! pairs     d_k = s_k, several, of different sizes: all_to_all
//! ```
//!
//! Each part is chosen so that every link carries the least that it can. All-reduce is the fused pass of NCCL's
//! symmetric kernels: member `r` reads slice `r` of all members, adds it up, and writes it to all. Broadcast is the
//! same pass with one source: each member fetches one slice from the root and relays it to the others.

use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

/// More bytes than any memory has. So sizes, times the members and rounded up, do not overflow, also in `explain`.
pub(crate) const MOST_BYTES: usize = usize::MAX >> 8;

#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "names say it")]
pub enum Counts {
    Each(usize),
    By(Arc<[usize]>),
}

impl Counts {
    /// The range of member `k`'s part when all parts lie one behind the other.
    pub fn part(&self, k: usize) -> Range<usize> {
        match self {
            Counts::Each(count) => k * count..(k + 1) * count,
            Counts::By(counts) => {
                let start = counts[..k].iter().sum();
                start..start + counts[k]
            }
        }
    }

    /// The same counts, known to be equal if they are: more algorithms can do that.
    pub fn even(self) -> Counts {
        match &self {
            Counts::By(counts) if counts.windows(2).all(|two| two[0] == two[1]) => Counts::Each(counts[0]),
            _ => self,
        }
    }

    /// Elements of all `n` members.
    pub fn total(&self, n: usize) -> usize {
        match self {
            Counts::Each(count) => n * count,
            Counts::By(counts) => counts.iter().sum(),
        }
    }
}

/// A collective and its sizes. `in_place`: source and destination are one buffer, with room for all members' parts.
/// `send[a]`: the elements that `a` sends to each member. `receive[b]`: those that `b` receives from each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "names say it")]
pub enum Shape {
    AllReduce { len: usize },
    Reduce { len: usize, root: usize },
    ReduceScatter { counts: Counts, in_place: bool },
    AllGather { counts: Counts, in_place: bool },
    Broadcast { len: usize, root: usize },
    Gather { counts: Counts, root: usize },
    Scatter { counts: Counts, root: usize },
    AllToAll { send: Vec<Counts>, receive: Vec<Counts> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "names say it")]
pub enum Side {
    Source,
    Destination,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) member: usize,
    pub(crate) side: Side,
    pub(crate) start: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) from: Place,
    pub(crate) to: Place,
    pub(crate) len: usize,
}

/// The sources of `Combine` are in rank order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Combine { len: usize, sources: SmallVec<[Place; 8]>, destinations: SmallVec<[Place; 8]> },
    Pairs(SmallVec<[Pair; 8]>),
}

impl Work {
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Work::Combine { len, destinations, .. } => *len == 0 || destinations.is_empty(),
            Work::Pairs(pairs) => pairs.iter().all(|pair| pair.len == 0),
        }
    }
}

/// Slice `k` of `n`. Slices are as even as possible in units of `grain` elements, so that each begins at a cache line.
pub fn slice(k: usize, n: usize, len: usize, grain: usize) -> Range<usize> {
    let each = len.div_ceil(n).next_multiple_of(grain);
    (k * each).min(len)..((k + 1) * each).min(len)
}

/// The slice of a broadcast that member `me` fetches from the root and relays. The root's link is the bottleneck, so
/// with several other members the root relays nothing itself.
fn relay(len: usize, root: usize, n: usize, me: usize, grain: usize) -> Range<usize> {
    match n {
        0..=2 => slice(me, n, len, grain),
        _ if me == root => 0..0,
        _ => slice((me + n - root - 1) % n, n - 1, len, grain),
    }
}

fn source(member: usize, start: usize) -> Place {
    Place { member, side: Side::Source, start }
}

fn destination(member: usize, start: usize) -> Place {
    Place { member, side: Side::Destination, start }
}

impl Shape {
    /// None: nothing, or it is there already. The plans below follow from it.
    pub(crate) fn flow(&self, a: usize, b: usize) -> Option<Pair> {
        let whole = |goes: bool, len| goes.then_some((0, 0, len));
        let (from, to, len) = match self {
            Shape::AllReduce { len } => (0, 0, *len),
            Shape::Reduce { len, root } => whole(b == *root, *len)?,
            Shape::Broadcast { len, root } => whole(a == *root && b != *root, *len)?,
            Shape::ReduceScatter { counts, in_place } => {
                let part = counts.part(b);
                (part.start, if *in_place { part.start } else { 0 }, part.len())
            }
            Shape::AllGather { in_place: true, .. } if a == b => return None,
            Shape::AllGather { counts, in_place } => {
                let part = counts.part(a);
                (if *in_place { part.start } else { 0 }, part.start, part.len())
            }
            Shape::Gather { root, .. } if b != *root => return None,
            Shape::Gather { counts, .. } => (0, counts.part(a).start, counts.part(a).len()),
            Shape::Scatter { root, .. } if a != *root => return None,
            Shape::Scatter { counts, .. } => (counts.part(b).start, 0, counts.part(b).len()),
            Shape::AllToAll { send, receive } => {
                let out = send[a].part(b);
                (out.start, receive[b].part(a).start, out.len())
            }
        };
        Some(Pair { from: source(a, from), to: destination(b, to), len })
    }

    /// The work of member `me` of `n`. Slices begin at multiples of `grain` elements.
    pub(crate) fn work(&self, n: usize, me: usize, grain: usize) -> Work {
        let combine =
            |len, sources: SmallVec<_>, destinations: SmallVec<_>| Work::Combine { len, sources, destinations };
        let of_all = |start: usize| (0..n).map(|k| source(k, start)).collect();
        let one = |flow: Option<Pair>| {
            let Pair { from, to, len } = flow.expect("each member has a part");
            combine(len, [from].into_iter().collect(), [to].into_iter().collect())
        };
        match self {
            Shape::AllReduce { len } => {
                let part = slice(me, n, *len, grain);
                // Each member begins with another destination, or all would write to the first one at once.
                let to = (0..n).map(|k| destination((me + k) % n, part.start));
                combine(part.len(), of_all(part.start), to.collect())
            }
            Shape::Reduce { len, root } => {
                let part = slice(me, n, *len, grain);
                combine(part.len(), of_all(part.start), [destination(*root, part.start)].into_iter().collect())
            }
            Shape::ReduceScatter { .. } => {
                let own = self.flow(me, me).expect("each member has a part");
                combine(own.len, of_all(own.from.start), [own.to].into_iter().collect())
            }
            Shape::Broadcast { len, root } => {
                let part = relay(*len, *root, n, me, grain);
                let to = (0..n).map(|k| (me + k) % n).filter(|k| k != root);
                let from = [source(*root, part.start)].into_iter().collect();
                combine(part.len(), from, to.map(|k| destination(k, part.start)).collect())
            }
            Shape::AllGather { counts, in_place } => {
                let part = counts.part(me);
                let from = source(me, if *in_place { part.start } else { 0 });
                let to = (0..n).filter_map(|k| Some(self.flow(me, (me + k) % n)?.to));
                combine(part.len(), [from].into_iter().collect(), to.collect())
            }
            Shape::Gather { root, .. } => one(self.flow(me, *root)),
            Shape::Scatter { root, .. } => one(self.flow(*root, me)),
            Shape::AllToAll { .. } => Work::Pairs((0..n).filter_map(|k| self.flow(me, (me + k) % n)).collect()),
        }
    }

    /// [`work`](Self::work) for copy engines, which write faster than they read: of two the root broadcasts.
    pub(crate) fn copies(&self, n: usize, me: usize, grain: usize) -> Work {
        match self {
            &Shape::Broadcast { len, root } if n == 2 => Work::Combine {
                len: if me == root { len } else { 0 },
                sources: [source(root, 0)].into_iter().collect(),
                destinations: [destination(1 - root, 0)].into_iter().collect(),
            },
            _ => self.work(n, me, grain),
        }
    }

    /// Elements of the largest part of any member; for `all_to_all`, of the largest pair.
    pub(crate) fn largest(&self, n: usize, grain: usize) -> usize {
        let most = |counts: &Counts| (0..n).map(|k| counts.part(k).len()).max().unwrap_or(0);
        match self {
            Shape::AllReduce { len } | Shape::Reduce { len, .. } => slice(0, n, *len, grain).len(),
            Shape::Broadcast { len, root } => (0..n).map(|k| relay(*len, *root, n, k, grain).len()).max().unwrap_or(0),
            Shape::ReduceScatter { counts, .. }
            | Shape::AllGather { counts, .. }
            | Shape::Gather { counts, .. }
            | Shape::Scatter { counts, .. } => most(counts),
            Shape::AllToAll { send, .. } => send.iter().map(most).max().unwrap_or(0),
        }
    }

    pub(crate) fn sums(&self) -> bool {
        matches!(self, Shape::AllReduce { .. } | Shape::Reduce { .. } | Shape::ReduceScatter { .. })
    }

    /// Whether member `a` may touch memory of member `b`.
    pub(crate) fn touches(&self, a: usize, b: usize) -> bool {
        match self {
            Shape::Gather { root, .. } | Shape::Scatter { root, .. } => b == *root || a == b,
            _ => true,
        }
    }

    /// Elements of the largest buffer.
    pub fn len(&self, n: usize) -> usize {
        match self {
            Shape::AllReduce { len } | Shape::Reduce { len, .. } | Shape::Broadcast { len, .. } => *len,
            Shape::ReduceScatter { counts, .. }
            | Shape::AllGather { counts, .. }
            | Shape::Gather { counts, .. }
            | Shape::Scatter { counts, .. } => counts.total(n),
            Shape::AllToAll { send, .. } => send.iter().map(|counts| counts.total(n)).max().unwrap_or(0),
        }
    }

    /// A pair `(a, b)` of members where `a` sends `b` another number of elements than `b` expects, if there is one.
    pub(crate) fn disagreement(&self, n: usize) -> Option<(usize, usize)> {
        let Shape::AllToAll { send, receive } = self else { return None };
        let pairs = (0..n).flat_map(|a| (0..n).map(move |b| (a, b)));
        pairs.into_iter().find(|&(a, b)| send[a].part(b).len() != receive[b].part(a).len())
    }
}

#[cfg(test)]
#[path = "../../tests/unit/fabric/plan/tests.rs"]
pub(crate) mod tests;
