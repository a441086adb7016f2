//! Placement: which job begins next, and on which devices. Plain data without threads and without a clock.
//!
//! The engine holds a [`Table`] under its lock and asks it after each change. The rules, in this order:
//!
//! 1. A job that is *due* comes first. The n-th job is due when [`AGE`] jobs more than the n before it have left the
//!    queue. While it waits, nothing else begins on the devices that it needs. So no job waits for ever.
//! 2. Higher priorities first; among equals more devices, then more memory, then the earlier job.
//! 3. A job that does not fit now does not stop those behind it (backfill), unless it is a gang at the head.
//! 4. A job takes the device with the fewest jobs in flight. The preferred device decides ties; and among jobs of equal
//!    rank, one that prefers the device goes first.
//! 5. A device with work takes a further job only while the queue has a job for each device: the last jobs go to the
//!    device that is free first.

use smallvec::SmallVec;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
};

/// So many jobs may overtake a job before it is due. From then on others begin on other devices only.
pub(super) const AGE: u64 = 64;
/// So many jobs of equal rank are looked at for one that prefers the device.
const PEERS: usize = 8;

#[derive(Clone, Debug)]
pub(super) struct Need {
    pub bytes: u64,
    pub gpus: usize,
    /// The only devices that it may run on.
    pub among: Option<Box<[usize]>>,
    pub prefer: Option<usize>,
    pub priority: i32,
}

impl Default for Need {
    fn default() -> Self {
        Need { bytes: 0, gpus: 1, among: None, prefer: None, priority: 0 }
    }
}

pub(super) type Devices = SmallVec<[usize; 2]>;

pub(super) struct Start<J> {
    pub rank: Rank,
    pub devices: Devices,
    pub need: Need,
    pub job: J,
}

/// Why the first job of the queue does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Waits {
    /// No device that it may run on takes a job now.
    Device,
    /// A device would take it, but has too little memory that is not booked.
    Memory,
    /// Too few of its devices are idle at the same time.
    Gang,
}

#[derive(Default)]
struct Place {
    capacity: u64,
    resident: u64,
    booked: u64,
    flying: usize,
    busy: bool,
    gang: bool,
    lost: bool,
}

impl Place {
    fn fits(&self, bytes: u64) -> bool {
        let free = self.capacity.saturating_sub(self.resident).saturating_sub(self.booked);
        bytes <= self.capacity && (self.flying == 0 || bytes.max(1) <= free)
    }
}

/// A job's place in the queue: the smallest one is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    priority: Reverse<i32>,
    gpus: Reverse<u32>,
    pub bytes: Reverse<u64>,
    pub seq: u64,
}

impl Rank {
    fn is_peer(&self, other: &Rank) -> bool {
        (self.priority, self.gpus, self.bytes) == (other.priority, other.gpus, other.bytes)
    }
}

struct Where {
    among: Option<Box<[usize]>>,
    prefer: Option<usize>,
}

/// A job's needs in the table: small, since a queue may be long.
struct Queued<J> {
    at: Option<Box<Where>>,
    job: J,
}

#[derive(Clone, Copy)]
struct Wants<'n> {
    bytes: u64,
    gpus: usize,
    among: Option<&'n [usize]>,
    prefer: Option<usize>,
}

impl Wants<'_> {
    fn allows(&self, device: usize) -> bool {
        self.among.is_none_or(|among| among.contains(&device))
    }
}

impl Need {
    fn wants(&self) -> Wants<'_> {
        let Need { bytes, gpus, ref among, prefer, .. } = *self;
        Wants { bytes, gpus, among: among.as_deref(), prefer }
    }
}

pub(super) struct Table<J> {
    places: Vec<Place>,
    queue: BTreeMap<Rank, Queued<J>>,
    /// In the order of their numbers; some have left the queue.
    oldest: VecDeque<Rank>,
    overlap: usize,
    submitted: u64,
    left: u64,
}

impl<J> Table<J> {
    /// Devices with so much memory each, of which each may have `overlap` jobs in flight beside the one that begins.
    pub fn new(capacities: impl IntoIterator<Item = u64>, overlap: usize) -> Self {
        let place = |capacity| Place { capacity, ..Place::default() };
        let places = capacities.into_iter().map(place).collect();
        Table { places, queue: BTreeMap::new(), oldest: VecDeque::new(), overlap, submitted: 0, left: 0 }
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn holds(&self, rank: Rank) -> bool {
        self.queue.contains_key(&rank)
    }

    fn wants(&self, rank: &Rank) -> Wants<'_> {
        let at = self.queue[rank].at.as_deref();
        let (among, prefer) = at.map_or((None, None), |at| (at.among.as_deref(), at.prefer));
        Wants { bytes: rank.bytes.0, gpus: rank.gpus.0 as usize, among, prefer }
    }

