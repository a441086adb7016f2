//! The settings of software GPUs and of their machine.

use super::timing::Machine;
use std::sync::Arc;

/// The properties of one software GPU of a [`machine()`](super::machine()).
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Capacity of the device memory in bytes. Host memory behind it is committed only when touched.
    pub memory: u64,
    /// Ordinals of the devices that this device can have peer access to; `None` means all.
    pub peers: Option<Vec<usize>>,
    /// The device's name; `None` means `software GPU`.
    pub name: Option<String>,
    /// Whether the device has stream memory operations ([`write_value`](crate::driver::Driver::write_value),
    /// [`wait_value`](crate::driver::Driver::wait_value)); some GPUs have none.
    pub stream_values: bool,
    /// Whether the device has virtual memory management
    /// ([`vm_granularity`](crate::driver::Driver::vm_granularity)), if the operating system allows it.
    pub virtual_memory: bool,
}

impl Default for HostConfig {
    /// 4 GiB of memory, access to all peers, stream memory operations, virtual memory.
    fn default() -> Self {
        HostConfig { memory: 4 << 30, peers: None, name: None, stream_values: true, virtual_memory: true }
    }
}

/// The order in which the operations of a [`machine()`] run.
///
/// # One operation at a time
/// In every schedule but [`Threaded`](Self::Threaded), one operation runs at a time. The next one is chosen only when
/// the program is quiescent: every device thread of every pool on the machine is blocked (in a wait for a stream or
/// event, for a peer, for its next scope). So the set of candidates does not depend on the speed of threads, and the
/// order is a function of the seed (or of the list, or of virtual time): the same program has the same [`trace()`].
///
/// That holds as long as each device thread's submissions are a function of the data. Host threads are real threads.
/// So the order is *not* a function of the seed for
/// * programs that depend on time: waits with a limit of the program's own, `Instant`, and polls
///   ([`Event::is_complete`] in a loop gets one step for each poll);
/// * device threads that wait for each other by channels, locks or atomics of their own, or that compute for long. They
///   do not count as blocked. The program stays live: after 50 ms (a second, if Linux says that the thread is running)
///   the machine takes a step anyway;
/// * the order in which several threads of the application start their scopes, and words that the host writes without
///   a call;
/// * machines without a pool, used by several threads: the machine takes steps while any thread waits in the driver;
/// * scopes that fail: how far the other members get before they see the failure;
/// * pools of more than 16 devices whose copies are staged: which pair of devices creates its streams first.
///
/// A host function must not wait for a host function of another stream: the two cannot run at the same time.
///
/// [`machine()`]: super::machine()
/// [`trace()`]: super::trace()
/// [`Event::is_complete`]: crate::Event::is_complete
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExecutionOrder {
    /// On several worker threads, as fast as possible.
    #[default]
    Threaded,
    /// One operation at a time, chosen at random from this seed.
    Seeded(u64),
    /// One operation at a time: each step takes the next choice of the list, and choice 0 after the end of the list.
    Replay(Arc<[u32]>),
    /// One operation at a time, in the order of virtual time.
    Virtual,
}

/// Settings of a [`machine()`](super::machine()) as a whole.
#[derive(Clone, Debug, Default)]
pub struct MachineConfig {
    /// The order of operations.
    pub schedule: ExecutionOrder,
    /// Speeds of links and engines, for [`ExecutionOrder::Virtual`].
    pub topology: Option<Arc<dyn Machine>>,
    /// Whether the machine looks for kernels that write to arguments which they declare as read-only.
    pub watch_reads: bool,
    /// Dry run: operations take virtual time, but they are not performed and touch no memory.
    pub dry: bool,
}
