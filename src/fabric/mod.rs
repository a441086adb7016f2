//! The state of collectives that needs no [`Device`](crate::Device): descriptors and the mailboxes that carry them, the
//! signal pad, the plans of who moves what, and the limits between algorithms.
//!
//! The device thread owns this state; [`collective`](crate::collective) has the procedures that use it, and `builder/`
//! sets it up. [`processes`] is the door to other processes, [`packing`] how values go there.

pub(crate) mod barrier_state;
pub(crate) mod broadcast;
pub(crate) mod call;
pub(crate) mod compact;
pub(crate) mod descriptor;
pub(crate) mod in_flight;
pub(crate) mod layout;
pub(crate) mod limits;
pub(crate) mod mailbox;
pub(crate) mod membership;
pub(crate) mod packets;
pub(crate) mod packing;
pub(crate) mod parcels;
pub(crate) mod plan;
pub mod processes;
pub(crate) mod signal_pad;
pub(crate) mod tiling;
pub(crate) mod types;

// Other rooms name the items, not the files.
pub(crate) use self::{
    barrier_state::SkippedBarrier,
    broadcast::Broadcasts,
    call::{Call, Origin, ThenNorm},
    compact::CompactDescriptor,
    descriptor::{Area, Descriptor, Exposed, Payload, RecvScratch},
    layout::{BLOCKS, DeviceBarrier, EMPTY, FEW, MOST, PadLayout, Route, STAGED_BLOCKS},
    limits::Limits,
    mailbox::{Body, Endpoint},
    membership::{Across, Membership},
    packets::Packets,
    packing::{Codec, Codecs, Pack, Unpack},
    parcels::{Contents, Label, Parcel},
    plan::{Counts, MOST_BYTES, Pair, Shape, Side, Work},
    processes::{ProcessScope, Processes},
    signal_pad::SignalPad,
    tiling::{GRAIN, Tiling},
    types::{DType, Element, ReduceOp, ReduceOrder},
};
