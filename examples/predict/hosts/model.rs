//! The cost model of both ways in closed form: the times of virtual time for any number of hosts, without a run. The
//! tests compare it with runs.
//!
//! `w` is a stream's wait for an event, `n` the number of members, `k = n - 1`. All devices and hosts are alike.
//!
//! * A ring ([`Model::ring`]): each of `2 k` steps is a wait and a copy, half of them with an addition. All members are
//!   in step, so the slowest link sets the pace of all: `2 k (w + copy) + k addition + w`.
//! * Devices that share an adapter take turns. A step then takes the time of all their bytes, if that is longer than
//!   the step of one device.
//! * A reduce-scatter inside a host: every member sends its parts one after the other, waits for those of the others,
//!   and adds them up. If parts are cut, one piece is sent while another is added.
//! * An all-gather inside a host: every member sends its part to all others, one after the other.
//!
//! The calls of the host threads go on beside that; the longer of both counts. A part has 128 bytes at least. So a
//! small buffer gives some members of a ring nothing, the members are not in step, and no formula is short: then
//! [`Model::uneven`] follows the ring step by step.

use super::run::{CALLS, WARM_UP};
use gpu_pool_lab::{Topology, topology::HostCosts};

/// Bytes of the smallest part.
const GRAIN: usize = 128;
/// How the crate cuts the parts of a reduce-scatter: `src/collective/algorithm/exchange_ce.rs`.
const PIECES: usize = 2;
const LEAST: usize = 512 << 10;
const ROOM: usize = 64 << 20;

/// A path of copies: latency in us, bytes per us.
#[derive(Clone, Copy, Debug)]
struct Hop {
    latency: f64,
    rate: f64,
}

impl Hop {
    fn time(self, bytes: f64) -> f64 {
        self.latency + bytes / self.rate
    }
}

/// The numbers of a machine with equal hosts of equal devices.
#[derive(Clone, Debug)]
pub struct Model {
    hosts: usize,
    /// Devices on each host, and how many of them share an adapter.
    each: usize,
    sharing: usize,
    /// A copy inside a host, by the sender's engine and by the receiver's.
    push: Hop,
    pull: Hop,
    rail: Hop,
    wait: f64,
    launch: f64,
    /// Bytes per us of a device's memory.
    memory: f64,
    calls: HostCosts,
}

impl Model {
    /// The model of a machine made by [`Topology::on_hosts`] of a machine whose devices are all linked; none of others.
    pub fn of(machine: &Topology) -> Option<Model> {
        let (host, device) = (machine.hosts().first()?, machine.devices().first()?);
        let each = host.devices.len();
        let inside = machine.links().iter().find(|link| (link.from, link.to) == (0, 1));
        let link = match inside {
            Some(link) => link.clone(),
            None if each == 1 => machine.rail(0, 1)?,
            None => return None,
        };
        let hop = |gbps: f64| Hop { latency: link.path.latency_us, rate: 1e3 * gbps };
        let rail = machine.rail(0, each).map(|rail| Hop { latency: rail.path.latency_us, rate: 1e3 * rail.path.gbps });
        Some(Model {
            hosts: machine.hosts().len(),
            each,
            sharing: each.div_ceil(host.nics.len().max(1)),
            push: hop(link.path.gbps),
            pull: hop(link.pull_gbps.unwrap_or(link.path.gbps)),
            rail: rail.unwrap_or(hop(link.path.gbps)),
            wait: device.wait_us,
            launch: device.launch_us / device.speed,
            memory: 1e3 * device.memory_gbps * device.speed,
            calls: *machine.host(),
        })
    }

    /// Microseconds of the ring over all devices.
    pub fn flat(&self, bytes: usize) -> f64 {
        let members = self.hosts * self.each;
        let crosses = |rank: usize| self.hosts > 1 && rank.is_multiple_of(self.each);
        let hop = |rank: usize| if crosses(rank) { self.rail } else { self.pull };
        self.ring(members, bytes, hop, 1, 0.0).max(self.calls_of_ring(members))
    }

    /// Microseconds of reduce-scatter, rails and all-gather.
    pub fn hierarchy(&self, bytes: usize) -> f64 {
        let part = bytes / self.each;
        let inside = self.reduce_scatter(part) + self.all_gather(part);
        let device = self.ring(self.hosts, part, |_| self.rail, self.sharing, inside);
        device.max(self.calls_of_ring(self.hosts) + self.calls_inside())
    }

    /// The size, to 1 %, from which on the ring over all devices is the faster way. None: it is not faster at the
    /// largest size of the range.
    pub fn crossing(&self, sizes: std::ops::RangeInclusive<usize>) -> Option<usize> {
        let flat_wins = |bytes: usize| self.flat(bytes) < self.hierarchy(bytes);
        let (mut low, mut high) = (*sizes.start(), *sizes.end());
        if !flat_wins(high) {
            return None;
        }
        let unit = GRAIN * self.hosts * self.each;
        while high > low + low / 100 + unit {
            let middle = (((low as f64) * (high as f64)).sqrt() as usize).next_multiple_of(unit);
            if flat_wins(middle) { high = middle } else { low = middle }
        }
        Some(high)
    }

