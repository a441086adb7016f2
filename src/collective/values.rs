//! Meetings of the hosts alone: `barrier`, and `exchange` of host values.

use super::{Group, face::collectives};
use crate::{
    contain::Contained,
    error::{Error, Result, op_site::OpSite},
    fabric::{Call, CompactDescriptor, Descriptor, Origin, Payload},
};

collectives! {
    /// Meetings on the host.
    errors " `Mismatch`, `Timeout`, `Aborted`.";

    /// Waits on the host until every member has called it. It says nothing about work on the devices.
    fn barrier(&self) -> Result<()> {
        let call = Call::new("barrier");
        if let Some(door) = self.door() {
            return door.barrier(self, &call);
        }
        let meeting = self.meeting();
        let Some(members) = self.membership.packed else {
            return meeting.meet(call, Payload::Nothing, false).map(drop);
        };
        self.dev.not_in_graph(call.op)?;
        self.dev.worker.handle.progress.advance();
        meeting.meet_compact(CompactDescriptor::of_barrier(&call, members), &call, false).map(drop)
    }

    /// Gives a host value to every member and returns all members' values, in rank order. The values are `'static`:
    /// otherwise one device's borrow could be handed to another.
    example {
        /// ```
        /// let pool = gpu_pool::GpuPool::builder().host(3).build()?;
        /// let all = pool.run(|dev, shard| dev.exchange(shard.index() * 10))?;
        /// assert_eq!(all[2], [0, 10, 20]);
        /// # Ok::<(), gpu_pool::Error>(())
        /// ```
    }
    fails " Values of different types are a `Mismatch`, too.";
    fn exchange<T>(&self, value: T) -> Result<Vec<T>>
    where [T: Clone + Send + Sync + 'static]
    {
        self.exchange_from(Origin::default(), value)
    }
}

impl Group<'_> {
    #[track_caller]
    pub(crate) fn exchange_from<T: Clone + Send + Sync + 'static>(&self, origin: Origin, value: T) -> Result<Vec<T>> {
        let _here = OpSite::here("exchange");
        let call = Call::new("exchange").of_type::<T>().from(origin);
        fail_if!(self.across.is_some(), stays(&call, "`exchange_serde` takes values that serde can write"));
        let all = self.meeting().meet(call, Payload::Value(Contained::new(Box::new(value))), false)?;
        Ok(all.iter().map(|descriptor| value_of(descriptor)).collect())
    }
}

/// The error for a value that would have to go to another process.
pub(super) fn stays(call: &Call, hint: &str) -> Error {
    let of = call.of.map_or("the value", |(_, of)| of);
    Error::invalid_at(call.site, call.op, format_args!("{of} cannot go to another process: {hint}"))
}

/// The value of a member.
///
/// # Panics
/// When it is of another type.
pub fn value_of<T: Clone + 'static>(descriptor: &Descriptor) -> T {
    match &descriptor.payload {
        Payload::Value(value) => value.downcast_ref::<T>().cloned().expect("the meeting compared the types"),
        _ => unreachable!("the meeting compared the operations"),
    }
}
