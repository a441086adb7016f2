//! Hosts and rails: which devices share a host, and by which network adapter each of them reaches the other hosts.
//!
//! The clock takes all rails ([`Topology::rail`]) beside the links; `peers`, `validate` and `show` ask a [`Network`].

use super::{
    Link, Path, Topology,
    model::{positive, time},
};
#[cfg(feature = "topology-files")]
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// A host of a machine with several: its devices and its network adapters.
///
/// The devices have *local indexes*, in the order in which they are listed. Local index `i` uses adapter `i % n` of the
/// `n` adapters. With as many adapters as devices, each local index has a *rail* of its own, from host to host. With
/// fewer, devices share an adapter, and their copies queue for it.
///
/// A copy from one host to another takes the latencies of both adapters, and the bandwidth of the slower one. It goes
/// from device memory to device memory (GPUDirect RDMA), and occupies two ports, in order: `NIC <n> of host <h>, out`
/// of the sender and `NIC <n> of host <h>, in` of the receiver. Each takes the bytes of one copy after the other, as
/// all ports do. A [`Link`] between two devices of different hosts is used instead of their rail.
///
/// ```
/// use gpu_pool_lab::{Topology, topology::Nic};
/// // Four hosts of eight H200s. Two devices share each of a host's four adapters (400 Gbit/s, 10 us from end to end).
/// let machine = Topology::nvswitch(8).on_hosts(4, &[Nic { latency_us: 5.0, gbps: 50.0 }; 4]);
/// assert_eq!(machine.len(), 32);
/// assert_eq!(machine.hosts()[1].devices, [8, 9, 10, 11, 12, 13, 14, 15]);
/// let rail = machine.rail(0, 8).expect("device 8 is on another host");
/// assert_eq!((rail.path.latency_us, rail.path.gbps), (10.0, 50.0));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(deny_unknown_fields))]
pub struct HostModel {
    /// The devices, by local index.
    pub devices: Vec<usize>,
    /// The network adapters.
    #[cfg_attr(feature = "topology-files", serde(default))]
    pub nics: Vec<Nic>,
}

/// A network adapter. It carries its bandwidth out and in at the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(deny_unknown_fields))]
pub struct Nic {
    /// Time that it adds to each copy, microseconds. A copy passes two adapters.
    pub latency_us: f64,
    /// Bandwidth each way, GB/s.
    pub gbps: f64,
}

impl Topology {
    /// Copies of this machine as several hosts, with these network adapters on each: the devices of host `h` follow
    /// those of host `h - 1`. Ports are each host's own: `host <h>: ` comes before their names. The machine must not
    /// have hosts already; they would be forgotten.
    ///
    /// ```
    /// # use gpu_pool_lab::{Topology, topology::Nic};
    /// let machine = Topology::pcie_tree(1, 1, 2).on_hosts(2, &[Nic { latency_us: 4.0, gbps: 12.5 }]);
    /// assert_eq!(machine.peers(0), [1, 2, 3]);
    /// ```
    pub fn on_hosts(self, hosts: usize, nics: &[Nic]) -> Self {
        let each = self.len();
        let own = |host: usize, path: &Path| {
            let mut path = path.clone();
            path.uses.iter_mut().for_each(|used| used.port = format!("host {host}: {}", used.port));
            path
        };
        let devices = (0..hosts).flat_map(|host| {
            self.devices.iter().map(move |device| {
                let (up, down) = (own(host, &device.up), own(host, &device.down));
                super::DeviceModel { up, down, ..device.clone() }
            })
        });
        let links = (0..hosts).flat_map(|host| {
            self.links.iter().map(move |link| {
                let (from, to) = (host * each + link.from, host * each + link.to);
                Link { from, to, pull_gbps: link.pull_gbps, path: own(host, &link.path) }
            })
        });
        let of = |host: usize| HostModel { devices: (host * each..(host + 1) * each).collect(), nics: nics.to_vec() };
        Topology {
            name: format!("{hosts} hosts of {}", self.name),
            devices: devices.collect(),
            links: links.collect(),
            hosts: (0..hosts).map(of).collect(),
            ..self
        }
    }

