//! How collectives are carried out.

use super::Builder;
use crate::{Algorithm, ReduceOrder, Tune};

impl Builder {
    /// By which algorithm (default: what is fastest for the operation, its size and the machine). Where the one that is
    /// asked for cannot do an operation, that runs as by default. For tests, and for who knows better.
    ///
    /// ```
    /// # use gpu_pool::{Algorithm, GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).algorithm(Algorithm::Copies).build()?;
    /// let sums = pool.run(|dev, _| {
    ///     let mut x = dev.upload(&[1.5f32])?;
    ///     dev.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     dev.download(&x)
    /// })?;
    /// assert_eq!(sums, [[3.0], [3.0]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// In which order sums are added up. [`ReduceOrder::Rank`] makes the bits of a sum independent of where its terms
    /// stand in a buffer, of the buffer's size and of the algorithm; it keeps `all_reduce` from the ring.
    pub fn reduce_order(mut self, order: ReduceOrder) -> Self {
        self.reduce_order = order;
        self
    }

    /// Where the collectives have their limits from: up to which size they go as packets, how many blocks kernels have.
    /// Default: a table where the crate has one for these GPUs; else GPUs with access to each other's memory are
    /// measured when the pool is built, which takes up to about 100 ms. What was decided,
    /// [`GpuPool::explain`](crate::GpuPool::explain) says. No bit depends on it.
    ///
    /// ```
    /// # use gpu_pool::{DType, GpuPool, ReduceOp, Tune};
    /// let pool = GpuPool::builder().host(2).tune(Tune::Off).build()?;
    /// assert!(pool.explain(DType::F32, ReduceOp::Sum, 1 << 20).limits.starts_with("default"));
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn tune(mut self, tune: Tune) -> Self {
        self.tune = Some(tune);
        self
    }
}
