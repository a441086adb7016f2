//! The public types of collectives: element types, reductions, algorithms and the order of sums. Plain data.

use crate::{error::UnknownName, memory::DeviceCopy};
use std::fmt;

/// How elements of different devices are combined.
///
/// Elements are combined strictly in the order of ranks, in the accumulator's type, and rounded once: `f64` and
/// integers in themselves, `f32`, `f16` and `bf16` in `f32`. Integers wrap around.
///
/// ```
/// # use gpu_pool::{GpuPool, ReduceOp};
/// let pool = GpuPool::builder().host(3).build()?;
/// let found = pool.run(|dev, shard| {
///     let mut x = dev.upload(&[shard.index() as i32 + 1, -5])?;
///     dev.all_reduce(&mut x, ReduceOp::Prod)?;
///     let mut y = dev.upload(&[shard.index() as f32])?;
///     // Each device its own factor.
///     dev.all_reduce(&mut y, ReduceOp::Scaled(10.0 * shard.index() as f64))?;
///     Ok((dev.download(&x)?, dev.download(&y)?))
/// })?;
/// assert_eq!(found[2], (vec![6, -125], vec![50.0]));
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The smallest. A NaN wins; of equal values (`-0.0` and `0.0`) the lowest rank's.
    Min,
    /// The largest, with the rules of `Min`.
    Max,
    /// The sum divided by the number of members: times its reciprocal, in the accumulator's type; integers are divided,
    /// and cut towards zero.
    Avg,
    /// The sum, with each member's elements first multiplied by the factor that this member gives (each its own):
    /// NCCL's `PreMulSum`. For integers the factor is cut towards zero.
    Scaled(f64),
}

impl ReduceOp {
    /// Members may call with equal kinds together.
    pub(crate) fn kind(self) -> std::mem::Discriminant<Self> {
        std::mem::discriminant(&self)
    }
}

display_as!(ReduceOp, |self, f| fmt::Debug::fmt(self, f));

/// The name of an element type, as descriptors carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// `f32`
    F32,
    /// `f64`
    F64,
    /// `half::f16`
    F16,
    /// `half::bf16`
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

impl DType {
    pub(crate) const ALL: [DType; 10] = {
        use DType::*;
        [F32, F64, F16, BF16, I8, U8, I32, U32, I64, U64]
    };

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// The element types that collectives know. Sealed, since the kernels are in the crate.
///
/// ```compile_fail,E0277
/// # fn f(dev: &gpu_pool::Device, x: &mut gpu_pool::DeviceBuffer<u16>) -> Result<(), gpu_pool::Error> {
/// dev.all_reduce(x, gpu_pool::ReduceOp::Sum) // collectives do not know the type `u16`
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "collectives do not know the type `{Self}`",
    note = "they know f32, f64, half::f16, half::bf16, i8, u8, i32, u32, i64 and u64"
)]
pub trait Element: DeviceCopy + sealed::Sealed {
    /// Its name.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($T:ty => $dtype:ident),+) => {$(
        impl sealed::Sealed for $T {}
        impl Element for $T {
            const DTYPE: DType = DType::$dtype;
        }
    )+};
}
elements! {
    f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => BF16,
    i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64
}

