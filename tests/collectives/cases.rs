//! Every collective as a case: what goes in, what must come out, and how it is called.
//!
//! A case's buffers stand within larger ones, from element [`Case::starts`] on, so that what is written beside them is
//! seen.

use crate::numbers::{Num, Rng, combined, own, value};
use gpu_pool::{AsView, AsViewMut, Device, DeviceView, DeviceViewMut, Error, GpuPool, Group, ReduceOp};
use std::ops::Range;

macro_rules! kinds {
    ($($reducing:ident)+; $($(#[$doc:meta])* $moving:ident)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($reducing,)+ $($(#[$doc])* $moving,)+ }
        use Kind::*;
        pub const REDUCING: [Kind; 6] = [$($reducing),+];
        pub const MOVING: [Kind; 11] = [$($moving),+];
    };
}
kinds! {
    AllReduce AllReduceInto Reduce ReduceScatter ReduceScatterV ReduceScatterInPlace;
    AllGather AllGatherV AllGatherInPlace Broadcast Gather GatherV Scatter ScatterV AllToAll AllToAllV
    /// Everybody to the member that is `root` further on.
    SendRecv
}

pub const ROOTED: [Kind; 7] = [Reduce, Broadcast, Gather, GatherV, Scatter, ScatterV, SendRecv];

pub fn kinds() -> impl Iterator<Item = Kind> {
    REDUCING.into_iter().chain(MOVING)
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub kind: Kind,
    /// Only of the [`REDUCING`].
    pub op: ReduceOp,
    pub root: usize,
    /// Elements: of one member's part where there are parts.
    pub count: usize,
    /// Where source and destination begin in their buffers.
    pub starts: (usize, usize),
    pub salt: u64,
}

impl Case {
    /// With everything but the kind and the operation drawn.
    pub fn any(rng: &mut Rng, kind: Kind, op: ReduceOp, n: usize) -> Case {
        let count = rng.pick(&[0, 1, 2, 3, n - 1, n, n + 1, 17, 128, 129, 1000, 3001]);
        let starts = (rng.pick(&[0, 0, 1, 3]), rng.pick(&[0, 0, 1, 3]));
        Case { kind, op, root: rng.below(n), count, starts, salt: rng.next() }
    }

    fn in_place(&self) -> bool {
        matches!(self.kind, AllReduce | Reduce | ReduceScatterInPlace | AllGatherInPlace | Broadcast)
    }

    /// What the `_v` forms are given: other counts for each, zero among them.
    fn counts(&self, n: usize) -> Vec<usize> {
        match self.kind {
            ReduceScatterV | AllGatherV | GatherV | ScatterV => {
                (0..n).map(|r| (r + self.root) % 3 * self.count + r % 2).collect()
            }
            _ => vec![self.count; n],
        }
    }

    fn sent(&self, from: usize, n: usize) -> Vec<usize> {
        (0..n).map(|to| if self.kind == AllToAll { self.count } else { (from + 2 * to) % 3 * self.count }).collect()
    }

    fn received(&self, by: usize, n: usize) -> Vec<usize> {
        (0..n).map(|from| self.sent(from, n)[by]).collect()
    }

    /// Elements that a member gives: its source, or its only buffer.
    fn given(&self, rank: usize, n: usize) -> usize {
        let counts = self.counts(n);
        match self.kind {
            AllReduce | AllReduceInto | Reduce | Broadcast | SendRecv => self.count,
            ReduceScatter | ReduceScatterV | ReduceScatterInPlace | AllGatherInPlace => counts.iter().sum(),
            AllGather | AllGatherV | Gather | GatherV => counts[rank],
            Scatter | ScatterV if rank == self.root => counts.iter().sum(),
            Scatter | ScatterV => 0,
            AllToAll | AllToAllV => self.sent(rank, n).iter().sum(),
        }
    }

    /// Elements of `given` of all members.
    fn inputs<T: Num>(&self, n: usize) -> Vec<Vec<f64>> {
        let op = REDUCING.contains(&self.kind).then_some(self.op);
        let of = |rank| (0..self.given(rank, n)).map(|i| value::<T>(op, rank, i, self.salt)).collect();
        (0..n).map(of).collect()
    }

    /// Whether all members must have the same.
    fn same_for_all(&self) -> bool {
        matches!(self.kind, AllReduce | AllReduceInto | AllGather | AllGatherV | AllGatherInPlace | Broadcast)
    }

    /// What a member must have in its destination, or in its only buffer.
    fn expected<T: Num>(&self, inputs: &[Vec<f64>], rank: usize) -> Vec<T> {
        let n = inputs.len();
        let all =
            |range: Range<usize>| -> Vec<T> { range.map(|i| combined(self.op, inputs.iter().map(|x| x[i]))).collect() };
        let moved = |x: &[f64]| -> Vec<T> { x.iter().map(|&x| T::of(x)).collect() };
        let mine = part(&self.counts(n), rank);
        match self.kind {
            AllReduce | AllReduceInto => all(0..self.count),
            Reduce if rank == self.root => all(0..self.count),
            Reduce => moved(&inputs[rank]),
            ReduceScatter | ReduceScatterV => all(mine),
            ReduceScatterInPlace => {
                let mut own = moved(&inputs[rank]);
                own[mine.clone()].copy_from_slice(&all(mine));
                own
            }
            AllGather | AllGatherV => moved(&inputs.concat()),
            AllGatherInPlace => (0..n).flat_map(|r| moved(&inputs[r][part(&self.counts(n), r)])).collect(),
            Broadcast => moved(&inputs[self.root]),
            Gather | GatherV if rank == self.root => moved(&inputs.concat()),
            Gather | GatherV => Vec::new(),
            Scatter | ScatterV => moved(&inputs[self.root][mine]),
            AllToAll | AllToAllV => (0..n).flat_map(|a| moved(&inputs[a][part(&self.sent(a, n), rank)])).collect(),
            SendRecv => moved(&inputs[(rank + n - self.root) % n]),
        }
    }
}

/// Where part `k` lies when all are put in a row.
fn part(counts: &[usize], k: usize) -> Range<usize> {
    let start = counts[..k].iter().sum();
    start..start + counts[k]
}

/// What stands around the buffers.
const BESIDE: f64 = 99.0;
const BEHIND: usize = 2;

/// A case with all members' numbers: `(source, destination)` by rank, without what stands around them.
pub struct Prepared<T> {
    pub case: Case,
    before: Vec<(Vec<T>, Vec<T>)>,
    after: Vec<(Vec<T>, Vec<T>)>,
}

/// Calls the collective of a case, as a method of a device or a group: they have the same ones, but no trait in common.
macro_rules! call {
    ($on:expr, $case:expr, $src:expr, $dst:expr) => {{
        let (on, case, src, dst) = ($on, $case, $src, $dst);
        let (n, rank, root) = (on.count(), on.rank(), case.root);
        let (op, counts, at_root) = (own(case.op, rank), case.counts(n), on.rank() == root);
        match case.kind {
            AllReduce => on.all_reduce(dst, op),
            AllReduceInto => on.all_reduce_into(src, dst, op),
            Reduce => on.reduce(dst, op, root),
            ReduceScatter => on.reduce_scatter(src, dst, op),
            ReduceScatterV => on.reduce_scatter_v(src, dst, &counts, op),
            ReduceScatterInPlace => on.reduce_scatter_in_place(dst, op),
            AllGather => on.all_gather(src, dst),
            AllGatherV => on.all_gather_v(src, dst, &counts),
            AllGatherInPlace => on.all_gather_in_place(dst),
            Broadcast => on.broadcast(dst, root),
            Gather => on.gather(src, at_root.then(|| dst.view_mut()), root),
            GatherV => on.gather_v(src, at_root.then(|| dst.view_mut()), &counts, root),
            Scatter => on.scatter(at_root.then(|| src.view()), dst, root),
            ScatterV => on.scatter_v(at_root.then(|| src.view()), dst, &counts, root),
            AllToAll => on.all_to_all(src, dst),
            AllToAllV => on.all_to_all_v(src, &case.sent(rank, n), dst, &case.received(rank, n)),
            SendRecv => on.sendrecv(src, (rank + root) % n, dst, (rank + n - root) % n),
        }
    }};
}

impl<T: Num> Prepared<T> {
    pub fn new(case: Case, n: usize) -> Self {
        let inputs = case.inputs::<T>(n);
        let numbers = |x: &[f64]| x.iter().map(|&x| T::of(x)).collect::<Vec<T>>();
        // Made once: tests are not optimised, and this is most of what they compute themselves.
        let same = case.same_for_all().then(|| case.expected::<T>(&inputs, 0));
        let after = |rank: usize| {
            let source = if case.in_place() { Vec::new() } else { numbers(&inputs[rank]) };
            (source, same.clone().unwrap_or_else(|| case.expected::<T>(&inputs, rank)))
        };
        let after: Vec<_> = (0..n).map(after).collect();
        let before = after.iter().enumerate().map(|(rank, (source, destination))| {
            let untouched = vec![T::of(BESIDE); destination.len()];
            (source.clone(), if case.in_place() { numbers(&inputs[rank]) } else { untouched })
        });
        Prepared { case, before: before.collect(), after }
    }

    /// A member's part, through [`Device`]'s methods.
    #[track_caller]
    pub fn check(&self, dev: &Device) -> Result<(), Error> {
        self.within(dev, dev.rank(), |case, src, dst| call!(dev, case, src, dst))
    }

    /// The same from a graph. Not for [`SendRecv`].
    #[track_caller]
    pub fn check_captured(&self, dev: &Device) -> Result<(), Error> {
        self.within(dev, dev.rank(), |case, src, dst| {
            let (graph, ()) = dev.capture(|dev| call!(dev, case, src, dst))?;
            dev.launch_graph(&graph)
        })
    }

    /// A member's part, through [`Group`]'s methods, on the stream of `dev`.
    #[track_caller]
    pub fn check_in(&self, group: &Group<'_>) -> Result<(), Error> {
        self.within(group.device(), group.rank(), |case, src, dst| call!(group, case, src, dst))
    }

    #[track_caller]
    fn within(
        &self,
        dev: &Device,
        rank: usize,
        call: impl FnOnce(&Case, &DeviceView<'_, T>, &mut DeviceViewMut<'_, T>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let ((source, destination), (a, b)) = (&self.before[rank], self.case.starts);
        let src = dev.upload(&framed(a, source))?;
        let mut dst = dev.upload(&framed(b, destination))?;
        let call = call(&self.case, &src.slice(a..a + source.len()), &mut dst.slice_mut(b..b + destination.len()));
        call?;
        for (name, found, (start, expected)) in
            [("source", &src, (a, &self.after[rank].0)), ("destination", &dst, (b, &self.after[rank].1))]
        {
            let (found, expected) = (dev.download(found)?, framed(start, expected));
            if bytemuck::cast_slice::<T, u8>(&found) != bytemuck::cast_slice::<T, u8>(&expected) {
                let at = found.iter().zip(&expected).position(|(a, b)| bytemuck::bytes_of(a) != bytemuck::bytes_of(b));
                let at = at.expect("of one length, and they differ");
                let of = std::any::type_name::<T>();
                let (found, expected) = (found[at], expected[at]);
                panic!(
                    "{of}: rank {rank} of {}, {name}, element {at} - {start}: {found:?}, not {expected:?}, in {:?}",
                    self.after.len(),
                    self.case
                );
            }
        }
        Ok(())
    }
}

fn framed<T: Num>(start: usize, x: &[T]) -> Vec<T> {
    let beside = T::of(BESIDE);
    [&vec![beside; start], x, &[beside; BEHIND]].concat()
}

/// Runs cases on a gang, one after the other in one scope.
#[track_caller]
pub fn check_all<T: Num>(pool: &GpuPool, gang: &[usize], cases: impl IntoIterator<Item = Case>) {
    let prepared: Vec<_> = cases.into_iter().map(|case| Prepared::<T>::new(case, gang.len())).collect();
    let run = pool.on(gang).run(|dev, _| prepared.iter().try_for_each(|case| case.check(dev)));
    if let Err(error) = run {
        panic!("{}, gang {gang:?}: {error}", std::any::type_name::<T>());
    }
}
