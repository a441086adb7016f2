//! A report of a pool's devices and of the links between them.

use crate::{collective::PeerReport, driver::DeviceInfo};
use std::fmt;

/// A report of a pool's devices, from [`GpuPool::report`](crate::GpuPool::report). Its `Display` is for people.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolReport {
    /// The devices in order.
    pub devices: Vec<DeviceInfo>,
    /// Whether each device has been lost since.
    pub lost: Vec<bool>,
    /// Every ordered pair of devices, by `from * devices + to`.
    pub peers: Vec<PeerReport>,
    /// The sizes from which on collectives of all devices go another way, on GPUs.
    pub collectives: String,
}

impl PoolReport {
    /// How `from` reaches `to`.
    ///
    /// # Panics
    /// When there is no such device.
    #[track_caller]
    pub fn peer(&self, from: usize, to: usize) -> &PeerReport {
        assert!(from.max(to) < self.devices.len(), "{from} -> {to} of {} devices", self.devices.len());
        &self.peers[from * self.devices.len() + to]
    }

    /// Whether several devices are on one GPU ([`Builder::share_gpus`](crate::Builder::share_gpus)).
    pub fn shares_gpus(&self) -> bool {
        (0..self.devices.len()).any(|device| self.first_on(device) != device)
    }

    fn first_on(&self, device: usize) -> usize {
        let uuid = self.devices[device].uuid;
        self.devices.iter().position(|info| info.uuid == uuid).unwrap_or(device)
    }

    /// Nothing for a single device.
    fn fmt_collectives(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.devices.len() > 1 { writeln!(f, "collectives: {}", self.collectives) } else { Ok(()) }
    }
}

impl fmt::Display for PoolReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (info, lost)) in self.devices.iter().zip(&self.lost).enumerate() {
            let gib = info.total_memory as f64 / f64::from(1 << 30);
            let lost = if *lost { ", LOST" } else { "" };
            let bus = if info.pci_bus_id.is_empty() { String::new() } else { format!(" {}", info.pci_bus_id) };
            let first = self.first_on(i);
            let shared = if first == i { String::new() } else { format!(", on the GPU of device {first}") };
            writeln!(f, "device {i}: {}{bus}, {gib:.1} GiB{shared}{lost}", info.name)?;
        }
        let pairs: Vec<&PeerReport> = self.peers.iter().filter(|peer| peer.from != peer.to).collect();
        let same = |p: &&PeerReport| p.route == pairs[0].route && p.note == pairs[0].note && p.latency.is_none();
        if pairs.len() > 1 && pairs.iter().all(same) {
            let note = if pairs[0].note.is_empty() { String::new() } else { format!(" ({})", pairs[0].note) };
            writeln!(f, "all {} ordered pairs: {:?}{note}", pairs.len(), pairs[0].route)?;
            return self.fmt_collectives(f);
        }
        for peer in pairs {
            write!(f, "{} -> {}: {:?}", peer.from, peer.to, peer.route)?;
            if let (Some(latency), Some(rate)) = (peer.latency, peer.gigabytes_per_second) {
                write!(f, ", {:.1} us, {rate:.0} GB/s", latency.as_secs_f64() * 1e6)?;
            }
            if !peer.note.is_empty() {
                write!(f, " ({})", peer.note)?;
            }
            writeln!(f)?;
        }
        self.fmt_collectives(f)
    }
}