    fn alive(&self) -> impl Iterator<Item = usize> {
        (0..self.places.len()).filter(|&device| !self.places[device].lost)
    }

    pub fn has_lost_all(&self) -> bool {
        self.alive().next().is_none()
    }

    /// Why no device, or too few, can ever run the job.
    pub fn refusal(&self, need: &Need) -> Option<String> {
        self.refuses(need.wants())
    }

    fn refuses(&self, need: Wants<'_>) -> Option<String> {
        let allowed: Devices = self.alive().filter(|&device| need.allows(device)).collect();
        let largest = allowed.iter().map(|&device| self.places[device].capacity).max().unwrap_or(0);
        let large = allowed.iter().filter(|&&device| self.places[device].capacity >= need.bytes).count();
        let (gpus, bytes) = (need.gpus, need.bytes);
        if gpus == 0 {
            Some("a job on 0 devices".to_owned())
        } else if allowed.len() < gpus {
            let (alive, all) = (allowed.len(), self.places.len());
            Some(format!("a job on {gpus} of {alive} devices that it may use (the pool has {all})"))
        } else if large < gpus {
            Some(format!("{bytes} bytes on {gpus} of {} devices; the largest limit is {largest} bytes", allowed.len()))
        } else {
            None
        }
    }

    /// Adds a job at the end. Returns its place.
    pub fn add(&mut self, need: Need, job: J) -> Rank {
        let seq = self.submitted;
        self.submitted += 1;
        self.insert(seq, need, job)
    }

    pub fn put_back(&mut self, rank: Rank, need: Need, job: J) {
        self.left -= 1;
        self.insert(rank.seq, need, job);
    }

    fn insert(&mut self, seq: u64, need: Need, job: J) -> Rank {
        let Need { bytes, gpus, among, prefer, priority } = need;
        // More devices than that were refused.
        let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
        let rank = Rank { priority: Reverse(priority), gpus: Reverse(gpus), bytes: Reverse(bytes), seq };
        let at = (among.is_some() || prefer.is_some()).then(|| Box::new(Where { among, prefer }));
        self.queue.insert(rank, Queued { at, job });
        match self.oldest.back() {
            Some(last) if last.seq >= seq => {
                if let Err(i) = self.oldest.binary_search_by_key(&seq, |rank| rank.seq) {
                    self.oldest.insert(i, rank);
                }
            }
            _ => self.oldest.push_back(rank),
        }
        rank
    }

    pub fn remove(&mut self, rank: Rank) -> Option<(Need, J)> {
        let Queued { at, job } = self.queue.remove(&rank)?;
        self.left += 1;
        while self.oldest.front().is_some_and(|oldest| !self.queue.contains_key(oldest)) {
            self.oldest.pop_front();
        }
        if self.oldest.len() > 2 * self.queue.len() + AGE as usize {
            let queue = &self.queue;
            self.oldest.retain(|rank| queue.contains_key(rank));
        }
        let (among, prefer) = at.map_or((None, None), |at| (at.among, at.prefer));
        let (bytes, gpus, priority) = (rank.bytes.0, rank.gpus.0 as usize, rank.priority.0);
        Some((Need { bytes, gpus, among, prefer, priority }, job))
    }

    pub fn remove_all(&mut self) -> Vec<J> {
        self.left += self.queue.len() as u64;
        self.oldest.clear();
        std::mem::take(&mut self.queue).into_values().map(|queued| queued.job).collect()
    }

    /// The job that is due, if there is one: the oldest, which is always the first of its list.
    fn due(&self) -> Option<Rank> {
        self.oldest.front().copied().filter(|rank| self.left >= rank.seq + AGE)
    }

    fn has_slot(&self, device: usize) -> bool {
        let place = &self.places[device];
        !place.lost && !place.busy && !place.gang && place.flying <= self.overlap
    }

    pub fn next(&mut self) -> Option<Start<J>> {
        if self.queue.is_empty() || !(0..self.places.len()).any(|device| self.has_slot(device)) {
            return None;
        }
        let due = self.due();
        let mut held = Devices::new();
        let others = self.queue.keys().filter(|rank| Some(**rank) != due);
        let mut found = None;
        for (i, rank) in due.iter().chain(others).enumerate() {
            let need = self.wants(rank);
            if let Some(devices) = self.fit(need, &held) {
                found = Some((self.at_home(*rank, &devices, due), devices));
                break;
            }
            if Some(*rank) == due || i == 0 && need.gpus > 1 {
                held.extend(self.nearest(need));
                if !(0..self.places.len()).any(|device| self.has_slot(device) && !held.contains(&device)) {
                    break;
                }
            }
        }
        let (rank, devices) = found?;
        let (need, job) = self.remove(rank)?;
        for &device in &devices {
            let place = &mut self.places[device];
            place.flying += 1;
            place.booked += need.bytes;
            place.busy = true;
            place.gang = need.gpus > 1;
        }
        Some(Start { rank, devices, need, job })
    }

