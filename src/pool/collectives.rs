//! Which algorithm a pool's collectives use, for people.

use crate::{
    Algorithm, DType, GpuPool, ReduceOp,
    collective::choose::{Case, Machine, choose},
    fabric::plan::Shape,
};
use std::fmt;

/// The answer of [`GpuPool::explain`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// How the devices meet: in the kernels themselves, in their data, by events of the streams, or by their host
    /// threads.
    pub meets: &'static str,
    /// Why this algorithm.
    pub reason: &'static str,
    /// Number of blocks (of 512 threads) of the kernel, and so of the multiprocessors that it uses. Copy engines need
    /// none: for `Copies`, and for `Ring` by events, it is the number of blocks of the kernels that add up data that
    /// has arrived. `Host` has none.
    pub blocks: u32,
    /// The limits behind the choice, and their source: see [`Builder::tune`](crate::Builder::tune).
    pub limits: String,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, meeting by {}: {}", self.algorithm, self.meets, self.reason)?;
        write!(f, " ({} blocks; {})", self.blocks, self.limits)
    }
}

impl GpuPool {
    /// Which algorithm an `all_reduce` of this many bytes on all devices uses, and why.
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
