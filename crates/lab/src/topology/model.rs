//! The parts of a machine: plain numbers with public fields.

#[cfg(feature = "topology-files")]
use serde::{Deserialize, Serialize};

/// A device.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(default, deny_unknown_fields))]
pub struct DeviceModel {
    /// The device's name.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// Factor for the speed of kernels: with 0.5 they take twice as long as the other numbers say.
    pub speed: f64,
    /// Bandwidth of the device's own memory, GB/s.
    pub memory_gbps: f64,
    /// Arithmetic rate, 1e9 operations per second.
    pub gflops: f64,
    /// Time from the start of a kernel (or fill, or product) to its first block, microseconds.
    pub launch_us: f64,
    /// Time that a stream needs for a wait after the event's work is complete, microseconds.
    pub wait_us: f64,
    /// Number of copies that can run at the same time.
    pub copy_engines: CopyEngines,
    /// Path from host memory to the device.
    pub up: Path,
    /// Path from the device to host memory.
    pub down: Path,
}

impl Default for DeviceModel {
    /// A device with round figures: 16 GiB, 1000 GB/s, 10 TFLOP/s, 25 GB/s to and from the host.
    fn default() -> Self {
        DeviceModel {
            name: "modelled GPU".into(),
            memory: 16 << 30,
            speed: 1.0,
            memory_gbps: 1000.0,
            gflops: 10_000.0,
            launch_us: 2.0,
            wait_us: 2.0,
            copy_engines: CopyEngines::default(),
            up: Path::new(2.0, 25.0),
            down: Path::new(2.0, 25.0),
        }
    }
}

impl DeviceModel {
    pub(super) fn validate(&self) -> Result<(), String> {
        if self.memory == 0 {
            return Err("no memory".into());
        }
        positive("speed", self.speed)?;
        positive("memory_gbps", self.memory_gbps)?;
        positive("gflops", self.gflops)?;
        time("launch_us", self.launch_us)?;
        time("wait_us", self.wait_us)?;
        let CopyEngines { up, down, peer } = self.copy_engines;
        if [up, down, peer].contains(&0) {
            return Err("a kind of copies without an engine".into());
        }
        if let Some(many) = [up, down, peer].into_iter().find(|&engines| engines > MOST_ENGINES) {
            return Err(format!("{many} engines for a kind of copies: there can be 1 to {MOST_ENGINES}"));
        }
        self.up.validate().map_err(|why| format!("up: {why}"))?;
        self.down.validate().map_err(|why| format!("down: {why}"))
    }
}

/// More than any GPU has. There is a limit because the clock stores a time for each engine.
const MOST_ENGINES: usize = 1024;

/// Number of copy engines of a device, by direction: 1 to 1024 of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(default, deny_unknown_fields))]
pub struct CopyEngines {
    /// For copies from the host.
    pub up: usize,
    /// For copies to the host.
    pub down: usize,
    /// For copies between devices on this device's streams.
    pub peer: usize,
}

impl Default for CopyEngines {
    fn default() -> Self {
        CopyEngines { up: 1, down: 1, peer: 1 }
    }
}

/// A path for the bytes of copies.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(deny_unknown_fields))]
pub struct Path {
    /// Time of a copy that does not depend on its size, microseconds.
    pub latency_us: f64,
    /// Bandwidth of a single copy, GB/s.
    pub gbps: f64,
    /// The ports that it shares with other paths.
    #[cfg_attr(feature = "topology-files", serde(default))]
    pub uses: Vec<Use>,
}

impl Path {
    /// A path without ports.
    pub fn new(latency_us: f64, gbps: f64) -> Self {
        Path { latency_us, gbps, uses: Vec::new() }
    }

    /// Adds a port, which takes this path's bytes at `gbps`.
    pub fn through(mut self, port: impl Into<String>, gbps: f64) -> Self {
        self.uses.push(Use { port: port.into(), gbps });
        self
    }

    fn validate(&self) -> Result<(), String> {
        time("latency_us", self.latency_us)?;
        positive("gbps", self.gbps)?;
        self.uses.iter().try_for_each(|used| positive(&format!("gbps of port `{}`", used.port), used.gbps))
    }
}

