//! The parts of a machine: plain numbers with public fields.

/// A device.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "topology-files",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct DeviceModel {
    /// What the device calls itself.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// How fast kernels are: 1 is what the other numbers say, 0.5 takes twice as long.
    pub speed: f64,
    /// Bandwidth of the device's own memory, GB/s.
    pub memory_gbps: f64,
    /// Arithmetic rate, 1e9 operations per second.
    pub gflops: f64,
    /// From the start of a kernel (or fill, or product) to its first block, microseconds.
    pub launch_us: f64,
    /// What a stream spends on a wait for an event, once the event's work is done, microseconds.
    pub wait_us: f64,
    /// How many copies can be under way at once.
    pub copy_engines: CopyEngines,
    /// From the host's memory to the device.
    pub up: Path,
    /// From the device to the host's memory.
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

/// More than any GPU has: the clock keeps account of each.
const MOST_ENGINES: usize = 1024;

/// Copy engines of a device, by what they do: 1 to 1024 of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "topology-files",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct CopyEngines {
    /// For copies from the host.
    pub up: usize,
    /// For copies to the host.
    pub down: usize,
    /// For copies between devices that this device's streams ask for.
    pub peer: usize,
}

impl Default for CopyEngines {
    fn default() -> Self {
        CopyEngines { up: 1, down: 1, peer: 1 }
    }
}

/// A way for bytes.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Path {
    /// Microseconds that a copy takes whatever its size.
    pub latency_us: f64,
    /// GB/s of one copy that is alone.
    pub gbps: f64,
    /// What it shares with other paths.
    #[cfg_attr(feature = "topology-files", serde(default))]
    pub uses: Vec<Use>,
}

impl Path {
    /// A path that shares nothing.
    pub fn new(latency_us: f64, gbps: f64) -> Self {
        Path { latency_us, gbps, uses: Vec::new() }
    }

    /// Shares a port, which takes this path's bytes at `gbps`.
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

/// A port that paths share: those that name the same one take turns.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Use {
    /// Its name.
    pub port: String,
    /// How fast it takes the bytes of this path, GB/s.
    pub gbps: f64,
}

/// The way from one device's memory to another's.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "topology-files", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Link {
    /// The device that the bytes come from.
    pub from: usize,
    /// The device that they go to.
    pub to: usize,
    /// GB/s of a copy by an engine of the device that they go to, where that is slower than pushing them.
    #[cfg_attr(feature = "topology-files", serde(default, skip_serializing_if = "Option::is_none"))]
    pub pull_gbps: Option<f64>,
    /// What a copy takes.
    pub path: Path,
}

impl Link {
    /// A link on which pulling is as fast as pushing.
    pub fn new(from: usize, to: usize, path: Path) -> Self {
        Link { from, to, pull_gbps: None, path }
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        self.pull_gbps.map_or(Ok(()), |gbps| positive("pull_gbps", gbps))?;
        self.path.validate()
    }
}

/// What a call costs the host thread that makes it, microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "topology-files",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
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
    /// Asking whether an event or a stream is done.
    pub query_us: f64,
    /// From the end of what a thread waits for to its going on.
    pub wake_us: f64,
    /// What a host function in a stream takes. (What it computes takes no virtual time.)
    pub host_function_us: f64,
}

impl Default for HostCosts {
    /// One thread on the H200 host of this crate's measurements: see [`Topology::nvswitch`](super::Topology::nvswitch).
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

/// What a kernel does, for those of one name.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "topology-files",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct KernelCost {
    /// How often each byte of an argument that it reads moves,
    pub reads: f64,
    /// and each byte of one that it writes: 2 if it reads it, too.
    pub writes: f64,
    /// Operations of each thread of the launch.
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

/// A day, in microseconds: no single cost is longer, so that sums of picoseconds cannot overflow by a typing error.
const LONGEST_US: f64 = 86_400e6;

fn positive(what: &str, value: f64) -> Result<(), String> {
    // The lower bound keeps bytes / bandwidth within what the clock can count.
    if value.is_finite() && value >= 1e-6 { Ok(()) } else { Err(format!("{what} is {value}: it must be above zero")) }
}

fn time(what: &str, value: f64) -> Result<(), String> {
    if (0.0..=LONGEST_US).contains(&value) {
        Ok(())
    } else {
        Err(format!("{what} is {value}: it must be from 0 to {LONGEST_US}"))
    }
}
