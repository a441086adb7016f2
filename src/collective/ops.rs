//! The collectives: what each checks, and what shape it has. [`Device`](crate::Device)'s methods have the
//! documentation.
//!
//! A view is asked of the caller's code, which may show other memory at each call. So each argument is asked once, and
//! call, shape and memory come from that one view.

use super::{Group, algorithm::Algorithm, request::Request};
use crate::fabric::{
    call::{Call, Origin},
    descriptor::Area,
    limits::Limits,
    plan::{Counts, Shape},
    types::{Element, ReduceOp},
};
use crate::{
    error::{Error, Result},
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};

/// A collective on one buffer of each member.
pub(super) fn in_place<T: Element>(call: Call, op: Option<ReduceOp>, shape: Shape, x: DeviceViewMut<'_, T>) -> Request {
    between(call, op, shape, None, Some(x))
}

/// A collective from one buffer to another.
fn between<T: Element>(
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
        source: source.map(|x| Area { block: x.block.clone(), address: x.address(), bytes: x.bytes() }),
        destination: destination.map(|x| Area { block: x.block.clone(), address: x.address(), bytes: x.bytes() }),
        counts: None,
    }
}

/// What calls are checked for before they meet.
impl Group<'_> {
    #[track_caller]
    fn fits(&self, op: &'static str, what: &str, found: usize, wanted: usize) -> Result<()> {
        if found == wanted {
            return Ok(());
        }
        Err(Error::invalid(op, format_args!("{what} has {found} elements where {wanted} are needed")))
    }

    #[track_caller]
    pub(crate) fn check_root(&self, op: &'static str, root: usize) -> Result<()> {
        if root < self.count() {
            return Ok(());
        }
        Err(Error::invalid(op, format_args!("root {root} of {} members", self.count())))
    }

    /// What only the root has must be of this length there, and nowhere else.
    #[track_caller]
    fn only_root(&self, op: &'static str, root: usize, found: Option<usize>, wanted: usize) -> Result<()> {
        match found {
            Some(found) if self.rank == root => self.fits(op, "the root's buffer", found, wanted),
            None if self.rank != root => Ok(()),
            _ => {
                Err(Error::invalid(op, format_args!("the root, {root}, gives the whole buffer, and nobody else does")))
            }
        }
    }

    #[track_caller]
    fn check_counts(&self, op: &'static str, counts: &[usize]) -> Result<Counts> {
        let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        if counts.len() == self.count() && total.is_some() {
            return Ok(Counts::By(counts.into()));
        }
        Err(Error::invalid(op, format_args!("{counts:?} are no counts of {} members", self.count())))
    }

    /// Elements of each of as many parts as there are members.
    #[track_caller]
    fn parts(&self, op: &'static str, len: usize) -> Result<usize> {
        if len.is_multiple_of(self.count()) {
            return Ok(len / self.count());
        }
        Err(Error::invalid(op, format_args!("{len} elements are not {} equal parts", self.count())))
    }
}

