//! What a pool says of its collectives.

use crate::{
    Algorithm, DType, GpuPool, ReduceOp,
    collective::choose::{Case, Way, choose},
};
use std::fmt;

/// What [`GpuPool::explain`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// How the devices meet: in the kernels themselves, in their data, or by events of the streams.
    pub meets: &'static str,
    /// Why this one.
    pub reason: &'static str,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, meeting by {}: {}", self.algorithm, self.meets, self.reason)
    }
}

impl GpuPool {
    /// How an `all_reduce` of so many bytes in place would be carried out on all devices, and why.
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
        let case = Case { members: members.len(), direct, all_reduce: Some((dtype, op)), in_place: true, bytes };
        let (way, reason) = choose(&self.shared, &case);
        let (algorithm, meets) = match way {
            Way::Direct => (Algorithm::Direct, "events"),
            Way::Spin => (Algorithm::Direct, "flags"),
            Way::Push if direct => (Algorithm::Direct, "packets"),
            Way::Push => (Algorithm::Staged, "packets"),
            Way::Staged if self.shared.signals.get().is_some_and(|signals| signals.have_stages()) => {
                (Algorithm::Staged, "flags")
            }
            Way::Staged => (Algorithm::Staged, "events"),
            Way::Copies => (Algorithm::Copies, "events"),
            Way::Ring => (Algorithm::Ring, "events"),
        };
        Explanation { algorithm, meets, reason }
    }
}
