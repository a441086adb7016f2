//! Settings of a pool's collectives.

use super::Builder;
use crate::collective::{Algorithm, ReduceOrder};

setters! { Builder;
    /// The algorithm of collectives. Default: the fastest one for the operation, its size and the machine. An operation
    /// that this algorithm cannot do runs by the default. For tests, and for programs that know a better choice.
    ///
    /// ```
    /// # use gpu_pool::{collective::Algorithm, GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).algorithm(Algorithm::Copies).build()?;
    /// let sums = pool.run(|dev, _| {
    ///     let mut x = dev.upload(&[1.5f32])?;
    ///     dev.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     dev.download(&x)
    /// })?;
    /// assert_eq!(sums, [[3.0], [3.0]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn algorithm(self, algorithm: Algorithm) { self.algorithm = Some(algorithm); }

    /// The order in which terms of a sum are added. With [`ReduceOrder::Rank`] the bits of a sum do not depend on the
    /// position of its terms in a buffer, the buffer's size, or the algorithm; `all_reduce` does not use the ring then.
    pub fn reduce_order(self, order: ReduceOrder) { self.reduce_order = order; }

    /// Whether each [`GradientExchange`](crate::gradients::GradientExchange), and so each `DataParallel` of
    /// `gpu-pool-train`, of a group for which that is of use registers its buckets with NCCL, as by
    /// [`Group::register`](crate::Group::register) (default: no). All processes must say the same. Buckets then have
    /// memory of their own from the driver, in units of 2 MiB mostly. Measure it: NCCL's gain depends on the network,
    /// and may be a loss.
    pub fn register_buckets(self, register: bool) { self.register_buckets = Some(register); }
}
