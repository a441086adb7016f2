//! The machine's NUMA nodes: which of them a device is near to, and how to get memory there.
//!
//! A copy between a GPU and page-locked memory of the other socket crosses the link between the sockets, which it
//! shares with everything else. `cuMemHostAlloc` takes pages for the thread that calls it, like any allocation of Linux
//! does: from the node that the thread runs on, unless its memory policy says otherwise. So the policy is set around
//! the call (`set_mempolicy(2)`), which is what `numactl --preferred` does for a whole process. Where that is refused
//! (containers do) memory is taken as it comes.

use super::handle::DeviceHandle;
use std::{fs, sync::Arc};

/// The nodes that have memory, and each device's.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    /// The kernel's numbers.
    online: Vec<u32>,
    /// By device of the pool: its place in `online`.
    devices: Vec<usize>,
    /// Not those of this machine.
    fake: bool,
}

impl Nodes {
    /// What the machine says of itself. Software GPUs are near to nothing: for them alone there is one node.
    pub(crate) fn of(handles: &[Arc<DeviceHandle>]) -> Self {
        #[cfg(test)]
        if let Some(nodes) = fake::here() {
            return nodes;
        }
        let ids: Vec<&str> = handles.iter().map(|handle| &*handle.driver.info().pci_bus_id).collect();
        let read = |path: &str| fs::read_to_string(path).ok();
        Self::from(&ids, read)
    }

    /// The same of any machine; `read` reads its files.
    fn from(pci_bus_ids: &[&str], read: impl Fn(&str) -> Option<String>) -> Self {
        let mut online = read("/sys/devices/system/node/has_memory")
            .or_else(|| read("/sys/devices/system/node/online"))
            .and_then(|text| list(text.trim()))
            .unwrap_or_default();
        if online.len() < 2 || pci_bus_ids.iter().all(|id| id.is_empty()) {
            online = vec![0];
        }
        let node = |id: &&str| {
            // "-1" where the firmware does not say.
            let path = format!("/sys/bus/pci/devices/{}/numa_node", id.to_ascii_lowercase());
            let node: u32 = read(&path)?.trim().parse().ok()?;
            online.iter().position(|online| *online == node)
        };
        let devices = pci_bus_ids.iter().map(|id| node(id).unwrap_or(0)).collect();
        Nodes { online, devices, fake: false }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.online.len()
    }

    /// The one that a device is near to.
    pub(crate) fn of_device(&self, device: usize) -> usize {
        self.devices.get(device).copied().unwrap_or(0)
    }

    /// The one that the calling thread runs on at the moment.
    pub(crate) fn here(&self) -> usize {
        if self.online.len() == 1 || self.fake {
            return 0;
        }
        current().and_then(|node| self.online.iter().position(|online| *online == node)).unwrap_or(0)
    }

    /// Where a node's memory is to come from; none where it does not matter.
    pub(crate) fn place(&self, node: usize) -> Option<Node> {
        // A node that is not there would be refused.
        (self.online.len() > 1).then(|| Node(if self.fake { 0 } else { self.online[node] }))
    }
}

/// Nodes that there can be: kernels are built with room for at most so many.
const NODES: usize = 1024;

/// A list like `0-1,3`; none if it names more nodes than there can be.
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

/// A node of this machine, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node(u32);

impl Node {
    /// Runs `allocate` so that the pages which it takes come from this node, if they can.
    pub(crate) fn near<R>(self, allocate: impl FnOnce() -> R) -> R {
        let _policy = policy::Preferred::set(self.0);
        allocate()
    }

    /// Takes the pages of fresh memory now, from this node, if they can. A driver that locks pages has taken them
    /// already.
    ///
    /// # Safety
    /// The bytes are the caller's, and hold zeros.
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

#[cfg(target_os = "linux")]
mod policy {
    //! The calling thread's memory policy.

    use super::NODES;
    use libc::{SYS_get_mempolicy, SYS_set_mempolicy, c_int, c_long, c_ulong, syscall};
    use std::ptr;

    const BITS: usize = c_ulong::BITS as usize;
    type Mask = [c_ulong; NODES / BITS];
    /// `MPOL_PREFERRED` of `linux/mempolicy.h`.
    const PREFERRED: c_int = 1;

    /// Until it is dropped, the thread takes pages from a node; then as before.
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

    fn get() -> Option<(c_int, Mask)> {
        let (mut mode, mut mask): (c_int, Mask) = (0, [0; NODES / BITS]);
        // SAFETY: a live word and a live mask of that many bits; without flags no address is looked at.
        let result: c_long = unsafe {
            syscall(SYS_get_mempolicy, &raw mut mode, &raw mut mask, NODES as c_ulong, ptr::null::<u8>(), 0 as c_ulong)
        };
        (result == 0).then_some((mode, mask))
    }

    fn put(mode: c_int, mask: &Mask) -> bool {
        // The kernel takes one bit less than it is told of, and no nodes at all where the policy is the default one.
        let (mask, bits) = if mask.iter().all(|word| *word == 0) {
            (ptr::null(), 0)
        } else {
            (ptr::from_ref(mask), NODES as c_ulong + 1)
        };
        // SAFETY: a live mask of that many bits, or none.
        unsafe { syscall(SYS_set_mempolicy, mode as c_long, mask, bits) == 0 }
    }

    /// The policy's node of the page at an address: for tests.
    #[cfg(test)]
    pub fn node_of(at: *const u8) -> Option<u32> {
        let mut node: c_int = -1;
        // `MPOL_F_NODE | MPOL_F_ADDR`
        let flags: c_ulong = 3;
        // SAFETY: a live word, no mask, and an address that the kernel only looks up.
        let result = unsafe { syscall(SYS_get_mempolicy, &raw mut node, ptr::null::<u8>(), 0 as c_ulong, at, flags) };
        (result == 0).then_some(node as u32)
    }

    #[cfg(test)]
    pub fn mode() -> Option<c_int> {
        get().map(|(mode, _)| mode)
    }
}

#[cfg(not(target_os = "linux"))]
mod policy {
    //! There is none.

    pub struct Preferred;

    impl Preferred {
        pub fn set(_: u32) -> Self {
            Preferred
        }
    }
}

/// Machines with several nodes, for tests on machines with one.
#[cfg(test)]
pub(crate) mod fake {
    use super::Nodes;
    use std::cell::RefCell;

    thread_local! {
        static FAKE: RefCell<Option<Nodes>> = const { RefCell::new(None) };
    }

    pub(super) fn here() -> Option<Nodes> {
        FAKE.with_borrow(Option::clone)
    }

    /// The pools that `build` builds have so many nodes, and their devices are near to these.
    pub(crate) fn nodes<R>(count: u32, devices: &[usize], build: impl FnOnce() -> R) -> R {
        FAKE.set(Some(Nodes { online: (0..count).collect(), devices: devices.to_vec(), fake: true }));
        let built = build();
        FAKE.set(None);
        built
    }
}

#[cfg(test)]
#[path = "numa_tests.rs"]
mod tests;
