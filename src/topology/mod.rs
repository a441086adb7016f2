//! Machines that need not be there: links, engines and what they cost.
//!
//! # Contract
//!
//! A [`Topology`] says what a machine has and how long things take on it; software GPUs that are built with one
//! ([`Builder::topology`](crate::Builder::topology)) run in *virtual time*: an operation takes the time that the model
//! gives it, whatever this computer needs for it. The same program gives the same times on every run and every
//! computer, and timing events read the virtual clock.
//!
//! * **Times** are microseconds, **bandwidths** GB/s (1e9 bytes per second), sizes bytes.
//! * **Pairs without a link have no peer access**: a device may be given access to another one's memory if there is a
//!   link in both directions ([`Topology::peers`]). The pool stages copies of the other pairs through the host, as on
//!   real machines.
//! * **A path** (a link, or the way between a device and the host's memory) has a latency, a bandwidth of its own, and
//!   uses *ports* that it shares with others: a switch's uplink, the memory of the host, a network adapter. Each use
//!   states the rate at which the port takes this path's bytes, so a path may load a port more or less than another.
//! * [`Topology::validate`] finds what cannot be: it is called when the machine is built and when a file is read.
//!
//! # What things cost
//!
//! | operation | waits for and occupies | takes |
//! |---|---|---|
//! | copy | its copy engine, until its bytes are through; ports | latency, and bytes / bandwidth or what its ports need, whichever is longer |
//! | kernel, fill, product, copy within a device | the device's compute engine, for its work | launch latency and its work |
//! | host function | the device's host thread | `host_function_us` |
//! | wait for an event or a word | nothing | `wait_us`, once it is there |
//!
//! The latency occupies nothing: in two streams the next copy's bytes follow at once; in one stream each operation
//! starts when the one before has finished, so there the latency is paid every time. A port takes the bytes that reach
//! it one operation after the other: as long as there is room, copies go through it side by side; when there is too
//! much, it is busy all the time, and the last one ends when it would if they shared it. A kernel's *work* is the
//! longer of its bytes over the memory's bandwidth and its operations over the arithmetic rate, divided by the device's
//! speed. Kernels of one device run one after the other: side by side they would share the same bandwidth, and the last
//! one would end at the same time.
//!
//! Each call also costs the host thread that makes it ([`HostCosts`]); an operation does not start before it has been
//! submitted. What the threads compute themselves, and wait for one another without the driver, costs nothing.
//!
//! What the model leaves out: caches, clocks that change, copies that slow kernels down, launches too small to fill a
//! device, and kernels that reach into a peer's memory (they cost as if it were their own).
//!
//! # A prediction
//!
//! The ring all-reduce by copy engines, and what was measured of it (`cargo run --release --example predict`):
//!
#![doc = include_str!("../../docs/src/plots/predicted_all_reduce.svg")]
//!
//! # Mechanism
//!
//! [`Topology`] is plain data, made by a preset (`presets`), by hand, or read from a file (feature `topology-files`);
//! the clock in [`driver::host`](crate::driver::host) compiles it to integers of picoseconds.

#[cfg(feature = "topology-files")]
mod file;
mod model;
mod presets;
mod show;

pub use model::{CopyEngines, DeviceModel, HostCosts, KernelCost, Link, Path, Use};

use crate::error::{Error, Result};
use std::{
    collections::{BTreeMap, BTreeSet},
    panic::Location,
};

/// A machine: devices, links, and what operations cost. See the [module docs](self).
///
/// ```
/// use gpu_pool::Topology;
/// // Eight GPUs on a switch, of which the last is half as fast and has a slow way to its neighbour.
/// let machine = Topology::nvswitch(8)
///     .with_device(7, |device| device.speed = 0.5)
///     .with_link(7, 0, |link| link.path.gbps = 50.0);
/// assert_eq!(machine.len(), 8);
/// assert!(machine.peers(0).contains(&7));
/// println!("{machine}");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(
    feature = "topology-files",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct Topology {
    name: String,
    host: HostCosts,
    kernels: BTreeMap<String, KernelCost>,
    devices: Vec<DeviceModel>,
    links: Vec<Link>,
}

impl Topology {
    /// A machine without devices yet.
    pub fn new(name: impl Into<String>) -> Self {
        Topology { name: name.into(), ..Topology::default() }
    }

    /// Adds a device; its ordinal is how many there were.
    pub fn device(mut self, device: DeviceModel) -> Self {
        self.devices.push(device);
        self
    }

