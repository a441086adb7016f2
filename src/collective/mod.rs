//! Collectives: operations that every member of a gang calls together.
//!
//! * [`board`]: the meeting. Each member sends a descriptor of its call to each other member through lock-free rings;
//!   nothing runs before all have arrived and match, and commit or abort is one compare-and-swap for all.
//! * [`ring`]: all-reduce by a ring of copies and local additions, ordered by cross-device events.

pub(crate) mod board;
#[allow(dead_code)] // the algorithms that launch them come by another branch
pub(crate) mod kernels;
mod ring;

use crate::{
    Device,
    error::Result,
    memory::{AsViewMut, DeviceCopy},
};
use board::{Call, Payload};
use std::panic::Location;

/// How elements of different devices are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The smallest value; NaN where a device has one.
    Min,
    /// The largest value; NaN where a device has one.
    Max,
    /// The sum divided by the number of devices (computed as times its reciprocal).
    Avg,
    /// The sum of the values, each first multiplied by its device's factor.
    Scaled(f64),
}

/// The name of an element type, as descriptors carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DType {
    /// `f32`
    F32,
    /// `f64`
    F64,
    /// [`half::f16`]
    F16,
    /// [`half::bf16`]
    BF16,
    /// `i8`
    I8,
    /// `u8`
    U8,
    /// `i32`
    I32,
    /// `u32`
    U32,
    /// `i64`
    I64,
    /// `u64`
    U64,
}

mod sealed {
    pub trait Sealed {}
}

/// The element types that reducing collectives know. Sealed, since the kernels are in the crate.
#[diagnostic::on_unimplemented(
    message = "reducing collectives do not know the type `{Self}`",
    note = "they know f32 and f64"
)]
pub trait Element: DeviceCopy + sealed::Sealed {
    /// Its name.
    const DTYPE: DType;
    #[doc(hidden)]
    fn add(
        dev: &Device,
        dst: crate::DeviceViewMut<'_, Self>,
        src: crate::DeviceView<'_, Self>,
        scale: Option<f64>,
    ) -> Result<()>;
    #[doc(hidden)]
    fn scale(dev: &Device, x: crate::DeviceViewMut<'_, Self>, factor: f64) -> Result<()>;
}

macro_rules! element {
    ($T:ty, $dtype:ident, $add:ident, $add_scale:ident) => {
        impl sealed::Sealed for $T {}
        impl Element for $T {
            const DTYPE: DType = DType::$dtype;

            fn add(
                dev: &Device,
                dst: crate::DeviceViewMut<'_, Self>,
                src: crate::DeviceView<'_, Self>,
                scale: Option<f64>,
            ) -> Result<()> {
                let n = dst.len();
                let dims = crate::LaunchDims::cover(n.min(1 << 20));
                // SAFETY: the kernels write the `n` elements of `dst` and read as many of `src`; they stride over the
                // grid, so any dimensions do.
                unsafe {
                    match scale {
                        None => dev.launch(&crate::builtin::$add, dims, (dst, src, n as u64)),
                        Some(f) => dev.launch(&crate::builtin::$add_scale, dims, (dst, src, n as u64, f as $T)),
                    }
                }
            }

            fn scale(dev: &Device, mut x: crate::DeviceViewMut<'_, Self>, factor: f64) -> Result<()> {
                dev.scale(&mut x, factor as $T)
            }
        }
    };
}
element! { f32, F32, ADD_F32, ADD_SCALE_F32 }
element! { f64, F64, ADD_F64, ADD_SCALE_F64 }

/// Operations of the whole gang. Every member calls them, in the same order, with the same count, type and operation;
/// anything else is [`Error::Mismatch`](crate::Error::Mismatch) on every member, naming two call sites, with no buffer
/// touched and no hang. A member whose closure has already ended counts as a mismatch too; one that does not come is
/// [`Error::Timeout`](crate::Error::Timeout) naming it.
impl Device {
    /// Replaces `x` on every member by the elementwise sum (or average) over the members.
    ///
    /// All members hold the same bits afterwards, and the same call on the same number of devices gives the same bits
    /// every run: each part of the buffer is added up in a fixed order of ranks, once, and then copied. NaN and
    /// infinities propagate as in the addition.
    ///
    /// Any length does, also 0 and fewer elements than devices. Asynchronous on the current stream; when that stream has
    /// got past it, no peer touches `x` any more.
    ///
    /// Algorithm: reduce-scatter and all-gather around a ring, `2 (n - 1)` steps of `1 / n` of the buffer (Patarasuk and
    /// Yuan, 2009). Uses scratch of `1 / n` of the buffer from the device's pool.
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
    /// # Errors
    /// `Mismatch`, `Timeout`, [`Error::WrongDevice`](crate::Error::WrongDevice),
    /// [`Error::Aborted`](crate::Error::Aborted), `OutOfMemory` for the scratch, and the driver's. A failure of one
    /// member after the meeting fails the gang: the buffers' contents are unspecified then.
    #[track_caller]
    pub fn all_reduce<V>(&self, x: &mut V, op: ReduceOp) -> Result<()>
    where
        V: AsViewMut + ?Sized,
        V::Elem: Element,
    {
        ring::all_reduce(self, x.view_mut(), op)
    }

    /// Waits on the host until every member has called it. It says nothing about work on the devices.
    ///
    /// # Errors
    /// `Mismatch`, `Timeout`, `Aborted`.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let _here = self.worker.link.enter("barrier", Location::caller());
        let call = Call::new("barrier", None, 0, None);
        self.meet(call, |_| Payload::Nothing).map(drop)
    }

    /// Gives a host value to every member and returns everybody's, in rank order. `'static`, since otherwise one
    /// device's borrow could be handed to another.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let all = pool.run(|dev, shard| dev.exchange(shard.index() * 10))?;
    /// assert_eq!(all[2], [0, 10, 20]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Mismatch`, also for values of different types; `Timeout`, `Aborted`.
    #[track_caller]
    pub fn exchange<T: Clone + Send + Sync + 'static>(&self, value: T) -> Result<Vec<T>> {
        let _here = self.worker.link.enter("exchange", Location::caller());
        let call = Call::new("exchange", None, size_of::<T>(), None).of_type::<T>();
        let mine = std::sync::Arc::new(value);
        let theirs = self.meet(call, |_| Payload::Value(mine.clone()))?;
        let value = |rank: usize, payload: &Payload| match payload {
            Payload::Value(v) => v.downcast_ref::<T>().cloned().expect("the meeting compared the types"),
            _ => unreachable!("rank {rank} met with another kind of payload"),
        };
        Ok(theirs
            .iter()
            .enumerate()
            .map(|(rank, p)| p.as_ref().map_or_else(|| (*mine).clone(), |p| value(rank, p)))
            .collect())
    }
}