/// As [`Device`](crate::Device)'s, for the members of the group; roots and parts go by ranks in the group.
impl Group<'_> {
    /// [`Device::all_reduce`](crate::Device::all_reduce).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_reduce<V>(&self, x: &mut V, op: ReduceOp) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.all_reduce_from(Origin::default(), x.view_mut(), op)
    }

    /// The same, of those who say that it is for this.
    #[track_caller]
    pub(crate) fn all_reduce_from<T: Element>(
        &self,
        origin: Origin,
        x: DeviceViewMut<'_, T>,
        op: ReduceOp,
    ) -> Result<()> {
        let (len, call) = (x.len(), Call::new("all_reduce").elements(T::DTYPE, x.len()).from(origin));
        self.run(in_place(call, Some(op), Shape::AllReduce { len }, x))
    }

    /// The same, of what the current stream's work does not wait for yet: it leaves most of the device to work beside
    /// it. Not in captures. The bits are the same.
    #[track_caller]
    pub(crate) fn all_reduce_beside<T: Element>(
        &self,
        origin: Origin,
        x: DeviceViewMut<'_, T>,
        op: ReduceOp,
    ) -> Result<()> {
        let (len, limits) = (x.len(), self.limits().overlapping());
        let call = Call::new("all_reduce").elements(T::DTYPE, len).from(origin);
        let request = in_place(call, Some(op), Shape::AllReduce { len }, x);
        self.carry(&request, &limits)
    }

    /// [`all_reduce`](Self::all_reduce) by a given algorithm, for the tuner.
    pub(crate) fn all_reduce_by<T: Element>(
        &self,
        x: DeviceViewMut<'_, T>,
        op: ReduceOp,
        algorithm: &dyn Algorithm,
        limits: &Limits,
    ) -> Result<()> {
        let (len, call) = (x.len(), Call::new("all_reduce").elements(T::DTYPE, x.len()));
        let request = in_place(call, Some(op), Shape::AllReduce { len }, x);
        self.carry_by(&request, &self.case(&request, limits), algorithm)
    }

    /// [`Device::all_reduce_into`](crate::Device::all_reduce_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_reduce_into<S, D>(&self, src: &S, dst: &mut D, op: ReduceOp) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        let (src, dst) = (src.view(), dst.view_mut());
        let call = Call::new("all_reduce_into").elements(S::Elem::DTYPE, src.len());
        self.fits("all_reduce_into", "dst", dst.len(), src.len())?;
        self.run(between(call, Some(op), Shape::AllReduce { len: src.len() }, Some(src), Some(dst)))
    }

    /// [`Device::reduce`](crate::Device::reduce).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn reduce<V>(&self, x: &mut V, op: ReduceOp, root: usize) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.check_root("reduce", root)?;
        let x = x.view_mut();
        let (len, call) = (x.len(), Call::new("reduce").elements(V::Elem::DTYPE, x.len()).root(root));
        self.run(in_place(call, Some(op), Shape::Reduce { len, root }, x))
    }

    /// [`Device::reduce_scatter`](crate::Device::reduce_scatter).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn reduce_scatter<S, D>(&self, src: &S, dst: &mut D, op: ReduceOp) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        let (src, dst) = (src.view(), dst.view_mut());
        self.fits("reduce_scatter", "src", src.len(), dst.len().saturating_mul(self.count()))?;
        let call = Call::new("reduce_scatter").elements(S::Elem::DTYPE, dst.len());
        let shape = Shape::ReduceScatter { counts: Counts::Each(dst.len()), in_place: false };
        self.run(between(call, Some(op), shape, Some(src), Some(dst)))
    }

    /// [`Device::reduce_scatter_v`](crate::Device::reduce_scatter_v).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn reduce_scatter_v<S, D>(&self, src: &S, dst: &mut D, counts: &[usize], op: ReduceOp) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        let (src, dst) = (src.view(), dst.view_mut());
        let of = self.check_counts("reduce_scatter_v", counts)?;
        self.fits("reduce_scatter_v", "src", src.len(), of.total(self.count()))?;
        self.fits("reduce_scatter_v", "dst", dst.len(), counts[self.rank])?;
        let call = Call::new("reduce_scatter_v").elements(S::Elem::DTYPE, src.len()).counts(counts);
        self.run(between(call, Some(op), Shape::ReduceScatter { counts: of, in_place: false }, Some(src), Some(dst)))
    }

    /// [`Device::reduce_scatter_in_place`](crate::Device::reduce_scatter_in_place).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn reduce_scatter_in_place<V>(&self, x: &mut V, op: ReduceOp) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        let x = x.view_mut();
        let each = self.parts("reduce_scatter_in_place", x.len())?;
        let call = Call::new("reduce_scatter_in_place").elements(V::Elem::DTYPE, x.len());
        let shape = Shape::ReduceScatter { counts: Counts::Each(each), in_place: true };
        self.run(in_place(call, Some(op), shape, x))
    }

    /// [`Device::all_gather`](crate::Device::all_gather).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_gather<S, D>(&self, src: &S, dst: &mut D) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        let (src, dst) = (src.view(), dst.view_mut());
        self.fits("all_gather", "dst", dst.len(), src.len().saturating_mul(self.count()))?;
        let call = Call::new("all_gather").elements(S::Elem::DTYPE, src.len());
        let shape = Shape::AllGather { counts: Counts::Each(src.len()), in_place: false };
        self.run(between(call, None, shape, Some(src), Some(dst)))
    }

    /// [`Device::all_gather_v`](crate::Device::all_gather_v).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_gather_v<S, D>(&self, src: &S, dst: &mut D, counts: &[usize]) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        let (src, dst) = (src.view(), dst.view_mut());
        let of = self.check_counts("all_gather_v", counts)?;
        self.fits("all_gather_v", "src", src.len(), counts[self.rank])?;
        self.fits("all_gather_v", "dst", dst.len(), of.total(self.count()))?;
        let call = Call::new("all_gather_v").elements(S::Elem::DTYPE, dst.len()).counts(counts);
        self.run(between(call, None, Shape::AllGather { counts: of, in_place: false }, Some(src), Some(dst)))
    }

    /// [`Device::all_gather_in_place`](crate::Device::all_gather_in_place).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_gather_in_place<V>(&self, x: &mut V) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        let x = x.view_mut();
        let each = self.parts("all_gather_in_place", x.len())?;
        let call = Call::new("all_gather_in_place").elements(V::Elem::DTYPE, x.len());
        self.run(in_place(call, None, Shape::AllGather { counts: Counts::Each(each), in_place: true }, x))
    }

    /// [`Device::broadcast`](crate::Device::broadcast).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn broadcast<V>(&self, x: &mut V, root: usize) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.check_root("broadcast", root)?;
        let x = x.view_mut();
        let (len, call) = (x.len(), Call::new("broadcast").elements(V::Elem::DTYPE, x.len()).root(root));
        self.run(in_place(call, None, Shape::Broadcast { len, root }, x))
    }

    /// [`Device::gather`](crate::Device::gather).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn gather<S>(&self, src: &S, dst: Option<DeviceViewMut<'_, S::Elem>>, root: usize) -> Result<()>
    where
        S: AsView + ?Sized,
        S::Elem: Element,
    {
        self.check_root("gather", root)?;
        let src = src.view();
        self.only_root("gather", root, dst.as_ref().map(|dst| dst.len()), src.len().saturating_mul(self.count()))?;
        let call = Call::new("gather").elements(S::Elem::DTYPE, src.len()).root(root);
        self.run(between(call, None, Shape::Gather { counts: Counts::Each(src.len()), root }, Some(src), dst))
    }

    /// [`Device::gather_v`](crate::Device::gather_v).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn gather_v<S>(
        &self,
        src: &S,
        dst: Option<DeviceViewMut<'_, S::Elem>>,
        counts: &[usize],
        root: usize,
    ) -> Result<()>
    where
        S: AsView + ?Sized,
        S::Elem: Element,
    {
        self.check_root("gather_v", root)?;
        let (src, of) = (src.view(), self.check_counts("gather_v", counts)?);
        self.fits("gather_v", "src", src.len(), counts[self.rank])?;
        self.only_root("gather_v", root, dst.as_ref().map(|dst| dst.len()), of.total(self.count()))?;
        let call = Call::new("gather_v").elements(S::Elem::DTYPE, of.total(self.count())).root(root).counts(counts);
        self.run(between(call, None, Shape::Gather { counts: of, root }, Some(src), dst))
    }

    /// [`Device::scatter`](crate::Device::scatter).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn scatter<D>(&self, src: Option<DeviceView<'_, D::Elem>>, dst: &mut D, root: usize) -> Result<()>
    where
        D: AsViewMut + ?Sized,
        D::Elem: Element,
    {
        self.check_root("scatter", root)?;
        let dst = dst.view_mut();
        self.only_root("scatter", root, src.map(|src| src.len()), dst.len().saturating_mul(self.count()))?;
        let call = Call::new("scatter").elements(D::Elem::DTYPE, dst.len()).root(root);
        self.run(between(call, None, Shape::Scatter { counts: Counts::Each(dst.len()), root }, src, Some(dst)))
    }

    /// [`Device::scatter_v`](crate::Device::scatter_v).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn scatter_v<D>(
        &self,
        src: Option<DeviceView<'_, D::Elem>>,
        dst: &mut D,
        counts: &[usize],
        root: usize,
    ) -> Result<()>
    where
        D: AsViewMut + ?Sized,
        D::Elem: Element,
    {
        self.check_root("scatter_v", root)?;
        let (dst, of) = (dst.view_mut(), self.check_counts("scatter_v", counts)?);
        self.fits("scatter_v", "dst", dst.len(), counts[self.rank])?;
        self.only_root("scatter_v", root, src.map(|src| src.len()), of.total(self.count()))?;
        let call = Call::new("scatter_v").elements(D::Elem::DTYPE, of.total(self.count())).root(root).counts(counts);
        self.run(between(call, None, Shape::Scatter { counts: of, root }, src, Some(dst)))
    }

    /// [`Device::all_to_all`](crate::Device::all_to_all).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_to_all<S, D>(&self, src: &S, dst: &mut D) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        let (src, dst) = (src.view(), dst.view_mut());
        let each = Counts::Each(self.parts("all_to_all", src.len())?);
        self.fits("all_to_all", "dst", dst.len(), src.len())?;
        let call = Call::new("all_to_all").elements(S::Elem::DTYPE, src.len());
        let n = self.count();
        let shape = Shape::AllToAll { send: vec![each.clone(); n], receive: vec![each; n] };
        self.run(between(call, None, shape, Some(src), Some(dst)))
    }

    /// [`Device::all_to_all_v`](crate::Device::all_to_all_v).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn all_to_all_v<S, D>(&self, src: &S, send: &[usize], dst: &mut D, receive: &[usize]) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        let (src, dst) = (src.view(), dst.view_mut());
        let (out, into) = (self.check_counts("all_to_all_v", send)?, self.check_counts("all_to_all_v", receive)?);
        self.fits("all_to_all_v", "src", src.len(), out.total(self.count()))?;
        self.fits("all_to_all_v", "dst", dst.len(), into.total(self.count()))?;
        self.fits("all_to_all_v", "what this member expects of itself", receive[self.rank], send[self.rank])?;
        let call = Call::new("all_to_all_v").elements(S::Elem::DTYPE, 0);
        let none = Shape::AllToAll { send: Vec::new(), receive: Vec::new() };
        let request = between(call, None, none, Some(src), Some(dst));
        self.run(Request { shape: None, counts: Some((out, into)), ..request })
    }
}
