//! Collectives: operations that every member of a gang, or of a group of its members, calls together.
//!
//! From the top: [`device`], [`ops`] and [`many`] are the public face: each call fills a [`request`]. [`choose`] picks
//! one of the [`algorithm`]s for it, and [`execute`] carries it out. What they need:
//!
//! * [`board`]: the meeting. Each member tells each other what it calls, through lock-free rings; nothing runs before
//!   all have arrived and match, and commit or abort is one compare-and-swap for all. [`brief`]: the same in few bytes,
//!   and [`headlines`]: in one line for all ([`names`] are what few bytes are about). [`talk`]: who tells whom, and
//!   wakes whom.
//! * [`plan`]: which part of a collective a member does, on whose memory; [`packets`]: what it sends to each when it
//!   sends all.
//! * [`stage`]: the plan where everything crosses through the host's memory.
//! * [`barrier`]: kernels that wait for each other on the devices, over the memory of [`signals`]. [`scratch`]: what
//!   peers fill.
//! * [`tuner`]: from which size on which algorithm, and how many blocks.
//! * [`kernels`]: the kernels, with their host kernels. [`launch`]: their launches.
//!
//! [`replay`]: how collectives get into graphs, and run from there.
//! [`point`] has what goes from one device to one other.

mod algorithm;
pub(crate) mod barrier;
pub(crate) mod board;
mod brief;
mod call;
pub(crate) mod choose;
mod device;
mod execute;
pub(crate) mod group;
pub(crate) mod headlines;
pub(crate) mod kernels;
mod launch;
mod many;
mod names;
mod ops;
mod packets;
pub(crate) mod plan;
mod point;
pub(crate) mod replay;
mod request;
pub(crate) mod scratch;
pub(crate) mod signals;
mod stage;
mod talk;
pub(crate) mod tuner;
mod types;

pub(crate) use call::Origin;
pub use group::Group;
pub use tuner::Tune;
pub use types::{Algorithm, DType, Element, ReduceOp, ReduceOrder};

use crate::{Device, contain::Contained, error::Result};
use board::{Notice, Payload};
use brief::Brief;
use call::Call;
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
        let Some(members) = self.known.in_short else { return self.meet(call, Payload::Nothing, false).map(drop) };
        self.dev.not_in_graph(call.op)?;
        self.dev.worker.progress();
        self.meet_briefly(Brief::of_barrier(&call, members), &call, false).map(drop)
    }

    /// [`Device::exchange`](crate::Device::exchange); the values come by rank in the group.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn exchange<T: Clone + Send + Sync + 'static>(&self, value: T) -> Result<Vec<T>> {
        self.exchange_from(Origin::default(), value)
    }

    /// The same, of those who say that it is for this.
    #[track_caller]
    pub(crate) fn exchange_from<T: Clone + Send + Sync + 'static>(&self, origin: Origin, value: T) -> Result<Vec<T>> {
        let _here = self.dev.worker.handle.enter("exchange", Location::caller());
        let call = Call::new("exchange").of_type::<T>().from(origin);
        let all = self.meet(call, Payload::Value(Contained::new(Box::new(value))), false)?;
        Ok(all.iter().map(|notice| value_of(notice)).collect())
    }
}

fn value_of<T: Clone + 'static>(notice: &Notice) -> T {
    match &notice.payload {
        Payload::Value(value) => value.downcast_ref::<T>().cloned().expect("the meeting compared the types"),
        _ => unreachable!("the meeting compared the operations"),
    }
}
