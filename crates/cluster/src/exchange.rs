//! Exchanges of values that serde can write, in groups of any number of processes.

use crate::runtime::{Call, ErrorInternals, GroupInternals};
use gpu_pool::{Error, Group, Result};
use serde::{Serialize, de::DeserializeOwned};

/// This crate's methods on [`Group`].
pub trait ClusterGroup {
    /// [`exchange`](Group::exchange) of values that also go to other processes, as bytes in the format of the
    /// `postcard` crate. All members give a value, and get those of all, in the order of ranks.
    ///
    /// ```
    /// use gpu_pool::GpuPool;
    /// use gpu_pool_cluster::prelude::*;
    ///
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let all = pool.run(|dev, shard| dev.world()?.exchange_serde(&format!("device {}", shard.index())))?;
    /// assert_eq!(all[0], ["device 0", "device 1"]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`exchange`](Group::exchange); [`Error::InvalidArgument`] for a value that cannot be written or, on the
    /// others, read; with several processes also [`Error::WorldMismatch`], [`Error::HostTimeout`],
    /// [`Error::AbortedByHost`] and [`Error::HostLost`].
    #[track_caller]
    fn exchange_serde<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>>;
}

impl ClusterGroup for Group<'_> {
    #[track_caller]
    fn exchange_serde<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        const OP: &str = "exchange_serde";
        let call = Call::new(OP);
        let site = call.site;
        let bytes = postcard::to_stdvec(value).map_err(|e| Error::invalid_at(site, OP, e))?;
        let all = self.exchange_bytes(&call, bytes)?;
        let value = |(rank, bytes): (usize, &Vec<u8>)| {
            let of = |e| Error::invalid_at(site, OP, format_args!("the value of member {rank}: {e}"));
            postcard::from_bytes(bytes).map_err(of)
        };
        all.iter().enumerate().map(value).collect()
    }
}
