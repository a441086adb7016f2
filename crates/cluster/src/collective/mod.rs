//! Groups whose members are devices of several processes: [`Device::world`](gpu_pool::Device::world) and its parts.
//!
//! Every method of such a group is a *hierarchical call*: inside the process by the collectives of the process's own
//! members, between processes by rails. The runtime fills a [`Request`] as ever, and its groups call
//! [`AcrossProcesses`]. [`Hierarchical`], which implements it, gives the request to the file of its shape:
//!
//! * [`plan`]: what members do in sums and in copies to all. [`rail`] carries that out, piece by piece, over the
//!   memory of the hosts ([`host_rail`]), memory that they have in common ([`shared_rail`]), or the devices'
//!   ([`device_rail`]). For gradients another thread carries:
//!   [`pending`]. [`native`]: the transport's own sums. A [`relay`] takes messages of devices that are on no rail.
//! * [`all_to_all`]: it, gather, scatter. [`values`]: barrier and exchanges of host values.
//! * [`rail_map`], pure: which members a rail joins. [`cut`], pure: which elements it carries, and which of them belong
//!   to which process.
//! * [`messages`]: from one member to one other, of another process. [`message_route`]: how that gets there.
//! * [`hierarchical`]: what a member does in all of them: meetings, staging.
//! * [`explain`]: all this, for people. [`registered`]: memory that rails work in without copies. [`lent`]: memory in
//!   which the kernels of several processes work together.
//!
//! Hierarchies stand above the runtime's table of algorithms: each is several collectives of a smaller group, with
//! messages between them. Each of those is chosen by itself, with its own size.
//!
//! A rail is a local index: the first members of all processes, the second ones, .. There are as many as the process
//! with the fewest members has. Between devices it is an ordinal that all processes have members with.
//!
//! **Bits.** All members hold the same bits, in every run and over every transport that moves bytes. Elements are
//! combined inside each process in the order of ranks, and rounded; then the processes' results in their order, and
//! rounded. So `f16` and `bf16` are rounded twice. An average of `f16` is a sum of parts, each over the number of all
//! members, since a process's sum may be out of range where the average is not. The bits depend on how many members
//! each process has, also with [`ReduceOrder::Rank`](gpu_pool::collective::ReduceOrder), which fixes the order inside.
//!
//! Invariants (`traits.rs`): data is staged before the member arrives. From the commit to the end of the messages no
//! message depends on the gang, nor on memory that is still to be had. But the receiver of a member's message has to
//! have memory for it: where it has none, both ends give the message up.

mod all_to_all;
mod cut;
mod device_rail;
mod explain;
mod hierarchical;
mod host_rail;
#[cfg(all(target_os = "linux", not(loom)))]
mod lent;
mod message_route;
pub(super) mod messages;
mod native;
pub(crate) mod pending;
mod plan;
mod rail;
mod rail_map;
mod registered;
mod relay;
mod shared_rail;
mod two_hop;
pub(crate) mod values;

use crate::runtime::{
    AcrossProcesses, BlockRef, Call, Hierarchy, Incoming, Label, LonePad, Outgoing, PendingReduce, Registration,
    Request, Shape,
};
use crate::{internals::*, link::link_of, traits::Transport};
#[cfg(all(target_os = "linux", not(loom)))]
use gpu_pool::DeviceBuffer;
use gpu_pool::{DType, Group, ReduceOp, Result};
use hierarchical::HierarchicalCall;
#[cfg(feature = "extend")]
pub use {device_rail::MOST_PIECES, host_rail::PIECE};

/// The collectives of groups that span processes: the door of the runtime leads here.
pub struct Hierarchical;

impl AcrossProcesses for Hierarchical {
    fn barrier(&self, group: &Group<'_>, call: &Call) -> Result<()> {
        values::barrier(group, call)
    }

    fn exchange(&self, group: &Group<'_>, call: &Call, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        values::exchange(group, call, own)
    }

    fn agree(&self, group: &Group<'_>, call: &Call, text: &str) -> Result<()> {
        values::agree(group, call, text)
    }

    fn run(&self, group: &Group<'_>, request: &Request, overlapped: bool) -> Result<()> {
        let hier = HierarchicalCall::new(group, &request.call, overlapped)?;
        let Some(shape) = &request.shape else { return all_to_all::by_counts(&hier, request) };
        match shape {
            Shape::Gather { .. } | Shape::Scatter { .. } | Shape::AllToAll { .. } => {
                all_to_all::by_shape(&hier, request, shape)
            }
            _ => rail::run(&hier, request, shape),
        }
    }

    fn start(&self, group: &Group<'_>, request: Request, overlapped: bool) -> Result<Option<Box<dyn PendingReduce>>> {
        pending::start(group, request, overlapped)
    }

    fn send(&self, group: &Group<'_>, call: (&Call, Label), message: &Outgoing, to: usize) -> Result<()> {
        messages::send(group, call, message, to)
    }

    fn receive<'g>(
        &self,
        group: &'g Group<'g>,
        call: (&'g Call, Label),
        from: usize,
    ) -> Result<Box<dyn Incoming + 'g>> {
        Ok(Box::new(messages::receive(group, call, from)?))
    }

    fn hierarchy(&self, group: &Group<'_>, of: (DType, ReduceOp), len: usize) -> Result<Hierarchy> {
        explain::hierarchy(group, of, len)
    }

    fn pad<'d>(&self, group: &Group<'d>) -> Option<&'d LonePad> {
        let Transport::Device(transport) = link_of(group.device()).world.transport() else { return None };
        native::pad_of(&**transport, group.across()?).ok()
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn lend(&self, group: &Group<'_>, call: &Call, bytes: usize) -> Result<Option<Vec<DeviceBuffer<u8>>>> {
        lent::lend(group, call, bytes)
    }

    fn registers(&self, group: &Group<'_>) -> bool {
        registered::transport(group).is_some()
    }

    fn register(&self, group: &Group<'_>, memory: &BlockRef) -> Result<Option<Registration>> {
        registered::register(group, memory)
    }
}
