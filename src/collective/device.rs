//! The collectives of a whole gang, with their documentation.

use crate::fabric::types::{Element, ReduceOp};
use crate::{
    Device,
    error::Result,
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};

/// Operations of the whole gang. Every member calls them, in the same order, with the same counts, type and operation;
/// anything else is [`Error::Mismatch`](crate::Error::Mismatch) on every member, naming two call sites, with no buffer
/// touched and no hang. A member whose closure has already ended counts as a mismatch too; one that does not come is
/// [`Error::Timeout`](crate::Error::Timeout) naming it. [`Group`](crate::Group) has the same operations for some of the
/// members.
///
/// All are asynchronous on the current stream. When that stream has got past one, no peer touches the buffers that were
/// given any more. Any length does, also 0, and any alignment. (Where sums are the host's,
/// [`Algorithm::Host`](crate::Algorithm::Host), what adds up waits for the device.)
///
/// **Bits.** Elements are combined in the order of ranks and rounded once ([`ReduceOp`]), so all members hold the same
/// bits, and the same call gives the same bits in every run. Only `all_reduce` and `all_reduce_into` around a ring
/// ([`Algorithm`](crate::Algorithm)) have an order of their own, as fixed, unless
/// [`ReduceOrder::Rank`](crate::ReduceOrder) is asked for. A sum of `n` members is off by at most `n - 1` roundings of
/// the accumulator's type, each of the size of the sum of magnitudes, and one of the element's.
///
/// **Graphs.** Within [`capture`](Device::capture) they go into the graph. A launch is one meeting for all of them
/// where kernels meet on the devices, and one for each elsewhere.
///
/// **Errors** of all: `Mismatch`, `Timeout`, [`Error::InvalidArgument`](crate::Error::InvalidArgument) for lengths that
/// do not fit, [`Error::WrongDevice`](crate::Error::WrongDevice), [`Error::Aborted`](crate::Error::Aborted),
/// `OutOfMemory` for scratch, and the driver's. A failure of one member after the meeting fails the gang: the buffers'
/// contents are unspecified then.
impl Device {
    /// Replaces `x` on every member by the combination of all members' elements.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let sums = pool.run(|dev, shard| {
    ///     let mut x = dev.upload(&[shard.index() as f32, 1.0])?;
    ///     dev.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     dev.download(&x)
    /// })?;
    /// assert_eq!(sums, [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// Algorithm: of a little, everybody sends everything to everybody, as packets that carry their flags (NCCL's "LL")
    /// or into memory that the receiver has ready (MPI's eager protocol); of more, each member combines one slice of
    /// all buffers and writes it to all of them (the fused pass of NCCL's symmetric kernels); of yet more, the parts of
    /// a slice are brought to its owner, and the sums back: between two GPUs from 64 MB on by copy engines, among
    /// several from 8 MB on by kernels that only write to each other. Large sums of `f32` and `f64` of more than two
    /// GPUs (from 32 MB on) go around a ring, reduce-scatter and all-gather, `2 (n - 1)` steps of `1 / n` of the buffer
    /// (Patarasuk and Yuan, 2009), by kernels that write to their neighbour, or by copies. Without peer access kernels
    /// meet in the host's memory; where they cannot meet at all, `f32` and `f64` go around a ring.
    /// [`explain`](crate::GpuPool::explain) says which it would be.
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn all_reduce<V>(&self, x: &mut V, op: ReduceOp) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.everyone().all_reduce(x, op)
    }

    /// [`all_reduce`](Self::all_reduce) out of place, with the same bits: `src` stays as it is.
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn all_reduce_into<S, D>(&self, src: &S, dst: &mut D, op: ReduceOp) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        self.everyone().all_reduce_into(src, dst, op)
    }

    /// Replaces `x` on member `root` by the combination of all members' elements; the others keep theirs.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let found = pool.run(|dev, shard| {
    ///     let mut x = dev.upload(&[shard.index() as u8])?;
    ///     dev.reduce(&mut x, ReduceOp::Max, 1)?;
    ///     dev.download(&x)
    /// })?;
    /// assert_eq!(found, [[0], [2], [2]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn reduce<V>(&self, x: &mut V, op: ReduceOp, root: usize) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.everyone().reduce(x, op, root)
    }

    /// Combines all members' `src`, which is as many parts as there are members, and gives member `r` part `r` in
    /// `dst`.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let x = dev.upload(&[1, 2, 3, 4])?;
    ///     let mut y = dev.zeros::<i32>(2)?;
    ///     dev.reduce_scatter(&x, &mut y, ReduceOp::Sum)?;
    ///     dev.download(&y)
    /// })?;
    /// assert_eq!(found, [[2, 4], [6, 8]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn reduce_scatter<S, D>(&self, src: &S, dst: &mut D, op: ReduceOp) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        self.everyone().reduce_scatter(src, dst, op)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) with `counts[r]` elements for member `r`; all give the same counts.
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn reduce_scatter_v<S, D>(&self, src: &S, dst: &mut D, counts: &[usize], op: ReduceOp) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        self.everyone().reduce_scatter_v(src, dst, counts, op)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) whose result replaces part `r` of member `r`'s own `x`; the other parts
    /// stay.
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn reduce_scatter_in_place<V>(&self, x: &mut V, op: ReduceOp) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.everyone().reduce_scatter_in_place(x, op)
    }

    /// Puts all members' `src` in a row, in `dst` of every member.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let found = pool.run(|dev, shard| {
    ///     let x = dev.upload(&[shard.index() as u64, 7])?;
    ///     let mut all = dev.zeros::<u64>(6)?;
    ///     dev.all_gather(&x, &mut all)?;
    ///     dev.download(&all)
    /// })?;
    /// assert_eq!(found[0], [0, 7, 1, 7, 2, 7]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn all_gather<S, D>(&self, src: &S, dst: &mut D) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        self.everyone().all_gather(src, dst)
    }

    /// [`all_gather`](Self::all_gather) with `counts[r]` elements of member `r`; all give the same counts.
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn all_gather_v<S, D>(&self, src: &S, dst: &mut D, counts: &[usize]) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        self.everyone().all_gather_v(src, dst, counts)
    }

    /// [`all_gather`](Self::all_gather) of part `r` of member `r`'s own `x`, which becomes the same on all members.
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn all_gather_in_place<V>(&self, x: &mut V) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.everyone().all_gather_in_place(x)
    }

    /// Replaces every member's `x` by member `root`'s.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let found = pool.run(|dev, shard| {
    ///     let mut x = dev.upload(&[shard.index() as f64; 2])?;
    ///     dev.broadcast(&mut x, 2)?;
    ///     dev.download(&x)
    /// })?;
    /// assert_eq!(found, [[2.0; 2]; 3]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn broadcast<V>(&self, x: &mut V, root: usize) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        self.everyone().broadcast(x, root)
    }

    /// Puts all members' `src` in a row in `dst` of member `root`, which alone gives one.
    ///
    /// ```
    /// # use gpu_pool::{AsViewMut, GpuPool};
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let found = pool.run(|dev, shard| {
    ///     let x = dev.upload(&[shard.index() as f32])?;
    ///     let mut all = if dev.rank() == 1 { Some(dev.zeros::<f32>(3)?) } else { None };
    ///     dev.gather(&x, all.as_mut().map(|all| all.view_mut()), 1)?;
    ///     all.map(|all| dev.download(&all)).transpose()
    /// })?;
    /// assert_eq!(found, [None, Some(vec![0.0, 1.0, 2.0]), None]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn gather<S>(&self, src: &S, dst: Option<DeviceViewMut<'_, S::Elem>>, root: usize) -> Result<()>
    where
        S: AsView + ?Sized,
        S::Elem: Element,
    {
        self.everyone().gather(src, dst, root)
    }

    /// [`gather`](Self::gather) with `counts[r]` elements of member `r`; all give the same counts.
    ///
    /// # Errors
    /// As of all collectives, above.
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
        self.everyone().gather_v(src, dst, counts, root)
    }

    /// Gives member `r` part `r` of `src` of member `root`, which alone gives one, in `dst`.
    ///
    /// ```
    /// # use gpu_pool::{AsView, GpuPool};
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let all = if dev.rank() == 0 { Some(dev.upload(&[5, 6, 7])?) } else { None };
    ///     let mut mine = dev.zeros::<i64>(1)?;
    ///     dev.scatter(all.as_ref().map(|all| all.view()), &mut mine, 0)?;
    ///     dev.download(&mine)
    /// })?;
    /// assert_eq!(found, [[5], [6], [7]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn scatter<D>(&self, src: Option<DeviceView<'_, D::Elem>>, dst: &mut D, root: usize) -> Result<()>
    where
        D: AsViewMut + ?Sized,
        D::Elem: Element,
    {
        self.everyone().scatter(src, dst, root)
    }

    /// [`scatter`](Self::scatter) with `counts[r]` elements for member `r`; all give the same counts.
    ///
    /// # Errors
    /// As of all collectives, above.
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
        self.everyone().scatter_v(src, dst, counts, root)
    }

    /// Both buffers are as many parts as there are members: part `b` of member `a`'s `src` becomes part `a` of member
    /// `b`'s `dst`.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let found = pool.run(|dev, shard| {
    ///     let x = dev.upload(&[shard.index() as i8, 10 + shard.index() as i8])?;
    ///     let mut y = dev.zeros::<i8>(2)?;
    ///     dev.all_to_all(&x, &mut y)?;
    ///     dev.download(&y)
    /// })?;
    /// assert_eq!(found, [[0, 1], [10, 11]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn all_to_all<S, D>(&self, src: &S, dst: &mut D) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        self.everyone().all_to_all(src, dst)
    }

    /// [`all_to_all`](Self::all_to_all) with parts of `send[b]` elements for member `b`, and of `receive[a]` elements
    /// from member `a`. What one sends must be what the other receives: else it is a `Mismatch` on all members.
    ///
    /// # Errors
    /// As of all collectives, above.
    #[track_caller]
    pub fn all_to_all_v<S, D>(&self, src: &S, send: &[usize], dst: &mut D, receive: &[usize]) -> Result<()>
    where
        S: AsView + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Element,
    {
        self.everyone().all_to_all_v(src, send, dst, receive)
    }
}
