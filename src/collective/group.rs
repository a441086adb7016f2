//! Groups: the members of a gang that run a collective together.

use super::{barrier, kernels::Meet};
use crate::{
    Device,
    error::{Error, Result},
    sync::CommitWord,
};
use smallvec::SmallVec;
use std::{
    cell::{Cell, OnceCell, RefCell},
    hint,
    rc::Rc,
    sync::Arc,
};

/// How often the others look whether the first member has committed, before they do it themselves: some microseconds.
const LEAD_POLLS: usize = 64;

/// Some of a gang's members, in an order that gives them their ranks among themselves. Made by
/// [`Device::group`](crate::Device::group); has the collectives of [`Device`].
///
/// Each member of the group makes it, with the same ranks in the same order; others need not know of it. A device may
/// be in several groups and use them by turns. Collectives of one device are matched in the order of its calls: members
/// that call two groups that they share in different orders get [`Error::Mismatch`](crate::Error::Mismatch).
///
/// ```
/// # use gpu_pool::{GpuPool, ReduceOp};
/// let pool = GpuPool::builder().host(4).build()?;
/// let found = pool.run(|dev, shard| {
///     let mut x = dev.upload(&[shard.index() as f32])?;
///     // Rows and columns of a 2 x 2 grid.
///     let row = dev.group(&[shard.index() / 2 * 2, shard.index() / 2 * 2 + 1])?;
///     row.all_reduce(&mut x, ReduceOp::Sum)?;
///     let column = dev.group(&[shard.index() % 2, shard.index() % 2 + 2])?;
///     column.all_reduce(&mut x, ReduceOp::Max)?;
///     dev.download(&x)
/// })?;
/// assert_eq!(found, [[5.0], [5.0], [5.0], [5.0]]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
pub struct Group<'d> {
    pub(super) dev: &'d Device,
    pub(super) known: Rc<Known>,
    pub(super) rank: usize,
}

crate::sync::device_thread_only! { ['d] Group<'d> }

impl std::fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group {:?}, rank {}", self.ranks(), self.rank)
    }
}

/// A group as one member knows it.
pub(crate) struct Known {
    /// Ranks in the gang, by rank in the group.
    pub(super) ranks: Arc<[usize]>,
    /// Ordinals in the pool, likewise.
    ordinals: Box<[usize]>,
    /// And how many there are: [`Meet::members`], if a message has room for them.
    pub(super) in_short: Option<(u64, u8)>,
    /// Whether all have access to each other's memory.
    pub(super) direct: bool,
    /// Where the group's collectives are committed; none: the gang's own word.
    word: Option<std::sync::Arc<CommitWord>>,
    /// Collectives so far.
    calls: Cell<u64>,
}

/// The groups of a device's part in one scope.
#[derive(Default)]
pub(crate) struct Groups {
    everyone: OnceCell<Rc<Known>>,
    others: RefCell<Vec<Rc<Known>>>,
}

impl Groups {
    fn know(&self, dev: &Device, ranks: &[usize]) -> Rc<Known> {
        let gang = &dev.session.gang;
        let new = |word| {
            let ordinals: Box<[usize]> = ranks.iter().map(|&rank| gang.device(rank)).collect();
            let direct = dev.worker.shared.are_direct(&ordinals);
            let in_short =
                Meet::can_name(&ordinals).then(|| (Meet::members(ordinals.iter().copied()), ranks.len() as u8));
            Rc::new(Known { ranks: ranks.into(), ordinals, in_short, direct, word, calls: Cell::new(0) })
        };
        if ranks.len() == gang.count() && ranks.iter().enumerate().all(|(at, &rank)| at == rank) {
            return self.everyone.get_or_init(|| new(None)).clone();
        }
        let mut others = self.others.borrow_mut();
        if let Some(known) = others.iter().find(|known| *known.ranks == *ranks) {
            return known.clone();
        }
        others.push(new(Some(gang.group(ranks))));
        others.last().expect("just added").clone()
    }
}

