//! What a pool says of its collectives.

use crate::{
    Algorithm, DType, GpuPool, ReduceOp,
    collective::choose::{Case, Machine, choose},
    fabric::plan::Shape,
};
use std::fmt;

/// What [`GpuPool::explain`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// How the devices meet: in the kernels themselves, in their data, by events of the streams, or by their host
    /// threads.
    pub meets: &'static str,
    /// Why this one.
    pub reason: &'static str,
    /// Blocks of 512 threads of the kernel that does it: on how many multiprocessors it is. Copy engines need none; of
    /// `Copies`, and of `Ring` where it goes by events, it is the kernels that add up what has arrived. `Host` has
    /// none.
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
        let (tuned, n) = (self.shared.limits(), members.len());
        let shape = Shape::AllReduce { len: bytes / dtype.size() };
        let group = (n, self.shared.are_direct(&members));
        let case = Case::new((Machine::of(&self.shared), tuned.of(n)), group, (dtype, op), Some(&shape), false);
        let (algorithm, reason) = choose(&case);
        Explanation {
            algorithm: algorithm.group(&case),
            meets: algorithm.waits_by(),
            reason,
            blocks: algorithm.blocks(&case),
            limits: tuned.describe(n),
        }
    }
}
