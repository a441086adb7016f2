//! Collectives: operations that every member of a gang, or of a group of its members, calls together.
//!
//! From the top: [`api`] has the methods that users call; [`ops`] and [`many`] help it. Each call fills a [`request`].
//! [`choose`] picks one of the [`algorithm`]s for it, and [`execute`] carries it out. What they need:
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
mod api;
pub(crate) mod barrier;
pub(crate) mod board;
mod brief;
mod call;
pub(crate) mod choose;
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