impl Device {
    /// The members with these ranks in the gang, which from now on have the ranks 0, 1, .. in this order. Costs nothing
    /// on the other members and needs no meeting.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a rank is not in the gang, is named twice, or this device is not among them.
    #[track_caller]
    pub fn group(&self, ranks: &[usize]) -> Result<Group<'_>> {
        let (count, me) = (self.count(), self.rank());
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= count) {
            return Err(Error::invalid("group", format_args!("rank {rank} in a gang of {count}")));
        }
        if let Some((at, rank)) = ranks.iter().enumerate().find(|(at, rank)| ranks[..*at].contains(rank)) {
            return Err(Error::invalid("group", format_args!("rank {rank} is named twice, again at {at}")));
        }
        let Some(rank) = ranks.iter().position(|&rank| rank == me) else {
            return Err(Error::invalid("group", format_args!("rank {me}, which asks, is not in {ranks:?}")));
        };
        Ok(Group { dev: self, known: self.session.groups.know(self, ranks), rank })
    }

    /// The group of the devices with these ordinals in the pool, ranked in this order, this one among them; none unless
    /// all of them are in the gang.
    pub(crate) fn group_of(&self, ordinals: &[usize]) -> Option<Group<'_>> {
        let members = self.session.gang.members();
        let rank_of = |ordinal: &usize| members.iter().position(|member| member == ordinal);
        let ranks: SmallVec<[usize; 8]> = ordinals.iter().map(rank_of).collect::<Option<_>>()?;
        let rank = ranks.iter().position(|&rank| rank == self.rank())?;
        Some(Group { dev: self, known: self.session.groups.know(self, &ranks), rank })
    }

    /// All members.
    pub(crate) fn everyone(&self) -> Group<'_> {
        let groups = &self.session.groups;
        let known = groups.everyone.get().cloned();
        let known = known.unwrap_or_else(|| groups.know(self, &(0..self.count()).collect::<Vec<_>>()));
        Group { dev: self, known, rank: self.rank() }
    }
}

impl<'d> Group<'d> {
    /// This device's rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many members the group has.
    pub fn count(&self) -> usize {
        self.known.ranks.len()
    }

    /// The device, on the stream that the group's collectives run on.
    pub fn device(&self) -> &'d Device {
        self.dev
    }

    /// The ordinal in the pool of a member.
    pub(crate) fn ordinal(&self, member: usize) -> usize {
        self.known.ordinals[member]
    }

    /// The ordinals in the pool of all members, by rank.
    pub(crate) fn ordinals(&self) -> &[usize] {
        &self.known.ordinals
    }

    /// Members that are not this one, each beginning with another.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.count(), self.rank);
        (1..n).map(move |k| (me + k) % n)
    }

    /// Ranks in the gang, by rank in the group.
    pub(super) fn ranks(&self) -> &Arc<[usize]> {
        &self.known.ranks
    }

    /// Whether it is the whole gang, by rank.
    pub(super) fn is_everyone(&self) -> bool {
        self.known.word.is_none()
    }

    /// Where the group's collectives are committed.
    pub(super) fn word(&self) -> &CommitWord {
        self.known.word.as_deref().unwrap_or(self.dev.session.gang.word())
    }

    /// The number of the group's next collective.
    pub(super) fn next_number(&self) -> u64 {
        self.known.calls.get() + 1
    }

    /// From now on every member carries the next collective through; or none, when the gang has failed first. `spins`:
    /// by a kernel that spins for the others'.
    pub(super) fn commit(&self, spins: bool) -> Result<()> {
        let (word, number) = (self.word(), self.next_number());
        if self.rank > 0 {
            // One of them commits, and mostly the others only see it: a line that all write to goes round from core to
            // core.
            let polls = self.dev.worker.shared.polls.min(LEAD_POLLS);
            (0..polls).take_while(|_| word.committed() < number && !word.is_aborted()).for_each(|_| hint::spin_loop());
        }
        if spins {
            barrier::commit(self, word, number);
        }
        match &self.known.word {
            None => self.dev.session.gang.commit(number)?,
            Some(word) if word.commit(number) => {}
            Some(_) => self.dev.session.gang.check().and(Err(Error::Closed))?,
        }
        // Only what was committed counts: calls that did not match leave no gap.
        self.known.calls.set(number);
        Ok(())
    }
}
