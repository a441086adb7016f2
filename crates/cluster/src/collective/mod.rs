//! Groups whose members are devices of several processes: [`Device::world`] and its parts.
//!
//! Every method of such a group is a *hierarchical call*: inside the process by the collectives of the process's own
//! members, between processes by rails. [`api`](super::api) fills a [`Request`] as ever;
//! [`run_across`](Group::run_across) gives it to the file of its shape:
//!
//! * [`sums`]: all_reduce, reduce, reduce_scatter. [`moves`]: all_gather, broadcast. [`all_to_all`]: it, gather,
//!   scatter. [`values`]: barrier and exchanges of host values.
//! * [`rail_map`], pure: which members a rail joins. [`cut`], pure: which elements it carries, and which of them belong
//!   to which process.
//! * [`messages`]: from one member to one other, of another process. [`message_route`]: how that gets there.
//! * [`hierarchical`]: what a member does in all of them: meetings, staging. [`host_rail`]: what a rail does in the
//!   memory of the hosts, and [`pieces`]: piece by piece, which for gradients another thread does: [`pending`].
//! * [`device_rail`]: what a rail does in the memory of the devices, and [`device_pieces`]: piece by piece; [`native`]:
//!   by the transport's own sums, or else by messages that go by a [`relay`].
//! * [`explain`]: all this, for people. [`registered`]: memory that rails work in without copies.
//!
//! Hierarchies are a floor above [`choose`](super::choose), not rows of its table. A row is what one kernel, or one set
//! of copies, does after one meeting; a hierarchy is several such collectives of a smaller group with messages between
//! them, and each of those collectives goes through `choose` by itself, with its own size. There is one hierarchy for
//! each transport, so nothing is left to choose above.
//!
//! A rail is a local index: the first members of all processes, the second ones, .. There are as many as the process
//! with the fewest members has. Between devices it is an ordinal that all processes have members with.
//!
//! **Bits.** All members hold the same bits, in every run and over every transport that moves bytes. Elements are
//! combined inside each process in the order of ranks, and rounded; then the processes' results in the order of
//! processes, and rounded. So `f16` and `bf16` are rounded twice. An average of `f16` is a sum of parts, each over the
//! number of all members, since the sum inside a process may be out of range where the average is not. The bits depend
//! on how many members each process has, also with [`ReduceOrder::Rank`](crate::collective::ReduceOrder), which fixes
//! the order inside.
//!
//! Invariants (`transport.rs`): what is sent is staged before the member arrives. From the commit to the end of the
//! messages no message depends on the gang, nor on memory that is still to be had.

mod all_to_all;
mod cut;
mod device_pieces;
mod device_rail;
mod explain;
mod hierarchical;
mod host_rail;
#[cfg(test)]
pub(crate) mod loopback;
mod message_route;
pub(super) mod messages;
mod moves;
mod native;
pub(crate) mod pending;
mod pieces;
mod rail_map;
mod registered;
mod relay;
mod sums;
#[cfg(test)]
mod tests;
mod two_hop;
pub(crate) mod values;

pub use registered::Registered;

use super::{Group, meeting, request::Request, transport::Place};
use crate::{
    Device,
    error::{Error, Result},
    fabric::{
        membership::{Across, HostMembers},
        plan::Shape,
    },
};
use hierarchical::HierarchicalCall;
use smallvec::SmallVec;
use std::{cell::Cell, fmt, rc::Rc, sync::Arc};

/// What tells a group from others in any later scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKey {
    /// Ordinals in the pool.
    Local(Box<[usize]>),
    /// Places in the cluster.
    World(Arc<[Place]>),
}

impl GroupKey {
    /// Number of members.
    pub(crate) fn len(&self) -> usize {
        match self {
            GroupKey::Local(ordinals) => ordinals.len(),
            GroupKey::World(places) => places.len(),
        }
    }
}

impl fmt::Display for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupKey::Local(ordinals) => write!(f, "{ordinals:?}"),
            GroupKey::World(places) => write!(f, "{places:?}"),
        }
    }
}