/// How a collective is carried out.
///
/// | | `Direct` | `Inbox` | `Exchange` | `Copies` | `Staged` | `Host` | `Ring` |
/// |---|---|---|---|---|---|---|---|
/// | operations | all | sums | sums | all | all | all | `all_reduce`, `all_reduce_into` |
/// | element types | all | `f32`, `f64`, `f16`, `bf16` | all | all | all | all | `f32`, `f64` |
/// | [`ReduceOp`]s | all | all | all | all | all | all | `Sum`, `Avg` |
/// | members on GPUs | 1 to 16 | 2 to 16 | 2 to 16 | any | 2 to 16 | 2 and more | 2 and more |
/// | peer access | needed | used | used | used | not used | not used | used |
/// | sums made by | one kernel | one kernel | one kernel | kernels | one kernel | device threads | kernels |
/// | data moved by | kernel | kernel | kernel or copy engines | copy engines | kernel | copy engines | kernel or copy engines |
/// | bits of sums: in rank order | yes | yes | yes | yes | yes | yes | by place in the buffer |
/// | the call waits for its device | no | no | no | no | no | where it adds up | no |
/// | in a graph | one kernel | one kernel | as without | between two parts | one kernel | between two parts | as without |
///
/// Where kernels cannot wait for each other, `Direct` and `Staged` are between two parts of a graph, too. Messages
/// (`send`, `recv`) are copies under all algorithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// The fastest one for the operation, its size and the machine ([`GpuPool::explain`](crate::GpuPool::explain)).
    #[default]
    Auto,
    /// One kernel on each device, which reads its part of all members' memory and writes the result to all of them.
    /// Needs peer access between all members. An `all_reduce_norm` adds the residual and norms the rows in that kernel,
    /// where kernels can meet on the devices.
    Direct,
    /// Sums of floats by one kernel on each device, which writes to peers' inboxes alone: memory of the pool, 21 MB on
    /// each GPU. The data are their own flags: an empty inbox is full of one bit pattern, a NaN, which no datum that is
    /// sent has (the sender makes it another NaN, on all members). No peer touches a user's buffer.
    ///
    /// Other calls fall back to `Auto`, and so do calls where kernels cannot meet on the devices (on software GPUs,
    /// under a checker, without peer access). `Auto` picks this for float sums in one trip (up to 2 MB between two
    /// GPUs, 375 KB between four), for those of five and more GPUs up to 16 MB, and for a reduce-scatter up to 8 MB.
    Inbox,
    /// Sums (of all-reduce, reduce and reduce-scatter) by one kernel on each device, which only writes to peers'
    /// memory: every member sends its part of a slice to the slice's owner, which adds up and sends the result back.
    /// Where kernels cannot meet by themselves (on software GPUs, under a checker, without peer access) as by `Copies`.
    /// It needs memory for arriving data, up to 64 MiB on each device, and takes less where there is less. Other calls
    /// fall back to `Auto`. `Auto` picks this for all-reduces of more than two GPUs from 8 MB on (5 to 8 H200s from 16
    /// MB), except those that go around a ring.
    Exchange,
    /// An exchange by copy engines: every member sends its part of a slice to the slice's owner, whose kernels add up
    /// in its own memory, and send the result back. Moves are plain copies. Without peer access they are staged through
    /// the host. It takes scratch of up to 128 MiB on each device for sums, and less where memory is short.
    Copies,
    /// Through page-locked host memory, which all devices can name: one kernel on each, whose peers' meet it there. The
    /// fastest one without peer access. If asked for on GPUs with peer access, or on software GPUs, it goes piece by
    /// piece of up to 1 MiB, ordered by events, and waits on the host when the device is four calls behind.
    Staged,
    /// Down to page-locked memory of the host, where the device threads do the arithmetic, each its own slice of every
    /// piece, and up again: no kernel runs, and no access to peers' memory is needed.
    ///
    /// A sum **blocks its device thread** until the last sums are made. So do
    /// [`GradientExchange`](crate::gradients::GradientExchange)'s calls that start a bucket (whose packing, wires and
    /// norm are kernels), and [`launch_graph`](crate::Device::launch_graph). A call that only moves data waits for the
    /// other members' threads; and when a device is four calls behind, for the first of them. Same bits as the other
    /// algorithms, except NaN payloads.
    Host,
    /// `all_reduce` and `all_reduce_into` around a ring (`f32` and `f64`, `Sum` and `Avg`): by one kernel on each
    /// device, which writes to its successor's memory alone, or by copies where they are faster and where kernels
    /// cannot meet. The bits are the same. The kernels need memory for arriving data, up to 48 MiB on each device.
    /// Under `Auto` more than two GPUs with peer access go round from 32 MB on. Other calls fall back to `Auto`.
    Ring,
}

display_as!(Algorithm, |self, f| f.pad(&format!("{self:?}").to_lowercase()));

impl std::str::FromStr for Algorithm {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        use Algorithm::*;
        let mut all = [Auto, Direct, Inbox, Exchange, Copies, Staged, Host, Ring].into_iter();
        let names = "auto, direct, inbox, exchange, copies, staged, host or ring";
        let named = all.find(|it| format!("{it:?}").to_lowercase() == name);
        named.ok_or_else(|| UnknownName::new(name, "algorithm", names))
    }
}

/// In which order sums are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOrder {
    /// The same on every device and in every run; it may depend on the size and on the algorithm.
    #[default]
    Fixed,
    /// By rank, for every size and algorithm: the same numbers give the same bits at every place of every buffer.
    Rank,
}
