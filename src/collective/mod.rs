//! Collectives: operations that every member of a gang, or of a group of its members, calls together. This room has the
//! procedures; their state is in [`fabric`](crate::fabric), which needs no [`Device`](crate::Device).
//!
//! From the top: [`api`] has the methods that users call; [`ops`] and [`many`] help it, and a [`group`] holds them.
//! Each call fills a [`request`] and is one [`case`], for which [`choose`] picks one of the [`algorithm`]s. [`execute`]
//! carries it out:
//!
//! * [`scratch`] takes the memory that the algorithm needs.
//! * [`meeting`] tells all members what this one calls, and compares. From its commit on all carry the collective out,
//!   or none does.
//! * [`barrier`] has what kernels need that wait for each other on the devices. [`kernels`] has their arguments and the
//!   kernels of software GPUs, and [`launch`] launches them.
//!
//! [`world`] has the groups that span processes, [`across`] the door to what carries their calls out, and [`transfer`]
//! what values need there.
//!
//! [`in_words`] says at which sizes the choice changes.
//!
//! [`replay`] puts collectives into graphs, and runs them from there.

mod across;
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
mod many;
pub(crate) mod meeting;
mod ops;
mod point;
pub(crate) mod replay;
mod request;
mod scratch;
pub(crate) mod transfer;
mod values;
mod world;

pub use across::{AcrossProcesses, Hierarchy, Incoming, Outgoing, PendingReduce, Registered, Registration};
pub use group::Group;
pub use kernels::{Part, fold_on_host};
pub use ops::between;
pub use point::area;
pub use request::Request;
pub use transfer::Transfer;
pub use values::value_of;
pub use world::GroupKey;