impl Device {
    /// The group of all devices of all processes of the cluster: those of the first process, then those of the second,
    /// and so on. Without a cluster it is the group of all devices of the scope, so a program runs unchanged.
    ///
    /// With the first call in a scope, the scope becomes one of all processes: the n-th such scope of this process
    /// belongs to the n-th of every other one. If a device of it fails, all of them fail, with
    /// [`Error::AbortedByHost`]; and they end together. (Scopes of several threads at once:
    /// [`GpuPool::named`](crate::GpuPool::named).)
    ///
    /// A scope that fails before its first call fails in the other processes, too, if they run the same one: the n-th
    /// that each process begins at that place of the program. Where the processes do not begin the same scopes at each
    /// place, it cannot be known which ones belong together after such a failure. Then they are
    /// [`Error::WorldMismatch`], until two that are the same meet; names do without this.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let world = dev.world()?;
    ///     let mut x = dev.upload(&[world.rank() as f32])?;
    ///     world.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     dev.download(&x)
    /// })?;
    /// assert_eq!(found, [[1.0], [1.0]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// With a cluster: [`Error::InvalidArgument`] in a scope of some devices of the pool only; [`Error::HostLost`],
    /// [`Error::AbortedByHost`].
    #[track_caller]
    pub fn world(&self) -> Result<Group<'_>> {
        let Some(link) = &self.session.world else { return Ok(self.everyone()) };
        let all = link.world.devices().iter().enumerate();
        let places: Vec<_> =
            all.flat_map(|(host, &count)| (0..count).map(move |device| Place { host, device })).collect();
        self.world_group("world", &places)
    }

    /// The group of these places, this device among them.
    #[track_caller]
    fn world_group(&self, op: &'static str, places: &[Place]) -> Result<Group<'_>> {
        let Some(link) = &self.session.world else {
            return Err(Error::invalid(op, "a group of several processes, in a pool without a cluster"));
        };
        let (gang, own) = (&self.session.gang, link.world.host());
        let devices = self.worker.shared.devices();
        if gang.count() != devices {
            let why = format_args!("the scope has {} of the pool's {devices} devices: a world needs all", gang.count());
            return Err(Error::invalid(op, why));
        }
        if link.world.devices().get(own) != Some(&devices) {
            let why = format_args!("the cluster was told of another number of devices than {devices}");
            return Err(Error::invalid(op, why));
        }
        link.join(gang)?;
        let me = Place { host: own, device: self.index() };
        let Some(rank) = places.iter().position(|&place| place == me) else {
            return Err(Error::invalid(
                op,
                format_args!("device {} of host {own}, which asks, is not in it", me.device),
            ));
        };
        let rank_here = |place: &Place| gang.members().iter().position(|&member| member == place.device);
        let here = places.iter().filter(|place| place.host == own);
        let ranks: SmallVec<[usize; 8]> = here.filter_map(rank_here).collect();
        let local = meeting::membership(self, &ranks);
        if ranks.len() == places.len() {
            return Ok(Group { dev: self, membership: local, rank, across: None });
        }
        let across = self.session.groups.look_up_across(places, || across(places, rank, local.clone()));
        Ok(Group { dev: self, membership: local, rank, across: Some(across) })
    }

    /// The group with this key; none unless all of its members of this process are in the gang.
    #[track_caller]
    pub(crate) fn group_by(&self, key: &GroupKey) -> Result<Option<Group<'_>>> {
        match key {
            GroupKey::Local(ordinals) => Ok(self.group_of(ordinals)),
            GroupKey::World(places) => self.world_group("world", places).map(Some),
        }
    }
}

