//! Collectives: operations that every member of a gang, or of a group of its members, calls together; and values that
//! go to other devices and processes. Their state is in `fabric`, which needs no [`Device`](crate::Device).
//!
//! From the top: `api` has the users' methods; `ops` and `many` help it. Each call fills a `request` and is one `case`,
//! for which `choose` picks an `algorithm`. `execute` carries it out: `scratch` takes memory; `meeting` tells all
//! members this one's call, compares and commits; `barrier` is for kernels that wait for each other on the devices.
//!
//! `world` has the groups that span processes, `across` the door to the code that carries their calls out, `transfer`
//! the trait of values that go there, `lone_pad` sums among processes of one host with one GPU each. `point`,
//! `hand_over` and `values` have elements and values from one device to another, and meetings of the hosts alone.
//! `replay` puts collectives into graphs.

pub(crate) mod across;
pub(crate) mod algorithm;
mod api;
pub(crate) mod barrier;
pub(crate) mod case;
pub(crate) mod choose;
mod execute;
mod face;
pub(crate) mod group;
mod hand_over;
pub(crate) mod in_words;
pub(crate) mod kernels;
pub(crate) mod launch;
pub(crate) mod lone_pad;
mod many;
pub(crate) mod meeting;
pub(crate) mod ops;
pub(crate) mod point;
pub(crate) mod replay;
pub(crate) mod request;
mod scratch;
pub(crate) mod transfer;
pub(crate) mod values;
pub(crate) mod world;

use self::kernels::Entry;

use self::algorithm::{Member, Scratch};
use self::case::{Bulk, KernelBarrier};
use self::kernels::{Arguments, Pairs, Part, Pieces, code, eights, factors};
use self::meeting::{Descriptors, Meeting, commit::LaunchWindow};
use self::request::{Job, RemotePtr, Request};
use self::{across::Outgoing, launch::Combination, ops::between};
pub(crate) use self::{algorithm::MeetBy, case::Machine, kernels::Combine};

pub use crate::{
    driver::route::{PeerReport, Route},
    fabric::{
        packing::{Pack, Unpack},
        types::{Algorithm, DType, Element, ReduceOp, ReduceOrder},
    },
    pool::collectives::{Explanation, Rails},
};
pub(crate) use across::PendingReduce;
pub use across::Registered;
pub use group::Group;
pub use transfer::Transfer;
pub(crate) use world::GroupKey;
