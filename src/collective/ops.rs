//! The checks of the public collectives ([`api`](super::api)), and how they fill a [`Request`].

use super::{Group, Machine, Request, across::PendingReduce, case::Case, point};
use crate::{
    collective::algorithm::{NormKernel, Rows},
    driver::RawFunction,
    error::{Error, Result},
    fabric::{Area, Call, Counts, Element, MOST_BYTES, Origin, ReduceOp, Shape},
    memory::{DeviceView, DeviceViewMut},
};

pub(super) fn in_place<T: Element>(call: Call, op: Option<ReduceOp>, shape: Shape, x: DeviceViewMut<'_, T>) -> Request {
    between(call, op, shape, None, Some(x))
}

/// A collective from one buffer to another.
pub fn between<T: Element>(
    call: Call,
    op: Option<ReduceOp>,
    shape: Shape,
    source: Option<DeviceView<'_, T>>,
    destination: Option<DeviceViewMut<'_, T>>,
) -> Request {
    Request {
        call: match op {
            Some(op) => call.reducing(op),
            None => call,
        },
        dtype: T::DTYPE,
        reduce: op.unwrap_or(ReduceOp::Sum),
        shape: Some(shape),
        source: source.map(point::area),
        destination: destination.map(|x| Area { block: x.block.clone(), address: x.address(), bytes: x.bytes() }),
        counts: None,
        extra: Vec::new(),
        rank_order: false,
        own: None,
    }
}

impl Group<'_> {
    #[track_caller]
    pub(super) fn fits(&self, op: &'static str, what: &str, found: usize, wanted: usize) -> Result<()> {
        invalid_if!(found != wanted, op, "{what} has {found} elements where {wanted} are needed");
        Ok(())
    }

    #[track_caller]
    pub(crate) fn check_root(&self, op: &'static str, root: usize) -> Result<()> {
        invalid_if!(root >= self.count(), op, "root {root} of {} members", self.count());
        Ok(())
    }

    /// And it must have `wanted` elements.
    #[track_caller]
    pub(super) fn only_root(&self, op: &'static str, root: usize, found: Option<usize>, wanted: usize) -> Result<()> {
        match found {
            Some(found) if self.rank == root => self.fits(op, "the root's buffer", found, wanted),
            None if self.rank != root => Ok(()),
            _ => {
                Err(Error::invalid(op, format_args!("the root, {root}, gives the whole buffer, and nobody else does")))
            }
        }
    }

    /// One count for each member, whose sum does not overflow.
    #[track_caller]
    pub(in crate::collective) fn check_counts(&self, op: &'static str, counts: &[usize]) -> Result<Counts> {
        let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        if counts.len() == self.count() && total.is_some() {
            return Ok(Counts::By(counts.into()));
        }
        Err(Error::invalid(op, format_args!("{counts:?} are no counts of {} members", self.count())))
    }

    /// Elements of one part, if `len` elements are one equal part for each member.
    #[track_caller]
    pub(super) fn parts(&self, op: &'static str, len: usize) -> Result<usize> {
        if len.is_multiple_of(self.count()) {
            return Ok(len / self.count());
        }
        Err(Error::invalid(op, format_args!("{len} elements are not {} equal parts", self.count())))
    }
}

#[track_caller]
pub(crate) fn all_reduce<T: Element>(origin: Origin, x: DeviceViewMut<'_, T>, op: ReduceOp) -> Request {
    let len = x.len();
    let call = Call::new("all_reduce").elements(T::DTYPE, len).from(origin);
    between(call, Some(op), Shape::AllReduce { len }, None, Some(x))
}

pub(super) fn sum<T: Element>(call: Call, src: Option<DeviceView<'_, T>>, dst: DeviceViewMut<'_, T>) -> Request {
    let shape = Shape::AllReduce { len: dst.len() };
    Request { rank_order: true, ..between(call, Some(ReduceOp::Sum), shape, src, Some(dst)) }
}

impl Group<'_> {
    /// Begins [`reduce_scatter_in_place`](Self::reduce_scatter_in_place) with parts of these lengths.
    #[track_caller]
    pub(crate) fn begin_reduce_scatter<T: Element>(
        &self,
        origin: Origin,
        x: DeviceViewMut<'_, T>,
        counts: &[usize],
        op: ReduceOp,
        overlapped: bool,
    ) -> Result<Option<Box<dyn PendingReduce>>> {
        let name = "reduce_scatter_in_place";
        let shape = Shape::ReduceScatter { counts: self.check_counts(name, counts)?.even(), in_place: true };
        let call = Call::new(name).elements(T::DTYPE, x.len()).counts(counts).from(origin);
        self.begin(in_place(call, Some(op), shape, x), overlapped)
    }

    /// [`all_gather_in_place`](Self::all_gather_in_place) with parts of these lengths, for an origin.
    #[track_caller]
    pub(crate) fn all_gather_from<T: Element>(
        &self,
        origin: Origin,
        x: DeviceViewMut<'_, T>,
        counts: &[usize],
    ) -> Result<()> {
        let name = "all_gather_in_place";
        let shape = Shape::AllGather { counts: self.check_counts(name, counts)?.even(), in_place: true };
        self.run(in_place(Call::new(name).elements(T::DTYPE, x.len()).counts(counts).from(origin), None, shape, x))
    }

    /// The kernel that carries these rows out at once, and its function: no module is loaded while peers' kernels wait.
    /// None where it does not fit: then it does not on any member.
    pub(crate) fn norm_in_one(&self, rows: Rows) -> Result<Option<(NormKernel, RawFunction)>> {
        let Some(found) = self.norm_plan(rows) else { return Ok(None) };
        let entry = found.entry();
        Ok(Some((found, self.dev.worker.function(entry.module, entry.name)?)))
    }

    /// The same, without a look at the device.
    pub(crate) fn norm_plan(&self, rows: Rows) -> Option<NormKernel> {
        let shared = &self.dev.worker.shared;
        let len = rows.rows.checked_mul(rows.cols).filter(|len| *len <= MOST_BYTES / rows.dtype.size())?;
        if let Some(door) = self.door() {
            return door.pad(self)?.norm(rows, self.count());
        }
        let shape = Shape::AllReduce { len };
        let (machine, limits) = (Machine::of(shared), self.meeting().limits());
        let group = (self.count(), self.membership.direct);
        let case = Case::new((machine, limits), group, (rows.dtype, ReduceOp::Sum), Some(&shape), false);
        if !case.meets_on_devices() {
            return None;
        }
        NormKernel::of(rows, self.count(), shared.signals.get()?.layout(), limits, machine.wish)
    }
}
