//! What a pool says of its collectives.

use crate::{
    Algorithm, DType, GpuPool, ReduceOp,
    collective::{
        choose::{Bulk, Case, Way, choose},
        direct, exchange,
        plan::Shape,
        push, ring,
        run::GRAIN,
        staged,
    },
};
use std::fmt;

/// What [`GpuPool::explain`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// How the devices meet: in the kernels themselves, in their data, by events of the streams, or by their host threads.
    pub meets: &'static str,
    /// Why this one.
    pub reason: &'static str,
    /// Blocks of 512 threads of the kernel that does it: on how many multiprocessors it is. Copy engines need none; of `Copies`, and of
    /// `Ring` where it goes by events, it is the kernels that add up what has arrived. `Host` has none.
    pub blocks: u32,
    /// The limits that this goes by, and where they are from: see [`Builder::tune`](crate::Builder::tune).
    pub limits: String,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, meeting by {}: {}", self.algorithm, self.meets, self.reason)?;
        write!(f, " ({} blocks; {})", self.blocks, self.limits)
    }
}

impl GpuPool {
    /// How an `all_reduce` of so many bytes would be carried out on all devices, and why.
    ///
    /// ```
    /// # use gpu_pool::{Algorithm, DType, GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let how = pool.explain(DType::F32, ReduceOp::Sum, 1 << 20);
    /// assert_eq!(how.algorithm, Algorithm::Direct);
    /// println!("{how}"); // Direct, meeting by events: all members have peer access: one kernel each, ..
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn explain(&self, dtype: DType, op: ReduceOp, bytes: usize) -> Explanation {
        let members: Vec<usize> = (0..self.devices()).collect();
        let direct = self.shared.are_direct(&members);
        let (shared, n) = (&self.shared, members.len());
        let limits = shared.limits().of(n);
        let all_reduce = Some((dtype, op));
        let (bulk, sums, packets) = (Some(Bulk::Sums), n > 1, Some(bytes));
        let shape = Shape::AllReduce { len: bytes / dtype.size() };
        let part = push::part(&shape, n).map(|part| part * dtype.size());
        let (whole, captured) = (true, false);
        let case = Case { members: n, direct, all_reduce, bulk, sums, packets, whole, part, bytes, captured };
        let (way, reason) = choose(shared, &case, limits);
        let (algorithm, meets) = match way {
            Way::Direct => (Algorithm::Direct, "events"),
            Way::Spin | Way::Eager => (Algorithm::Direct, "flags"),
            Way::Push if direct => (Algorithm::Direct, "packets"),
            Way::Push | Way::PushTwice => (Algorithm::Staged, "packets"),
            Way::Staged if self.shared.signals.get().is_some_and(|signals| signals.have_stages()) => {
                (Algorithm::Staged, "flags")
            }
            Way::Staged => (Algorithm::Staged, "events"),
            Way::Copies => (Algorithm::Copies, "events"),
            Way::Ring => (Algorithm::Ring, "events"),
            Way::Hosted => (Algorithm::Host, "host threads"),
            Way::RingKernel => (Algorithm::Ring, "flags"),
            Way::Exchange => (Algorithm::Exchange, "flags"),
        };
        let part = shape.largest(n, GRAIN / dtype.size()) * dtype.size();
        let blocks = match way {
            Way::Push => push::pushing(bytes, limits),
            Way::PushTwice => push::pushing(part, limits),
            Way::Eager => push::sending(bytes, limits),
            Way::Direct | Way::Spin => direct::combining(part, n, limits),
            Way::Staged if meets == "flags" => staged::blocks(&shape, n, dtype, limits),
            Way::Hosted => 0,
            Way::RingKernel => ring::cut::blocks(part, limits) as u32,
            Way::Exchange => exchange::kernel::blocks(part, limits) as u32,
            Way::Staged | Way::Copies | Way::Ring => direct::blocks(part),
        };
        Explanation { algorithm, meets, reason, blocks, limits: shared.limits().describe(n) }
    }
}