    /// An all-reduce around a ring; in each call each member also does `besides`. `sharing`: the members of so many
    /// rings use one adapter.
    fn ring(&self, n: usize, bytes: usize, hop: impl Fn(usize) -> Hop, sharing: usize, besides: f64) -> f64 {
        if n < 2 {
            return besides;
        }
        if bytes < GRAIN * n {
            return self.uneven(n, bytes, hop, besides);
        }
        let steps = (n - 1) as f64;
        let chunk = bytes.div_ceil(n).next_multiple_of(GRAIN) as f64;
        let (a, b) = (hop(0), hop(1));
        let slowest = if a.time(chunk) > b.time(chunk) { a } else { b };
        let queue = sharing as f64 * chunk / slowest.rate;
        // A member that shares its adapter waits for it at first. Then it comes back when it is free again.
        let pace = |between: f64| queue.max(slowest.time(chunk) + between);
        let (gather, reduce) = (self.wait, self.wait + self.add(chunk, 3.0));
        let ahead = queue - chunk / slowest.rate;
        let late = (pace(gather) - slowest.time(chunk) - gather).min(ahead);
        besides + steps * (pace(reduce) + pace(gather)) + self.wait + ahead - late
    }

    /// A ring in which some members have nothing to send: calls one after another, step by step.
    fn uneven(&self, n: usize, bytes: usize, hop: impl Fn(usize) -> Hop, besides: f64) -> f64 {
        let chunk = |c: usize| GRAIN.min(bytes.saturating_sub(c * GRAIN)) as f64;
        let before = |r: usize| (r + n - 1) % n;
        let last = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
        let (mut times, mut start) = (vec![0.0_f64; n], 0.0);
        for call in 0..WARM_UP + CALLS {
            if call == WARM_UP {
                start = last(&times);
            }
            times.iter_mut().for_each(|time| *time += besides);
            for step in 0..2 * (n - 1) {
                let next = |r: usize| {
                    let ready = times[r].max(times[before(r)]) + self.wait;
                    match chunk((r + 2 * n - 1 - step) % n) {
                        0.0 => ready,
                        bytes if step < n - 1 => ready + hop(r).time(bytes) + self.add(bytes, 3.0),
                        bytes => ready + hop(r).time(bytes),
                    }
                };
                times = (0..n).map(next).collect();
            }
            times = (0..n).map(|r| times[r].max(times[(r + 1) % n]) + self.wait).collect();
        }
        (last(&times) - start) / CALLS as f64
    }

    /// The members send parts to their owners.
    fn reduce_scatter(&self, part: usize) -> f64 {
        let peers = self.each - 1;
        if peers == 0 || part == 0 {
            return 0.0;
        }
        let room = ROOM.max(part.div_ceil(4096) * self.each) / peers / GRAIN * GRAIN;
        let tile = part.div_ceil(PIECES).next_multiple_of(GRAIN).clamp(LEAST.min(room), room);
        let rounds = part.div_ceil(tile);
        let last = (part - (rounds - 1) * tile) as f64;
        let k = peers as f64;
        let send = |bytes: f64| k * self.push.time(bytes);
        // After the arrival of a piece: a wait for each sender, and the sum.
        let sum = |bytes: f64| k * self.wait + self.add(bytes, k + 2.0);
        let whole = if rounds > 1 { tile as f64 } else { last };
        // The first two pieces find empty room. Later ones wait for each owner's.
        let room = |pieces: usize| pieces.saturating_sub(2) as f64 * k * self.wait;
        let sent = (rounds - 1) as f64 * send(whole) + room(rounds) + send(last);
        // The sums before the last one are late if they take longer than the copies, or if the last piece is small.
        let before = (rounds - 1) as f64;
        let slow = send(whole) + before * sum(whole);
        let small = before * send(whole) + room(rounds - 1) + before.min(1.0) * sum(whole);
        (2.0 * k + 2.0) * self.wait + sent.max(slow).max(small) + sum(last)
    }

    /// The members send their parts to all.
    fn all_gather(&self, part: usize) -> f64 {
        let k = (self.each - 1) as f64;
        if k == 0.0 { 0.0 } else { 2.0 * k * self.wait + k * self.push.time(part as f64) }
    }

    /// A kernel that moves its bytes so many times.
    fn add(&self, bytes: f64, times: f64) -> f64 {
        self.launch + times * bytes / self.memory
    }

    /// The calls of a host thread for a ring.
    fn calls_of_ring(&self, n: usize) -> f64 {
        let (steps, calls) = ((n - 1) as f64, &self.calls);
        let pair = calls.wait_us + calls.record_us;
        if n < 2 { 0.0 } else { steps * (2.0 * (pair + calls.copy_us) + calls.launch_us) + pair }
    }

    /// The calls of a host thread for the reduce-scatter and the all-gather, if parts are not cut.
    fn calls_inside(&self) -> f64 {
        let (k, calls) = ((self.each - 1) as f64, &self.calls);
        let per_peer = 2.0 * calls.copy_us + 5.0 * calls.wait_us + calls.record_us;
        if k == 0.0 { 0.0 } else { k * per_peer + calls.launch_us }
    }
}
