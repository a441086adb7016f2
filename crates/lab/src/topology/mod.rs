//! Models of machines, which need not exist: devices, links, engines, and the cost of operations.
//!
//! # Contract
//!
//! A [`Topology`] describes the parts of a machine and the time of each operation on it. Software GPUs that are built
//! with a topology ([`LabBuilder::topology`](crate::prelude::LabBuilder::topology)) run in *virtual time*: an operation
//! takes the time that the model gives, regardless of the speed of this computer. The same program gives the same times
//! on every run and every computer. Timing events read the virtual clock.
//!
//! * **Times** are microseconds, **bandwidths** GB/s (1e9 bytes per second), sizes bytes.
//! * **Pairs without a link have no peer access**: a device can be given access to another device's memory if there is
//!   a link in both directions ([`Topology::peers`]). The pool stages copies of other pairs through the host, as on
//!   real machines.
//! * **A path** (a link, or the path between a device and host memory) has a latency, its own bandwidth, and *ports*
//!   that it shares with other paths: a switch's uplink, host memory, a network adapter. Each use of a port states the
//!   rate at which the port takes this path's bytes, so one path may load a port more than another.
//! * **Several hosts** ([`HostModel`]): the devices of a host, and its network adapters. Devices of different hosts are
//!   peers over a *rail*: out of the adapter of one, and into the adapter of the other.
//! * [`Topology::validate`] finds invalid machines. It is called when the machine is built and when a file is read.
//!
//! # Costs
//!
//! | operation | waits for and occupies | takes |
//! |---|---|---|
//! | copy | its copy engine, until its bytes are transferred; ports | latency and transfer |
//! | kernel, fill, product, copy within a device | the compute engine, for its work | launch latency and its work |
//! | host function | the device's host thread | `host_function_us` |
//! | wait for an event or a word | nothing | `wait_us`, once it is there |
//!
//! The *transfer* of a copy is the longer of its bytes / bandwidth and the time of its ports. The latency occupies no
//! resource. In two streams the bytes of the next copy follow at once. In one stream each operation starts when the
//! previous one has finished, so the latency counts every time. A port takes the bytes of one operation after the
//! other. If it has enough bandwidth, copies go through it side by side. If not, it is always busy, and the last copy
//! ends at the same time as with fair sharing. The *work* of a kernel is the longer of its bytes / memory bandwidth and
//! its operations / arithmetic rate, divided by the device's speed. Kernels of one device run one after the other: side
//! by side they would share the bandwidth, and the last one would end at the same time.
//!
//! Each call also costs time of its host thread ([`HostCosts`]). An operation does not start before its submission. The
//! threads' own computations, and their waits for each other without the driver, cost nothing.
//!
//! The model has no caches, no changing clock rates, no slow-down of kernels by copies, no launches that are too small
//! to fill a device, and no extra cost for kernels that access a peer's memory.
//!
//! `cargo run --release --example predict` predicts an all-reduce by copy engines, and compares it with measurements:
//! the page "Testing without GPUs" of the book has the picture.
//!
//! # Mechanism
//!
//! [`Topology`] is plain data, made by a preset (`presets`), in code, or from a file (feature `topology-files`). Its
//! `clock` converts it to integers of picoseconds.

mod clock;
#[cfg(feature = "topology-files")]
mod file;
mod hosts;
mod model;
mod presets;
mod show;

pub use hosts::{HostModel, Nic};
pub use model::{CopyEngines, DeviceModel, HostCosts, KernelCost, Link, Path, Use};

use gpu_pool::extend::{
    ErrorInternals,
    lab::{Clock, Machine},
};
use gpu_pool::{Error, Result, error::Site, extend::driver::host::HostConfig, fail_if, setters};
#[cfg(feature = "topology-files")]
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    panic::Location,
};

/// A machine: devices, links, and the costs of operations. See the [module docs](self).
///
/// ```
/// use gpu_pool_lab::Topology;
/// // Eight GPUs on a switch. The last one is half as fast and has a slow link to device 0.
/// let machine = Topology::nvswitch(8)
///     .with_device(7, |device| device.speed = 0.5)
///     .with_link(7, 0, |link| link.path.gbps = 50.0);
/// assert_eq!(machine.len(), 8);
/// assert!(machine.peers(0).contains(&7));
/// println!("{machine}");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(default, deny_unknown_fields))]
pub struct Topology {
    name: String,
    host: HostCosts,
    kernels: BTreeMap<String, KernelCost>,
    devices: Vec<DeviceModel>,
    links: Vec<Link>,
    hosts: Vec<HostModel>,
}

impl Topology {
    /// A machine without devices.
    pub fn new(name: impl Into<String>) -> Self {
        Topology { name: name.into(), ..Topology::default() }
    }

    /// The machine's name.
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

    /// The links, in no particular order.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The costs of calls for host threads.
    pub fn host(&self) -> &HostCosts {
        &self.host
    }

    /// The costs of kernels that do not have the default cost, by name.
    pub fn kernels(&self) -> &BTreeMap<String, KernelCost> {
        &self.kernels
    }

