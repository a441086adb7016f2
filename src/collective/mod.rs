//! Collectives: operations that every member of a gang, or of a group of its members, calls together. This room has the
//! procedures; their state is in [`fabric`](crate::fabric), which needs no [`Device`].
//!
//! From the top: [`device`], [`ops`], [`many`] and [`point`] are the public face: each call fills a [`request`].
//! [`choose`] picks one of the [`algorithm`]s for it, by what [`machine`] says of the pool. [`execute`] carries it out:
//!
//! * [`scratch`] takes the memory that the algorithm needs.
//! * [`meet`] tells all members what this one calls, by [`exchange`], and compares. [`commit`]: from then on all carry
//!   the collective out, or none does.
//! * [`barrier`] has what kernels need that wait for each other on the devices. [`kernels`] has their arguments and the
//!   kernels of software GPUs, and [`launch`] launches them.
//!
//! [`replay`] puts collectives into graphs, and runs them from there.

pub(crate) mod algorithm;
pub(crate) mod barrier;
pub(crate) mod choose;
mod commit;
mod device;
mod exchange;
mod execute;
pub(crate) mod group;
pub(crate) mod kernels;
mod launch;
mod machine;
mod many;
mod meet;
mod ops;
mod point;
pub(crate) mod replay;
mod request;
mod scratch;

pub use group::Group;

use crate::{
    Device,
    contain::Contained,
    error::Result,
    fabric::{
        call::{Call, Origin},
        compact::CompactDescriptor,
        descriptor::{Descriptor, Payload},
    },
};
use std::panic::Location;

/// Meetings on the host.
impl Device {
    /// Waits on the host until every member has called it. It says nothing about work on the devices.
    ///
    /// # Errors
    /// `Mismatch`, `Timeout`, `Aborted`.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.everyone().barrier()
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
        self.everyone().exchange(value)
    }
}

/// As [`Device`](crate::Device)'s, for the members of the group.
impl Group<'_> {
    /// [`Device::barrier`](crate::Device::barrier).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let _here = self.dev.worker.handle.enter("barrier", Location::caller());
        let call = Call::new("barrier");
        let Some(members) = self.membership.packed else { return self.meet(call, Payload::Nothing, false).map(drop) };
        self.dev.not_in_graph(call.op)?;
        self.dev.worker.progress();
        self.meet_compact(CompactDescriptor::of_barrier(&call, members), &call, false).map(drop)
    }

    /// [`Device::exchange`](crate::Device::exchange); the values come by rank in the group.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn exchange<T: Clone + Send + Sync + 'static>(&self, value: T) -> Result<Vec<T>> {
        self.exchange_from(Origin::default(), value)
    }

    /// [`exchange`](Self::exchange) for a given origin. All members give the same.
    #[track_caller]
    pub(crate) fn exchange_from<T: Clone + Send + Sync + 'static>(&self, origin: Origin, value: T) -> Result<Vec<T>> {
        let _here = self.dev.worker.handle.enter("exchange", Location::caller());
        let call = Call::new("exchange").of_type::<T>().from(origin);
        let all = self.meet(call, Payload::Value(Contained::new(Box::new(value))), false)?;
        Ok(all.iter().map(|descriptor| value_of(descriptor)).collect())
    }
}

fn value_of<T: Clone + 'static>(descriptor: &Descriptor) -> T {
    match &descriptor.payload {
        Payload::Value(value) => value.downcast_ref::<T>().cloned().expect("the meeting compared the types"),
        _ => unreachable!("the meeting compared the operations"),
    }
}
