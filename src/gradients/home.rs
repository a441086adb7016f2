//! The device and the group that something was made for: it is used only there.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

use crate::error::{Error, Result};
use crate::{Device, Group, collective::GroupKey, memory::DeviceHandle};
use std::sync::Arc;

pub struct Home {
    pub(super) device: Arc<DeviceHandle>,
    members: GroupKey,
}

impl Home {
    pub fn of(group: &Group<'_>) -> Self {
        Home { device: group.device().worker.handle.clone(), members: group.key() }
    }

    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The group, on the stream of `dev`.
    #[track_caller]
    pub fn group<'d>(&self, dev: &'d Device, op: &'static str) -> Result<Group<'d>> {
        match dev.group_by(&self.members)? {
            Some(group) => Ok(group),
            None => {
                let (members, present) = (&self.members, dev.session.gang.members());
                let why = format_args!("it was made by devices {members}, and this gang is of {present:?}");
                Err(Error::invalid(op, why))
            }
        }
    }

    /// The group, if `dev` is the device.
    #[track_caller]
    pub fn here<'d>(&self, dev: &'d Device, op: &'static str) -> Result<Group<'d>> {
        fail_if!(self.device.pool != dev.worker.handle.pool, Error::wrong_pool(op, dev.index()));
        fail_if!(self.device.device != dev.index(), Error::wrong_device(op, self.device.device, dev.index()));
        self.group(dev, op)
    }
}