    /// The hosts; none if all devices are on one host.
    pub fn hosts(&self) -> &[HostModel] {
        &self.hosts
    }

    /// The path from one device to another over the network: if they are on different hosts, both hosts have adapters,
    /// and there is no link for the pair.
    pub fn rail(&self, from: usize, to: usize) -> Option<Link> {
        self.network().rail(from, to)
    }

    pub(crate) fn rails(&self) -> Vec<Link> {
        let (network, devices) = (self.network(), 0..if self.hosts.is_empty() { 0 } else { self.len() });
        let pairs = devices.clone().flat_map(|from| devices.clone().map(move |to| (from, to)));
        pairs.filter_map(|(from, to)| network.rail(from, to)).collect()
    }

    pub(super) fn network(&self) -> Network<'_> {
        let mut homes = vec![None; self.len()];
        for (at, host) in self.hosts.iter().enumerate() {
            for (local, &device) in host.devices.iter().enumerate() {
                // Invalid machines are shown, too.
                if let Some(home) = homes.get_mut(device) {
                    *home = Some((at, local));
                }
            }
        }
        let linked = self.links.iter().map(|link| (link.from, link.to)).collect();
        Network { hosts: &self.hosts, homes, linked }
    }

    pub(super) fn validate_hosts(&self) -> Result<(), String> {
        if self.hosts.is_empty() {
            return Ok(());
        }
        let mut home = vec![None; self.len()];
        for (at, host) in self.hosts.iter().enumerate() {
            if host.devices.is_empty() {
                return Err(format!("host {at}: no devices"));
            }
            for &device in &host.devices {
                match home.get_mut(device) {
                    None => return Err(format!("host {at}: device {device} of {} devices", self.len())),
                    Some(Some(other)) => return Err(format!("host {at}: device {device} is on host {other}, too")),
                    Some(none) => *none = Some(at),
                }
            }
            for (nic, adapter) in host.nics.iter().enumerate() {
                let named = |why| format!("host {at}: NIC {nic}: {why}");
                time("latency_us", adapter.latency_us).map_err(named)?;
                positive("gbps", adapter.gbps).map_err(named)?;
            }
        }
        if let Some(device) = home.iter().position(Option::is_none) {
            return Err(format!("device {device} is on no host"));
        }
        let network = self.network();
        for (from, a) in home.iter().enumerate() {
            for (to, b) in home.iter().enumerate().filter(|(_, b)| *b != a) {
                if !network.reaches(from, to) {
                    let bare = if a.is_some_and(|a| self.hosts[a].nics.is_empty()) { a } else { b }.unwrap_or_default();
                    return Err(format!("host {bare}: no NIC, and no link from device {from} to device {to}"));
                }
            }
        }
        Ok(())
    }
}

/// The reachable pairs of devices, by a link or over the network.
pub(super) struct Network<'t> {
    hosts: &'t [HostModel],
    homes: Vec<Option<(usize, usize)>>,
    linked: HashSet<(usize, usize)>,
}

/// Where a copy leaves a host or enters one: the host, the number of its adapter, and the adapter.
type Gate = (usize, usize, Nic);

impl Network<'_> {
    pub fn reaches(&self, from: usize, to: usize) -> bool {
        self.linked.contains(&(from, to)) || self.gates(from, to).is_some()
    }

    fn rail(&self, from: usize, to: usize) -> Option<Link> {
        let ((a, out, source), (b, into, target)) = self.gates(from, to)?;
        let path = Path::new(source.latency_us + target.latency_us, source.gbps.min(target.gbps))
            .through(format!("NIC {out} of host {a}, out"), source.gbps)
            .through(format!("NIC {into} of host {b}, in"), target.gbps);
        Some(Link::new(from, to, path))
    }

    fn gates(&self, from: usize, to: usize) -> Option<(Gate, Gate)> {
        let gate = |device: usize| {
            let (host, local) = self.homes.get(device).copied().flatten()?;
            let nics = &self.hosts[host].nics;
            let number = local.checked_rem(nics.len())?;
            Some((host, number, nics[number]))
        };
        let (out, into) = (gate(from)?, gate(to)?);
        (out.0 != into.0 && !self.linked.contains(&(from, to))).then_some((out, into))
    }
}