/// The members by process.
fn across(places: &[Place], rank: usize, local: Rc<crate::fabric::membership::Membership>) -> Across {
    let mut numbers: Vec<usize> = places.iter().map(|place| place.host).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let members = |host| HostMembers {
        host,
        ranks: places.iter().enumerate().filter(|(_, place)| place.host == host).map(|(rank, _)| rank).collect(),
    };
    let hosts: Box<[HostMembers]> = numbers.into_iter().map(members).collect();
    let me = hosts.iter().position(|host| host.host == places[rank].host).expect("its own");
    let here = hosts[me].ranks.iter().position(|&at| at == rank).expect("its own");
    Across { places: places.into(), hosts, me, here, local, calls: Cell::new(0) }
}

impl<'d> Group<'d> {
    /// The members with these ranks in this group, which from now on have the ranks 0, 1, .. in this order: as
    /// [`Device::group`], for any group.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let found = pool.run(|dev, _| match dev.rank() {
    ///     0 => Ok(vec![]),
    ///     rank => dev.world()?.group(&[2, 1])?.exchange(rank),
    /// })?;
    /// assert_eq!(found, [vec![], vec![2, 1], vec![2, 1]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a rank is not in the group, is named twice, or this device is not among them.
    #[track_caller]
    pub fn group(&self, ranks: &[usize]) -> Result<Group<'d>> {
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= self.count()) {
            return Err(Error::invalid("group", format_args!("rank {rank} in a group of {}", self.count())));
        }
        match &self.across {
            None => self.dev.group(&ranks.iter().map(|&rank| self.ranks()[rank]).collect::<Vec<_>>()),
            Some(across) => {
                if let Some((at, rank)) = ranks.iter().enumerate().find(|(at, rank)| ranks[..*at].contains(rank)) {
                    return Err(Error::invalid("group", format_args!("rank {rank} is named twice, again at {at}")));
                }
                let places: Vec<_> = ranks.iter().map(|&rank| across.places[rank]).collect();
                self.dev.world_group("group", &places)
            }
        }
    }

    /// Where a member is: the number of its process in the cluster (0 without one), and its ordinal in the pool there.
    ///
    /// # Panics
    /// When there is no such member.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        match &self.across {
            Some(across) => (across.places[rank].host, across.places[rank].device),
            None => (self.dev.session.world.as_ref().map_or(0, |link| link.world.host()), self.ordinal(rank)),
        }
    }

    /// The members of this process, in the order of their ranks.
    pub(crate) fn here(&self) -> Group<'d> {
        match &self.across {
            None => Group { dev: self.dev, membership: self.membership.clone(), rank: self.rank, across: None },
            Some(across) => Group { dev: self.dev, membership: across.local.clone(), rank: across.here, across: None },
        }
    }

    /// Whether it has members of other processes.
    pub(crate) fn spans_processes(&self) -> bool {
        self.across.is_some()
    }

    /// What finds this group again in another scope.
    pub(crate) fn key(&self) -> GroupKey {
        match &self.across {
            None => GroupKey::Local(self.ordinals().into()),
            Some(across) => GroupKey::World(across.places.clone()),
        }
    }

    /// Carries a collective of several processes out.
    #[track_caller]
    pub(super) fn run_across(&self, across: &Across, request: &Request, overlapped: bool) -> Result<()> {
        let hier = HierarchicalCall::new(self, across, &request.call, overlapped)?;
        let shape = match &request.shape {
            Some(shape) => shape,
            None => return all_to_all::by_counts(&hier, request),
        };
        match shape {
            Shape::AllReduce { len } => sums::all_reduce(&hier, request, *len),
            Shape::Reduce { len, root } => sums::reduce_scatter(&hier, request, &hier.all_at(*root, *len), true),
            Shape::ReduceScatter { counts, in_place } => sums::reduce_scatter(&hier, request, counts, *in_place),
            Shape::Broadcast { len, root } => moves::all_gather(&hier, request, &hier.all_at(*root, *len), true),
            Shape::AllGather { counts, in_place } => moves::all_gather(&hier, request, counts, *in_place),
            Shape::Gather { .. } | Shape::Scatter { .. } | Shape::AllToAll { .. } => {
                all_to_all::by_shape(&hier, request, shape)
            }
        }
    }
}
