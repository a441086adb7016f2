//! Exchanges of values that serde can write, in groups of any number of processes.

use super::super::Group;
use crate::{
    error::{Error, Result},
    fabric::call::Call,
};
use serde::{Serialize, de::DeserializeOwned};

impl Group<'_> {
    /// [`exchange`](Self::exchange) of values that also go to other processes, as bytes in the format of the `postcard`
    /// crate. All members give a value, and get those of all, in the order of ranks.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let all = pool.run(|dev, shard| dev.world()?.exchange_serde(&format!("device {}", shard.index())))?;
    /// assert_eq!(all[0], ["device 0", "device 1"]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange); [`Error::InvalidArgument`] for a value that cannot be written or, on the
    /// others, read; with several processes also [`Error::WorldMismatch`], [`Error::HostTimeout`],
    /// [`Error::AbortedByHost`] and [`Error::HostLost`].
    #[track_caller]
    pub fn exchange_serde<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        const OP: &str = "exchange_serde";
        let call = Call::new(OP);
        let bytes = postcard::to_stdvec(value).map_err(|e| Error::invalid_at(call.site, OP, e))?;
        let all = self.exchange_bytes(&call, bytes)?;
        let value = |(rank, bytes): (usize, &Vec<u8>)| {
            let of = |e| Error::invalid_at(call.site, OP, format_args!("the value of member {rank}: {e}"));
            postcard::from_bytes(bytes).map_err(of)
        };
        all.iter().enumerate().map(value).collect()
    }
}