/// The use of a port. Paths that name the same port share it.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(deny_unknown_fields))]
pub struct Use {
    /// The port's name.
    pub port: String,
    /// Rate at which the port takes the bytes of this path, GB/s.
    pub gbps: f64,
}

/// The link from one device's memory to another's.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(deny_unknown_fields))]
pub struct Link {
    /// The source device.
    pub from: usize,
    /// The destination device.
    pub to: usize,
    /// Bandwidth of a copy by an engine of the destination device, GB/s, if slower than a copy by the source device.
    #[cfg_attr(feature = "topology-files", serde(default, skip_serializing_if = "Option::is_none"))]
    pub pull_gbps: Option<f64>,
    /// Latency, bandwidth and ports of a copy.
    pub path: Path,
}

impl Link {
    /// A link with the same bandwidth for copies by either device.
    pub fn new(from: usize, to: usize, path: Path) -> Self {
        Link { from, to, pull_gbps: None, path }
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        self.pull_gbps.map_or(Ok(()), |gbps| positive("pull_gbps", gbps))?;
        self.path.validate()
    }
}

/// The costs of calls for the calling host thread, microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(default, deny_unknown_fields))]
pub struct HostCosts {
    /// Submission of a kernel, a fill, a matrix product or a host function.
    pub launch_us: f64,
    /// Submission of a copy.
    pub copy_us: f64,
    /// Recording an event.
    pub record_us: f64,
    /// Making a stream wait for an event.
    pub wait_us: f64,
    /// Making a stream write a word or wait for one.
    pub value_us: f64,
    /// A query of an event or a stream.
    pub query_us: f64,
    /// Time from the end of the awaited work until the waiting thread continues.
    pub wake_us: f64,
    /// Time of a host function in a stream. (Its computation takes no virtual time.)
    pub host_function_us: f64,
}

impl Default for HostCosts {
    /// Costs of one thread on the measured H200 host: see [`Topology::nvswitch`](super::Topology::nvswitch).
    fn default() -> Self {
        super::presets::host_costs(1)
    }
}

impl HostCosts {
    /// Calls cost nothing: only devices and links take time.
    pub const FREE: HostCosts = HostCosts {
        launch_us: 0.0,
        copy_us: 0.0,
        record_us: 0.0,
        wait_us: 0.0,
        value_us: 0.0,
        query_us: 0.0,
        wake_us: 0.0,
        host_function_us: 0.0,
    };

    pub(super) fn validate(&self) -> Result<(), String> {
        let HostCosts { launch_us, copy_us, record_us, wait_us, value_us, query_us, wake_us, host_function_us } = *self;
        time("launch_us", launch_us)?;
        time("copy_us", copy_us)?;
        time("record_us", record_us)?;
        time("wait_us", wait_us)?;
        time("value_us", value_us)?;
        time("query_us", query_us)?;
        time("wake_us", wake_us)?;
        time("host_function_us", host_function_us)
    }
}

/// The cost of the kernels with one name.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(Serialize, Deserialize), serde(default, deny_unknown_fields))]
pub struct KernelCost {
    /// Transfers for each byte of an argument that it reads.
    pub reads: f64,
    /// Transfers for each byte of an argument that it writes: 2 if it reads the byte, too.
    pub writes: f64,
    /// Arithmetic operations of each thread.
    pub operations: f64,
}

impl Default for KernelCost {
    fn default() -> Self {
        KernelCost { reads: 1.0, writes: 2.0, operations: 0.0 }
    }
}

impl KernelCost {
    pub(super) fn validate(&self) -> Result<(), String> {
        time("reads", self.reads)?;
        time("writes", self.writes)?;
        time("operations", self.operations)
    }
}

/// A day, in microseconds. No single cost may be longer, so that a typing error does not overflow sums of picoseconds.
const LONGEST_US: f64 = 86_400e6;

pub(super) fn positive(what: &str, value: f64) -> Result<(), String> {
    // The lower bound keeps bytes / bandwidth within the range of the clock.
    if value.is_finite() && value >= 1e-6 { Ok(()) } else { Err(format!("{what} is {value}: it must be above zero")) }
}

pub(super) fn time(what: &str, value: f64) -> Result<(), String> {
    if (0.0..=LONGEST_US).contains(&value) {
        Ok(())
    } else {
        Err(format!("{what} is {value}: it must be from 0 to {LONGEST_US}"))
    }
}