    /// Adds the link of a directed pair.
    pub fn link(mut self, link: Link) -> Self {
        self.links.push(link);
        self
    }

    /// The same machine under another name.
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Changes a device.
    ///
    /// # Panics
    /// When there is no such device.
    #[track_caller]
    pub fn with_device(mut self, device: usize, change: impl FnOnce(&mut DeviceModel)) -> Self {
        let count = self.devices.len();
        change(self.devices.get_mut(device).unwrap_or_else(|| panic!("device {device} of {count}")));
        self
    }

    /// Changes every device.
    pub fn with_devices(mut self, mut change: impl FnMut(usize, &mut DeviceModel)) -> Self {
        self.devices.iter_mut().enumerate().for_each(|(i, device)| change(i, device));
        self
    }

    /// Changes the link of a directed pair.
    ///
    /// # Panics
    /// When there is no such link.
    #[track_caller]
    pub fn with_link(mut self, from: usize, to: usize, change: impl FnOnce(&mut Link)) -> Self {
        let link = self.links.iter_mut().find(|link| (link.from, link.to) == (from, to));
        change(link.unwrap_or_else(|| panic!("there is no link from device {from} to device {to}")));
        self
    }

    /// Changes every link.
    pub fn with_links(mut self, change: impl FnMut(&mut Link)) -> Self {
        self.links.iter_mut().for_each(change);
        self
    }

    /// Takes the link of a directed pair away, and with it the peer access of both.
    pub fn without_link(mut self, from: usize, to: usize) -> Self {
        self.links.retain(|link| (link.from, link.to) != (from, to));
        self
    }

    /// Changes what calls cost the host.
    pub fn with_host(mut self, change: impl FnOnce(&mut HostCosts)) -> Self {
        change(&mut self.host);
        self
    }

    /// What the kernels of this name cost, where the default (each byte of a read argument once, of a written one
    /// twice, no operations) is wrong.
    pub fn with_kernel(mut self, name: impl Into<String>, cost: KernelCost) -> Self {
        self.kernels.insert(name.into(), cost);
        self
    }

    /// What the machine is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of devices.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Whether there is no device.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// The devices in order.
    pub fn devices(&self) -> &[DeviceModel] {
        &self.devices
    }

    /// The links, in no order that matters.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// What calls cost the host.
    pub fn host(&self) -> &HostCosts {
        &self.host
    }

    /// What kernels cost whose cost is not the default, by name.
    pub fn kernels(&self) -> &BTreeMap<String, KernelCost> {
        &self.kernels
    }

    /// The devices whose memory `device` may be given access to: those with a link there and back.
    pub fn peers(&self, device: usize) -> Vec<usize> {
        let from = |device| move |link: &&Link| link.from == device;
        let back: BTreeSet<_> = self.links.iter().filter(|link| link.to == device).map(|link| link.from).collect();
        let peers: BTreeSet<_> = self.links.iter().filter(from(device)).map(|link| link.to).collect();
        peers.intersection(&back).copied().filter(|&peer| peer < self.len()).collect()
    }

    /// Whether the machine can be: at least one device, links between different devices that are there and at most one
    /// for each directed pair, 1 to 1024 copy engines of each kind, bandwidths and speeds above zero, times not below.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names the first thing that is wrong.
    #[track_caller]
    pub fn validate(&self) -> Result<()> {
        let site = Location::caller();
        let wrong = |why: String| Err(Error::invalid_at(site, "topology", why));
        if self.devices.is_empty() {
            return wrong("a machine without devices".into());
        }
        for (i, device) in self.devices.iter().enumerate() {
            if let Err(why) = device.validate() {
                return wrong(format!("device {i}: {why}"));
            }
        }
        let mut seen = BTreeSet::new();
        for link in &self.links {
            let (from, to) = (link.from, link.to);
            if from.max(to) >= self.len() {
                return wrong(format!("a link from device {from} to device {to} of {} devices", self.len()));
            }
            if from == to {
                return wrong(format!("a link from device {from} to itself"));
            }
            if !seen.insert((from, to)) {
                return wrong(format!("two links from device {from} to device {to}"));
            }
            if let Err(why) = link.validate() {
                return wrong(format!("link from device {from} to device {to}: {why}"));
            }
        }
        if let Err(why) = self.host.validate() {
            return wrong(format!("host: {why}"));
        }
        for (name, cost) in &self.kernels {
            if let Err(why) = cost.validate() {
                return wrong(format!("kernel `{name}`: {why}"));
            }
        }
        Ok(())
    }
}
