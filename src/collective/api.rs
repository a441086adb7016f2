//! The collectives of [`Device`](crate::Device) and [`Group`](crate::Group): their documentation, their checks, and the
//! [`Request`] that each fills. A body is written once, for `Group`; `Device` calls it for the group of all devices of
//! the scope.
//!
//! Invariant: a view comes from the caller's code, which may show other memory at each call. So a body asks each
//! argument for its view exactly once, before it announces anything. It calls nothing in a closure that needs the
//! caller's line: `#[track_caller]` does not reach into closures.

use super::{
    Request, between,
    face::collectives,
    ops::{all_reduce, in_place},
};
use crate::{
    error::Result,
    fabric::{Call, Counts, Element, Origin, ReduceOp, Shape},
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};

collectives! {
    /// Collectives. Every member calls them in the same order, with the same counts, type and operation. Anything else
    /// is [`Error::Mismatch`](crate::Error::Mismatch) on every member: it names two call sites, no buffer is touched,
    /// and nothing hangs. A member whose closure has already ended is a mismatch, too. A member that does not come is
    /// [`Error::Timeout`](crate::Error::Timeout), which names it. [`Device`](crate::Device) has these methods for all
    /// devices of the scope, and [`Group`](crate::Group) has them for some.
    ///
    /// All are asynchronous on the current stream. When that stream has got past a collective, no peer touches the
    /// buffers of this member any more. Buffers may have any length, also 0, and any alignment. (With
    /// [`Algorithm::Host`](crate::collective::Algorithm::Host) the host adds up, so a sum waits for the device.)
    ///
    /// **Bits.** Elements are combined in rank order and rounded once ([`ReduceOp`]). So the same call gives all
    /// members the same bits in every run. Only `all_reduce` and `all_reduce_into` around a ring
    /// ([`Algorithm`](crate::collective::Algorithm)) have another order, fixed as well;
    /// [`ReduceOrder::Rank`](crate::collective::ReduceOrder) avoids it. A sum of `n` members is off by at most `n - 1`
    /// roundings of the accumulator's type, each of the size of the sum of magnitudes, and one of the element's type.
    ///
    /// **Graphs.** Within [`capture`](crate::Device::capture) collectives go into the graph. Where kernels wait for
    /// each other on the devices, a launch of the graph has one meeting of the hosts for all its collectives. Elsewhere
    /// it has one meeting for each.
    ///
    /// **Errors** of all: `Mismatch`, `Timeout`, [`Error::InvalidArgument`](crate::Error::InvalidArgument) for lengths
    /// that do not fit, [`Error::WrongDevice`](crate::Error::WrongDevice), [`Error::Aborted`](crate::Error::Aborted),
    /// `OutOfMemory` for scratch, [`Error::Borrowed`](crate::Error::Borrowed) while another device is in a launch with
    /// collectives of a graph that names the memory, and the driver's errors. If one member fails after the meeting,
    /// the gang fails: the contents of the buffers are unspecified then.
    ///
    /// The page "Collectives" of the guide has an example with all of them.
    errors " Those of all collectives, above.";

    /// Replaces `x` on every member by the combination of all members' elements.
    ///
    /// The [algorithm](crate::collective::Algorithm) depends on the size: everything to every member, slices that one
    /// member combines, copy engines, or a ring. [`explain`](crate::GpuPool::explain) says which one a call would use.
    fn all_reduce<V: AsViewMut<Elem: Element>>(&self, x: &mut V, op: ReduceOp) -> Result<()> {
        self.run(all_reduce(Origin::default(), x.view_mut(), op))
    }

    /// [`all_reduce`](Self::all_reduce) out of place, with the same bits: `src` stays as it is.
    fn all_reduce_into<S: AsView<Elem: Element>>(
        &self, src: &S, dst: &mut impl AsViewMut<Elem = S::Elem>, op: ReduceOp,
    ) -> Result<()> {
        let (src, dst) = (src.view(), dst.view_mut());
        let call = Call::new("all_reduce_into").elements(S::Elem::DTYPE, src.len());
        self.fits("all_reduce_into", "dst", dst.len(), src.len())?;
        self.run(between(call, Some(op), Shape::AllReduce { len: src.len() }, Some(src), Some(dst)))
    }

    /// [`all_reduce`](Self::all_reduce) of several buffers of one type: PyTorch's `all_reduce_coalesced`, NCCL's group
    /// calls. The list may be empty, its buffers of any length; all members give the same lengths in the same order.
    ///
    /// Buffers of up to 256 KiB go together, up to 4 MiB at a time: a hundred of them take one meeting and 15 launches,
    /// and scratch of their size. Larger ones go one by one. Each has the bits that `all_reduce` gives it, unless NCCL
    /// adds the processes' sums up: its bits depend on an element's place.
    ///
    /// A `Vec` of buffers goes as `&mut all`. Buffers that are fields of other values go as an iterator, which runs
    /// once. For gradients see [`GradientExchange`](crate::gradients::GradientExchange): it keeps them together from
    /// the start, and reduces them during the backward pass.
    example {
        /// Two buffers: `dev.all_reduce_many(&mut [&mut weights, &mut bias], ReduceOp::Sum)?`. Fields by an iterator:
        ///
        /// ```
        /// # use gpu_pool::{DeviceBuffer, GpuPool, ReduceOp};
        /// struct Layer { w: DeviceBuffer<f32>, name: &'static str }
        /// # let pool = GpuPool::builder().host(2).build()?;
        /// let found = pool.run(|dev, _| {
        ///     let layer = |name| Ok(Layer { w: dev.upload(&[1.0f32])?, name });
        ///     let mut model = [layer("first")?, layer("frozen")?, layer("last")?];
        ///     let trained = model.iter_mut().filter(|layer| layer.name != "frozen");
        ///     dev.all_reduce_many(trained.map(|layer| &mut layer.w), ReduceOp::Sum)?;
        ///     model.iter().map(|layer| Ok(dev.download(&layer.w)?[0])).collect::<gpu_pool::Result<Vec<_>>>()
        /// })?;
        /// assert_eq!(found, [[2.0, 1.0, 2.0]; 2]);
        /// # Ok::<(), gpu_pool::Error>(())
        /// ```
    }
    fails " Lists that differ are a `Mismatch`.";
    fn all_reduce_many<V>(&self, xs: impl IntoIterator<Item = V>, op: ReduceOp) -> Result<()>
    where [V: AsViewMut, V::Elem: Element]
    {
        let mut xs: Vec<V> = xs.into_iter().collect();
        self.reduce_many(xs.iter_mut().map(|x| x.view_mut()).collect(), op)
    }

    /// Replaces `x` on member `root` by the combination of all members' elements; the others keep theirs.
    fn reduce<V: AsViewMut<Elem: Element>>(&self, x: &mut V, op: ReduceOp, root: usize) -> Result<()> {
        self.check_root("reduce", root)?;
        let x = x.view_mut();
        let (len, call) = (x.len(), Call::new("reduce").elements(V::Elem::DTYPE, x.len()).root(root));
        self.run(in_place(call, Some(op), Shape::Reduce { len, root }, x))
    }

    /// Combines all members' `src` and gives member `r` part `r` of the result in `dst`. `src` has one part per member.
    fn reduce_scatter<S: AsView<Elem: Element>>(
        &self, src: &S, dst: &mut impl AsViewMut<Elem = S::Elem>, op: ReduceOp,
    ) -> Result<()> {
        let (src, dst) = (src.view(), dst.view_mut());
        self.fits("reduce_scatter", "src", src.len(), dst.len().saturating_mul(self.count()))?;
        let call = Call::new("reduce_scatter").elements(S::Elem::DTYPE, dst.len());
        let shape = Shape::ReduceScatter { counts: Counts::Each(dst.len()), in_place: false };
        self.run(between(call, Some(op), shape, Some(src), Some(dst)))
    }

    /// [`reduce_scatter`](Self::reduce_scatter) with `counts[r]` elements for member `r`; all give the same counts.
    fn reduce_scatter_v<S: AsView<Elem: Element>>(
        &self, src: &S, dst: &mut impl AsViewMut<Elem = S::Elem>, counts: &[usize], op: ReduceOp,
    ) -> Result<()> {
        let (src, dst) = (src.view(), dst.view_mut());
        let of = self.check_counts("reduce_scatter_v", counts)?;
        self.fits("reduce_scatter_v", "src", src.len(), of.total(self.count()))?;
        self.fits("reduce_scatter_v", "dst", dst.len(), counts[self.rank])?;
        let call = Call::new("reduce_scatter_v").elements(S::Elem::DTYPE, src.len()).counts(counts);
        self.run(between(call, Some(op), Shape::ReduceScatter { counts: of, in_place: false }, Some(src), Some(dst)))
    }

    /// [`reduce_scatter`](Self::reduce_scatter) whose result replaces part `r` of member `r`'s own `x`; the other parts
    /// stay.
    fn reduce_scatter_in_place<V: AsViewMut<Elem: Element>>(&self, x: &mut V, op: ReduceOp) -> Result<()> {
        let x = x.view_mut();
        let each = self.parts("reduce_scatter_in_place", x.len())?;
        let call = Call::new("reduce_scatter_in_place").elements(V::Elem::DTYPE, x.len());
        let shape = Shape::ReduceScatter { counts: Counts::Each(each), in_place: true };
        self.run(in_place(call, Some(op), shape, x))
    }

    /// Puts all members' `src` in a row, in `dst` of every member.
    fn all_gather<S: AsView<Elem: Element>>(&self, src: &S, dst: &mut impl AsViewMut<Elem = S::Elem>) -> Result<()> {
        let (src, dst) = (src.view(), dst.view_mut());
        self.fits("all_gather", "dst", dst.len(), src.len().saturating_mul(self.count()))?;
        let call = Call::new("all_gather").elements(S::Elem::DTYPE, src.len());
        let shape = Shape::AllGather { counts: Counts::Each(src.len()), in_place: false };
        self.run(between(call, None, shape, Some(src), Some(dst)))
    }

    /// [`all_gather`](Self::all_gather) with `counts[r]` elements of member `r`; all give the same counts.
    fn all_gather_v<S: AsView<Elem: Element>>(
        &self, src: &S, dst: &mut impl AsViewMut<Elem = S::Elem>, counts: &[usize],
    ) -> Result<()> {
        let (src, dst) = (src.view(), dst.view_mut());
        let of = self.check_counts("all_gather_v", counts)?;
        self.fits("all_gather_v", "src", src.len(), counts[self.rank])?;
        self.fits("all_gather_v", "dst", dst.len(), of.total(self.count()))?;
        let call = Call::new("all_gather_v").elements(S::Elem::DTYPE, dst.len()).counts(counts);
        self.run(between(call, None, Shape::AllGather { counts: of, in_place: false }, Some(src), Some(dst)))
    }

    /// [`all_gather`](Self::all_gather) of part `r` of member `r`'s own `x`; afterwards all members hold all parts.
    fn all_gather_in_place<V: AsViewMut<Elem: Element>>(&self, x: &mut V) -> Result<()> {
        let x = x.view_mut();
        let each = self.parts("all_gather_in_place", x.len())?;
        let call = Call::new("all_gather_in_place").elements(V::Elem::DTYPE, x.len());
        self.run(in_place(call, None, Shape::AllGather { counts: Counts::Each(each), in_place: true }, x))
    }

    /// Replaces every member's `x` by member `root`'s.
    fn broadcast<V: AsViewMut<Elem: Element>>(&self, x: &mut V, root: usize) -> Result<()> {
        self.check_root("broadcast", root)?;
        let x = x.view_mut();
        let (len, call) = (x.len(), Call::new("broadcast").elements(V::Elem::DTYPE, x.len()).root(root));
        self.run(in_place(call, None, Shape::Broadcast { len, root }, x))
    }

    /// Puts all members' `src` in a row, in `dst` of member `root`. Only the root gives a `dst`.
    fn gather<S: AsView<Elem: Element>>(
        &self, src: &S, dst: Option<DeviceViewMut<'_, S::Elem>>, root: usize,
    ) -> Result<()> {
        self.check_root("gather", root)?;
        let src = src.view();
        self.only_root("gather", root, dst.as_ref().map(|dst| dst.len()), src.len().saturating_mul(self.count()))?;
        let call = Call::new("gather").elements(S::Elem::DTYPE, src.len()).root(root);
        self.run(between(call, None, Shape::Gather { counts: Counts::Each(src.len()), root }, Some(src), dst))
    }

    /// [`gather`](Self::gather) with `counts[r]` elements of member `r`; all give the same counts.
    fn gather_v<S: AsView<Elem: Element>>(
        &self, src: &S, dst: Option<DeviceViewMut<'_, S::Elem>>, counts: &[usize], root: usize,
    ) -> Result<()> {
        self.check_root("gather_v", root)?;
        let (src, of) = (src.view(), self.check_counts("gather_v", counts)?);
        self.fits("gather_v", "src", src.len(), counts[self.rank])?;
        self.only_root("gather_v", root, dst.as_ref().map(|dst| dst.len()), of.total(self.count()))?;
        let call = Call::new("gather_v").elements(S::Elem::DTYPE, of.total(self.count())).root(root).counts(counts);
        self.run(between(call, None, Shape::Gather { counts: of, root }, Some(src), dst))
    }

    /// Gives part `r` of member `root`'s `src` to member `r`, in `dst`. Only the root gives a `src`.
    fn scatter<D: AsViewMut<Elem: Element>>(
        &self, src: Option<DeviceView<'_, D::Elem>>, dst: &mut D, root: usize,
    ) -> Result<()> {
        self.check_root("scatter", root)?;
        let dst = dst.view_mut();
        self.only_root("scatter", root, src.map(|src| src.len()), dst.len().saturating_mul(self.count()))?;
        let call = Call::new("scatter").elements(D::Elem::DTYPE, dst.len()).root(root);
        self.run(between(call, None, Shape::Scatter { counts: Counts::Each(dst.len()), root }, src, Some(dst)))
    }

    /// [`scatter`](Self::scatter) with `counts[r]` elements for member `r`; all give the same counts.
    fn scatter_v<D: AsViewMut<Elem: Element>>(
        &self, src: Option<DeviceView<'_, D::Elem>>, dst: &mut D, counts: &[usize], root: usize,
    ) -> Result<()> {
        self.check_root("scatter_v", root)?;
        let (dst, of) = (dst.view_mut(), self.check_counts("scatter_v", counts)?);
        self.fits("scatter_v", "dst", dst.len(), counts[self.rank])?;
        self.only_root("scatter_v", root, src.map(|src| src.len()), of.total(self.count()))?;
        let call = Call::new("scatter_v").elements(D::Elem::DTYPE, of.total(self.count())).root(root).counts(counts);
        self.run(between(call, None, Shape::Scatter { counts: of, root }, src, Some(dst)))
    }

    /// Part `b` of member `a`'s `src` becomes part `a` of member `b`'s `dst`. Both buffers have one part per member.
    fn all_to_all<S: AsView<Elem: Element>>(&self, src: &S, dst: &mut impl AsViewMut<Elem = S::Elem>) -> Result<()> {
        let (src, dst) = (src.view(), dst.view_mut());
        let each = Counts::Each(self.parts("all_to_all", src.len())?);
        self.fits("all_to_all", "dst", dst.len(), src.len())?;
        let call = Call::new("all_to_all").elements(S::Elem::DTYPE, src.len());
        let n = self.count();
        let shape = Shape::AllToAll { send: vec![each.clone(); n], receive: vec![each; n] };
        self.run(between(call, None, shape, Some(src), Some(dst)))
    }

    /// [`all_to_all`](Self::all_to_all) with parts of `send[b]` elements for member `b`, and of `receive[a]` elements
    /// from member `a`. If a member sends another number than its peer receives, all members get a `Mismatch`.
    fn all_to_all_v<S: AsView<Elem: Element>>(
        &self, src: &S, send: &[usize], dst: &mut impl AsViewMut<Elem = S::Elem>, receive: &[usize],
    ) -> Result<()> {
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
