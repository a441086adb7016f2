//! Memory that the library which moves bytes between processes uses directly:
//! [`Group::register`](gpu_pool::Group::register).
//!
//! An all_reduce of a group with one member in each process works in registered memory (`native.rs`). Everything else
//! works in memory that is not registered, or in the library's scratch, which never is. Invariant: memory that a
//! transport knows is given to it only in calls in which all members' is, at one distance from its beginning. So such a
//! call says so where the processes compare their calls ([`HierarchicalCall::meet`]), and what cannot say so goes
//! through scratch ([`HierarchicalCall::is_registered`]).

use super::hierarchical::HierarchicalCall;
use crate::internals::*;
use crate::link::link_of;
use crate::runtime::{Area, BlockRef, Registration};
use crate::traits::{DeviceTransport, Transport};
use gpu_pool::{Group, Result};

pub(super) fn register(group: &Group<'_>, memory: &BlockRef) -> Result<Option<Registration>> {
    let Some(transport) = transport(group) else { return Ok(None) };
    Ok(transport.register(group.device().index(), memory)?.map(|guard| (transport.name(), guard)))
}

/// The transport, if it registers memory and that is of use.
pub(super) fn transport<'d>(group: &Group<'d>) -> Option<&'d dyn DeviceTransport> {
    let (across, world) = (group.across()?, &link_of(group.device()).world);
    let Transport::Device(transport) = world.transport() else { return None };
    let whole = across.hosts.len() == world.devices().len();
    let here = group.device().index();
    let single = across.places.len() == across.hosts.len() && across.places.iter().all(|at| at.device == here);
    (whole && single && transport.registers()).then_some(&**transport)
}

impl HierarchicalCall<'_, '_> {
    pub fn is_registered(&self, area: &Area) -> bool {
        self.registered_at(area).is_some()
    }

    pub fn registered_at(&self, area: &Area) -> Option<u64> {
        match self.link.world.transport() {
            Transport::Device(transport) => transport.registered(self.group.device().index(), area.address),
            _ => None,
        }
    }
}