    fn fit(&self, need: Wants<'_>, held: &[usize]) -> Option<Devices> {
        let free = |device: &usize| self.has_slot(*device) && need.allows(*device) && !held.contains(device);
        let last = |device: usize| Some(device) != need.prefer;
        if need.gpus == 1 {
            let further = need.among.is_some_and(|among| among.len() == 1) || self.queue.len() >= self.alive().count();
            let fits = |device: &usize| {
                let place = &self.places[*device];
                place.fits(need.bytes) && (place.flying == 0 || further)
            };
            let best = (0..self.places.len()).filter(free).filter(fits);
            let best = best.min_by_key(|&device| (self.places[device].flying, last(device), device))?;
            return Some(SmallVec::from_slice(&[best]));
        }
        let idle = |device: &usize| self.places[*device].flying == 0 && self.places[*device].fits(need.bytes);
        let mut devices: Devices = (0..self.places.len()).filter(free).filter(idle).collect();
        devices.sort_by_key(|&device| (last(device), device));
        (devices.len() >= need.gpus).then(|| {
            devices.truncate(need.gpus);
            devices.sort_unstable();
            devices
        })
    }

    /// Of the jobs of one rank, one that prefers the device.
    fn at_home(&self, rank: Rank, devices: &[usize], due: Option<Rank>) -> Rank {
        let &[device] = devices else { return rank };
        if Some(rank) == due || self.wants(&rank).prefer == Some(device) {
            return rank;
        }
        let peers = self.queue.range(rank..).map(|(peer, _)| peer).take(PEERS).take_while(|peer| peer.is_peer(&rank));
        let home = |peer: &&Rank| {
            let wants = self.wants(peer);
            wants.prefer == Some(device) && wants.allows(device)
        };
        peers.filter(home).copied().next().unwrap_or(rank)
    }

    /// The devices that a job which waits will have first.
    fn nearest(&self, need: Wants<'_>) -> Devices {
        let may = |device: &usize| need.allows(*device) && self.places[*device].capacity >= need.bytes;
        let mut devices: Devices = self.alive().filter(may).collect();
        devices.sort_by_key(|&device| {
            let place = &self.places[device];
            let free = place.capacity.saturating_sub(place.resident).saturating_sub(place.booked);
            match need.gpus {
                1 => (Reverse(free), place.flying, device),
                _ => (Reverse(0), place.flying, device),
            }
        });
        devices.truncate(need.gpus);
        devices
    }

    /// The closure of a device's job has ended: its thread is free.
    pub fn thread_is_free(&mut self, device: usize) {
        self.places[device].busy = false;
    }

    /// A job of a device is over, with all of its work.
    pub fn over(&mut self, device: usize, bytes: u64) {
        let place = &mut self.places[device];
        place.flying -= 1;
        place.booked -= bytes;
        place.gang = false;
    }

    /// A device on which no job's work is in flight holds so many bytes.
    pub fn set_resident(&mut self, device: usize, bytes: u64) {
        self.places[device].resident = bytes;
    }

    /// A device is lost. Returns the jobs that no device can run any more.
    pub fn lose(&mut self, device: usize) -> Vec<J> {
        self.places[device].lost = true;
        let hopeless = self.queue.keys().filter(|rank| self.refuses(self.wants(rank)).is_some());
        let hopeless: Vec<Rank> = hopeless.copied().collect();
        hopeless.into_iter().filter_map(|rank| self.remove(rank)).map(|(_, job)| job).collect()
    }

    pub fn is_lost(&self, device: usize) -> bool {
        self.places[device].lost
    }

    pub fn memory(&self, device: usize) -> (u64, u64) {
        (self.places[device].booked, self.places[device].capacity)
    }

    pub fn flying(&self, device: usize) -> usize {
        self.places[device].flying
    }

    pub fn why(&self) -> Option<Waits> {
        let first = self.due().or_else(|| self.queue.keys().next().copied())?;
        let need = self.wants(&first);
        let small =
            |device: usize| self.has_slot(device) && need.allows(device) && !self.places[device].fits(need.bytes);
        Some(match need.gpus {
            1 if (0..self.places.len()).any(small) => Waits::Memory,
            1 => Waits::Device,
            _ => Waits::Gang,
        })
    }
}

#[cfg(test)]
#[path = "../../tests/unit/jobs/placement_tests.rs"]
mod tests;
