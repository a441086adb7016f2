//! The machine's NUMA nodes: which of them is near a device, how to get memory from it and to run on its CPUs.
//!
//! A copy between a GPU and page-locked memory of the other socket crosses the link between sockets. `cuMemHostAlloc`
//! takes pages from the node of the calling thread, unless its memory policy says otherwise. So the policy is set
//! around the call (`set_mempolicy(2)`). Where that is refused (in containers), memory comes from any node.

use super::DeviceHandle;
use std::{fs, sync::Arc};

/// The nodes that have memory, and the node of each device.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    online: Vec<u32>,
    devices: Vec<usize>,
    /// By device of the pool: the CPUs of its node. Empty where the node is not known, or is the only one.
    cpus: Vec<Vec<u32>>,
    /// True for invented nodes, in tests.
    fake: bool,
}

impl Nodes {
    /// Reads the nodes of this machine. Software GPUs are near no node: a pool of them has one node.
    pub(crate) fn of(handles: &[Arc<DeviceHandle>]) -> Self {
        #[cfg(test)]
        if let Some(nodes) = tests::fake::here() {
            return nodes;
        }
        let ids: Vec<&str> = handles.iter().map(|handle| &*handle.driver.info().pci_bus_id).collect();
        let read = |path: &str| fs::read_to_string(path).ok();
        Self::from(&ids, read)
    }

    fn from(pci_bus_ids: &[&str], read: impl Fn(&str) -> Option<String>) -> Self {
        let mut online = read("/sys/devices/system/node/has_memory")
            .or_else(|| read("/sys/devices/system/node/online"))
            .and_then(|text| list(text.trim()))
            .unwrap_or_default();
        if online.len() < 2 || pci_bus_ids.iter().all(|id| id.is_empty()) {
            online = vec![0];
        }
        let node = |id: &&str| {
            // The file says "-1" where the firmware does not know.
            let path = format!("/sys/bus/pci/devices/{}/numa_node", id.to_ascii_lowercase());
            let node: u32 = read(&path)?.trim().parse().ok()?;
            online.iter().position(|online| *online == node)
        };
        let nodes: Vec<_> = pci_bus_ids.iter().map(node).collect();
        let cpus = |node: &Option<usize>| {
            let node = node.filter(|_| online.len() > 1).map(|node| online[node])?;
            list(read(&format!("/sys/devices/system/node/node{node}/cpulist"))?.trim())
        };
        let cpus = nodes.iter().map(|node| cpus(node).unwrap_or_default()).collect();
        let devices = nodes.into_iter().map(Option::unwrap_or_default).collect();
        Nodes { online, devices, cpus, fake: false }
    }

    pub(crate) fn count(&self) -> usize {
        self.online.len()
    }

    pub(crate) fn of_device(&self, device: usize) -> usize {
        self.devices.get(device).copied().unwrap_or(0)
    }

    /// The CPUs of a device's node on which the calling thread may run. None where it may run on fewer than there are
    /// devices on that node: their threads would wait for each other.
    pub(crate) fn cpus(&self, device: usize) -> Option<Vec<u32>> {
        let near = self.cpus.get(device).filter(|near| !near.is_empty())?;
        let threads = self.cpus.iter().filter(|cpus| *cpus == near).count();
        let allowed = affinity::get()?;
        let cpus: Vec<u32> = near.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
        (cpus.len() >= threads).then_some(cpus)
    }

    pub(crate) fn here(&self) -> usize {
        if self.online.len() == 1 || self.fake {
            return 0;
        }
        current().and_then(|node| self.online.iter().position(|online| *online == node)).unwrap_or(0)
    }

    /// The node to prefer for memory; None where it does not matter.
    pub(crate) fn place(&self, node: usize) -> Option<Node> {
        // The kernel would refuse a node that does not exist.
        (self.online.len() > 1).then(|| Node(if self.fake { 0 } else { self.online[node] }))
    }
}

/// Most nodes, and most CPUs of a node: kernels have at most 1024 nodes, and the system call takes as many CPUs.
const NODES: usize = 1024;

/// Parses a list like `0-1,3`. None if it has more nodes than there can be.
fn list(text: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend((first.parse::<u32>().ok()?..=last.parse().ok()?).take(NODES + 1));
        if all.len() > NODES {
            return None;
        }
    }
    Some(all)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node(u32);