    /// The possible peers of `device`: the devices with a link or a [rail](HostModel) in both directions.
    pub fn peers(&self, device: usize) -> Vec<usize> {
        let network = self.network();
        let is_peer = |&peer: &usize| network.reaches(device, peer) && network.reaches(peer, device);
        (0..self.len()).filter(is_peer).collect()
    }

    /// Checks the machine: at least one device; links between different, existing devices, at most one for each
    /// directed pair; 1 to 1024 copy engines of each kind; bandwidths and speeds above zero; no negative times; each
    /// device on one host, if there are hosts, and a rail or a link between every two devices of different hosts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names the first mistake.
    #[track_caller]
    pub fn validate(&self) -> Result<()> {
        self.validate_at(Location::caller())
    }

    fn validate_at(&self, site: Site) -> Result<()> {
        self.check().map_err(|why| Error::invalid_at(site, "Topology::validate", why))
    }

    fn check(&self) -> Result<(), String> {
        fail_if!(self.devices.is_empty(), "a machine without devices".into());
        for (i, device) in self.devices.iter().enumerate() {
            device.validate().map_err(|why| format!("device {i}: {why}"))?;
        }
        let mut seen = BTreeSet::new();
        for link in &self.links {
            let (from, to, count) = (link.from, link.to, self.len());
            fail_if!(from.max(to) >= count, format!("a link from device {from} to device {to} of {count} devices"));
            fail_if!(from == to, format!("a link from device {from} to itself"));
            fail_if!(!seen.insert((from, to)), format!("two links from device {from} to device {to}"));
            link.validate().map_err(|why| format!("link from device {from} to device {to}: {why}"))?;
        }
        self.validate_hosts()?;
        self.host.validate().map_err(|why| format!("host: {why}"))?;
        let mut kernels = self.kernels.iter();
        kernels.try_for_each(|(name, cost)| cost.validate().map_err(|why| format!("kernel `{name}`: {why}")))
    }
}

setters! { Topology;
    /// Adds a device; it gets the next ordinal.
    pub fn device(self, device: DeviceModel) { self.devices.push(device); }

    /// Adds the link of a directed pair.
    pub fn link(self, link: Link) { self.links.push(link); }

    /// Changes the machine's name.
    pub fn with_name(self, name: impl Into<String>) { self.name = name.into(); }

    /// Changes a device.
    ///
    /// # Panics
    /// When there is no such device.
    #[track_caller]
    pub fn with_device(self, device: usize, change: impl FnOnce(&mut DeviceModel)) {
        let count = self.devices.len();
        change(self.devices.get_mut(device).unwrap_or_else(|| panic!("device {device} of {count}")));
    }

    /// Changes every device.
    pub fn with_devices(self, mut change: impl FnMut(usize, &mut DeviceModel)) {
        self.devices.iter_mut().enumerate().for_each(|(i, device)| change(i, device));
    }

    /// Changes the link of a directed pair.
    ///
    /// # Panics
    /// When there is no such link.
    #[track_caller]
    pub fn with_link(self, from: usize, to: usize, change: impl FnOnce(&mut Link)) {
        let link = self.links.iter_mut().find(|link| (link.from, link.to) == (from, to));
        change(link.unwrap_or_else(|| panic!("there is no link from device {from} to device {to}")));
    }

    /// Changes every link.
    pub fn with_links(self, change: impl FnMut(&mut Link)) { self.links.iter_mut().for_each(change); }

    /// Removes the link of a directed pair, and with it the peer access in both directions.
    pub fn without_link(self, from: usize, to: usize) { self.links.retain(|link| (link.from, link.to) != (from, to)); }

    /// Changes the costs of calls for host threads.
    pub fn with_host(self, change: impl FnOnce(&mut HostCosts)) { change(&mut self.host); }

    /// Sets the cost of the kernels with this name. The default is one transfer for each byte of a read argument, two
    /// for each byte of a written argument, and no arithmetic.
    pub fn with_kernel(self, name: impl Into<String>, cost: KernelCost) { self.kernels.insert(name.into(), cost); }

    /// Changes the hosts: every device is on one of them. Without hosts, all devices are on one host.
    pub fn with_hosts(self, hosts: Vec<HostModel>) { self.hosts = hosts; }
}

impl Topology {
    /// Software GPUs with this machine's memory sizes, names and peer rights.
    pub fn host_configs(&self) -> Vec<HostConfig> {
        let config = |(ordinal, device): (usize, &DeviceModel)| HostConfig {
            memory: device.memory,
            peers: Some(self.peers(ordinal)),
            name: Some(device.name.clone()),
            ..HostConfig::default()
        };
        self.devices().iter().enumerate().map(config).collect()
    }
}

#[doc(hidden)]
impl Machine for Topology {
    fn configs(&self) -> Vec<HostConfig> {
        self.host_configs()
    }

    fn validate(&self, site: Site) -> Result<()> {
        self.validate_at(site)
    }

    fn clock(&self) -> Box<dyn Clock> {
        Box::new(clock::VirtualClock::new(self))
    }
}