impl Node {
    pub(crate) fn near<R>(self, allocate: impl FnOnce() -> R) -> R {
        let _policy = policy::Preferred::set(self.0);
        allocate()
    }

    /// Touches fresh pages, unless a driver that locks pages has taken them. The bytes are the caller's and hold zeros.
    pub(crate) unsafe fn take(self, at: *mut u8, bytes: usize) {
        self.near(|| {
            for page in (0..bytes).step_by(4096) {
                // SAFETY: within the caller's bytes.
                unsafe { at.add(page).write_volatile(0) };
            }
        });
    }
}

#[cfg(target_os = "linux")]
fn current() -> Option<u32> {
    let (mut cpu, mut node) = (0u32, 0u32);
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: two live words; the third argument has been unused since Linux 2.6.24.
    let result = unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, none) };
    (result == 0).then_some(node)
}

#[cfg(not(target_os = "linux"))]
fn current() -> Option<u32> {
    None
}

/// The CPUs on which the calling thread may run.
pub(crate) mod affinity {
    #[cfg(target_os = "linux")]
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    #[cfg(target_os = "linux")]
    pub fn get() -> Option<Vec<u32>> {
        let allowed = sched_getaffinity(None).ok()?;
        Some((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| cpu as u32).collect())
    }

    /// Threads that this thread starts inherit it. Where it is refused, nothing changes.
    #[cfg(target_os = "linux")]
    pub fn set(cpus: &[u32]) {
        let mut wanted = CpuSet::new();
        cpus.iter().map(|cpu| *cpu as usize).filter(|cpu| *cpu < CpuSet::MAX_CPU).for_each(|cpu| wanted.set(cpu));
        if let Err(error) = sched_setaffinity(None, &wanted) {
            event!(debug, "thread_not_bound", %error, "a device thread is not bound to the CPUs near its device");
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub fn get() -> Option<Vec<u32>> {
        None
    }

    #[cfg(not(target_os = "linux"))]
    pub fn set(_: &[u32]) {}
}

#[cfg(target_os = "linux")]
mod policy {
    //! The calling thread's memory policy.

    use super::NODES;
    use libc::{SYS_get_mempolicy, SYS_set_mempolicy, c_int, c_long, c_ulong, syscall};
    use std::ptr;

    const BITS: usize = c_ulong::BITS as usize;
    type Mask = [c_ulong; NODES / BITS];
    const PREFERRED: c_int = 1;

    /// Until it is dropped, the thread prefers a node; then the old policy is back.
    pub struct Preferred(Option<(c_int, Mask)>);

    impl Preferred {
        pub fn set(node: u32) -> Self {
            let mut wanted: Mask = [0; NODES / BITS];
            let Some(word) = wanted.get_mut(node as usize / BITS) else { return Preferred(None) };
            *word = 1 << (node as usize % BITS);
            let Some(before) = get() else { return Preferred(None) };
            Preferred(put(PREFERRED, &wanted).then_some(before))
        }
    }

    impl Drop for Preferred {
        fn drop(&mut self) {
            if let Some((mode, mask)) = self.0.take() {
                put(mode, &mask);
            }
        }
    }

    pub fn get() -> Option<(c_int, Mask)> {
        let (mut mode, mut mask): (c_int, Mask) = (0, [0; NODES / BITS]);
        // SAFETY: a live word and a live mask of that many bits. Without flags the kernel reads no address.
        let result: c_long = unsafe {
            syscall(SYS_get_mempolicy, &raw mut mode, &raw mut mask, NODES as c_ulong, ptr::null::<u8>(), 0 as c_ulong)
        };
        (result == 0).then_some((mode, mask))
    }

    fn put(mode: c_int, mask: &Mask) -> bool {
        // The kernel uses one bit less than it is told, and accepts no nodes at all with the default policy.
        let (mask, bits) = if mask.iter().all(|word| *word == 0) {
            (ptr::null(), 0)
        } else {
            (ptr::from_ref(mask), NODES as c_ulong + 1)
        };
        // SAFETY: a live mask of that many bits, or none.
        unsafe { syscall(SYS_set_mempolicy, mode as c_long, mask, bits) == 0 }
    }
}

#[cfg(not(target_os = "linux"))]
mod policy {
    //! Without Linux there is no policy to set.

    pub struct Preferred;

    impl Preferred {
        pub fn set(_: u32) -> Self {
            Preferred
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/memory/numa_tests.rs"]
mod tests;
