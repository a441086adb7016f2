//! What these tests share: backings, work that is held until it is let go, and the invariants of a pool's books.

use crate::support::{Gpus, MODULE, failure};
use gpu_pool::{
    AsViewMut, Builder, Device, DeviceBuffer, DeviceCopy, Error, GpuPool, Kernel, LaunchDims,
    memory::{BackingChoice, BlockState, MemorySnapshot, MemoryStats, OutOfMemoryReport},
};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    sync::Arc,
    sync::atomic::{AtomicU32, Ordering::*},
    task::Poll,
};

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// What device memory may come from.
pub const BACKINGS: [BackingChoice; 2] = [BackingChoice::Vmm, BackingChoice::Malloc];

/// Runs a test over every backing.
pub fn on_backings(test: impl Fn(BackingChoice)) {
    for backing in BACKINGS {
        println!("backing: {backing:?}");
        test(backing);
    }
}

/// Runs a test over every backing, with a pool of `count` devices.
pub fn on_pools(gpus: Gpus, count: usize, test: impl Fn(&GpuPool, BackingChoice)) {
    on_backings(|backing| test(&gpus.builder(count).memory_backing(backing).build().unwrap(), backing));
}

/// Runs a test over every backing, on each of `count` devices.
pub fn on_devices(gpus: Gpus, count: usize, test: impl Fn(&Device) -> Result<(), Error> + Sync) {
    on_pools(gpus, count, |pool, _| drop(pool.run(|dev, _| test(dev)).unwrap()));
}

/// Runs a test over every backing, with a pool of `count` devices that may each take `limit` bytes.
pub fn on_limited_pools(gpus: Gpus, count: usize, limit: usize, test: impl Fn(&GpuPool, BackingChoice)) {
    on_backings(|backing| test(&limited(gpus, count, backing, limit).build().unwrap(), backing));
}

/// A pool in the making, of `count` devices that may each take `limit` bytes.
pub fn limited(gpus: Gpus, count: usize, backing: BackingChoice, limit: usize) -> Builder {
    gpus.builder(count).memory_backing(backing).memory_limit(limit as u64)
}

/// Runs a test over every backing, on a device that may take `limit` bytes; then all has come home.
pub fn on_limited(gpus: Gpus, limit: usize, test: impl Fn(&Device) -> Result<(), Error> + Sync) {
    on_backings(|backing| {
        let pool = limited(gpus, 1, backing, limit).build().unwrap();
        pool.run(|dev, _| test(dev)).unwrap();
        assert_at_rest(&pool);
    });
}

/// `len` bytes of whatever was there.
#[track_caller]
pub fn bytes_of(dev: &Device, len: usize) -> Result<DeviceBuffer<u8>, Error> {
    // SAFETY: the tests write before they read, which the checker watches.
    unsafe { dev.uninit(len) }
}

/// The report of a request that must be refused.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> Arc<OutOfMemoryReport> {
    match failure(result) {
        Error::OutOfMemory { report, .. } => report,
        other => panic!("{other}"),
    }
}

/// `len` elements at a multiple of `align`.
#[track_caller]
pub fn aligned<T: DeviceCopy>(dev: &Device, len: usize, align: usize) -> Result<DeviceBuffer<T>, Error> {
    // SAFETY: as above.
    unsafe { dev.uninit_aligned(len, align) }
}

/// The first and the last address of a buffer.
pub fn span<T: DeviceCopy>(buffer: &DeviceBuffer<T>) -> std::ops::Range<u64> {
    buffer.address()..buffer.address() + (buffer.len() * size_of::<T>()) as u64
}

/// Bytes over all, live or not: whether an allocation went to the driver.
pub fn driver_calls(dev: &Device) -> u64 {
    dev.stats().driver_calls
}

// ---- work that takes until it is let go ---------------------------------------------------------------------------

/// How long a held kernel takes on a GPU, where nobody can tell it to go on.
const HELD_MICROS: u32 = 100_000;

/// Gates that are shut.
static SHUT: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
static NEXT: AtomicU32 = AtomicU32::new(1);

/// Holds kernels until it is opened or dropped. On a GPU they take [`HELD_MICROS`] instead, so what a test asserts of
/// work under way it asserts on software GPUs only ([`holds`](Gate::holds)); what it asserts of data holds on both.
pub struct Gate {
    id: u32,
    holds: bool,
}

/// Touches nothing: its first argument is what it holds.
static HOLD: Kernel<(&mut [u32], u64, u32, u32)> = Kernel::resumable(&MODULE, "slow_add", hold);

fn hold(_: LaunchDims, _: &mut [u32], _: u64, gate: u32, _: u32) -> Poll<()> {
    if SHUT.lock().contains(&gate) { Poll::Pending } else { Poll::Ready(()) }
}

/// The same for a software GPU that must not take it for a deadlock: it keeps one of its workers, so one at a time.
static BLOCK: Kernel<(&mut [u32], u64, u32, u32)> = Kernel::new(&MODULE, "slow_add", block);

fn block(_: LaunchDims, _: &mut [u32], _: u64, gate: u32, _: u32) {
    while SHUT.lock().contains(&gate) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

impl Gate {
    pub fn new(gpus: Gpus) -> Self {
        let id = NEXT.fetch_add(1, Relaxed);
        SHUT.lock().insert(id);
        Gate { id, holds: !gpus.is_cuda() }
    }

    /// The current stream writes to `x` until the gate opens.
    pub fn hold<V: AsViewMut<Elem = u32>>(&self, dev: &Device, x: &mut V) -> Result<(), Error> {
        let args = (x.view_mut(), 0u64, self.id, HELD_MICROS);
        // SAFETY: the kernel fits its signature and touches none of the elements.
        unsafe { dev.launch(&HOLD, LaunchDims::cover(1), args) }
    }

    /// [`hold`](Self::hold) for longer than it takes to be sure of a deadlock; only one at a time.
    pub fn block<V: AsViewMut<Elem = u32>>(&self, dev: &Device, x: &mut V) -> Result<(), Error> {
        let args = (x.view_mut(), 0u64, self.id, HELD_MICROS);
        // SAFETY: as above.
        unsafe { dev.launch(&BLOCK, LaunchDims::cover(1), args) }
    }

    /// A stream that is busy until the gate opens.
    pub fn hold_stream(&self, dev: &Device) -> Result<DeviceBuffer<u32>, Error> {
        let mut x = dev.zeros::<u32>(1)?;
        self.hold(dev, &mut x)?;
        Ok(x)
    }

    pub fn open(&self) {
        SHUT.lock().remove(&self.id);
    }

    /// Whether it is certain that nothing gets through before it is opened.
    pub fn holds(&self) -> bool {
        self.holds && SHUT.lock().contains(&self.id)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

// ---- the books ----------------------------------------------------------------------------------------------------

/// S1 and S2: blocks tile the chunks without a gap and without an overlap; no two free blocks
/// of the heap that touch within a chunk; what the counters say is what the snapshot shows (PyTorch's
/// `_check_memory_stat_consistency`).
#[track_caller]
pub fn assert_books(snapshot: &MemorySnapshot) {
    let MemorySnapshot { chunks, blocks, stats, .. } = snapshot;
    for pair in chunks.windows(2) {
        assert!(pair[0].address + pair[0].bytes <= pair[1].address, "chunks overlap: {pair:?}");
    }
    let mut rest = blocks.iter().peekable();
    for run in runs(snapshot) {
        let mut at = run.start;
        while at < run.end {
            let block = rest.next().unwrap_or_else(|| panic!("nothing at {at:#x} of the memory at {run:#x?}"));
            assert_eq!(block.address, at, "a gap or an overlap before {block:?}, in {run:#x?}");
            assert!(block.bytes > 0, "{block:?}");
            at += block.bytes;
        }
        assert_eq!(at, run.end, "a block reaches beyond its memory");
    }
    assert!(rest.peek().is_none(), "a block where there is no memory: {:?}", rest.peek());
    let sum = |state| blocks.iter().filter(|b| b.state == state).map(|b| b.bytes).sum::<u64>();
    let (live, pending, free) = (sum(BlockState::Live), sum(BlockState::Pending), sum(BlockState::Free));
    assert_eq!(live, stats.in_use, "{stats}");
    assert_eq!(live + pending + free, stats.reserved, "{stats}");
    // (Counters have the bytes that are used, blocks are pending as a whole; and work may have ended between the two
    // looks.)
    assert!(pending == 0 || stats.pending > 0, "{pending} {stats}");
    assert_eq!(chunks.iter().map(|c| c.bytes).sum::<u64>(), stats.reserved, "{stats}");
    assert_counters(stats);
}

/// Memory without gaps: chunks that touch.
fn runs(snapshot: &MemorySnapshot) -> Vec<std::ops::Range<u64>> {
    let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
    for chunk in &snapshot.chunks {
        match runs.last_mut().filter(|run| run.end == chunk.address) {
            Some(run) => run.end += chunk.bytes,
            None => runs.push(chunk.address..chunk.address + chunk.bytes),
        }
    }
    runs
}

/// What no state of a pool may contradict.
#[track_caller]
pub fn assert_counters(stats: &MemoryStats) {
    assert!(stats.requested <= stats.in_use, "{stats}");
    assert!(stats.in_use + stats.pending <= stats.reserved, "{stats}");
    assert!(stats.in_use <= stats.peak && stats.reserved <= stats.peak_reserved, "{stats}");
    assert!(stats.waits <= stats.steals && stats.steals <= stats.allocations, "{stats}");
}

/// The books of this device are right.
#[track_caller]
pub fn check_books(dev: &Device) {
    assert_books(&dev.memory_snapshot());
}

/// Everything has come home.
#[track_caller]
pub fn assert_empty(dev: &Device) -> Result<(), Error> {
    let stats = dev.stats();
    assert_eq!((stats.in_use, stats.requested), (0, 0), "{stats}");
    check_books(dev);
    Ok(())
}

/// Everything has come home, and nothing is under way: a scope that has ended has waited for all its streams.
#[track_caller]
pub fn assert_at_rest(pool: &GpuPool) {
    let at_rest = pool.run(|dev, _| {
        assert_eq!(dev.stats().pending, 0, "{}", dev.stats());
        assert_empty(dev)
    });
    if let Err(error) = at_rest {
        panic!("the pool is not at rest: {error}");
    }
}

/// A random number generator that needs no crate: SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    /// Up to `2^most` bytes; each doubling is as likely as the others, and now and then it is nothing at all or a power
    /// of two.
    pub fn size(&mut self, most: u32) -> usize {
        let bits = self.below(most as usize + 1) as u32;
        match self.below(16) {
            0 => 0,
            1 => 1 << bits,
            _ => ((1usize << bits) + self.below(1 << bits)).min(1 << most),
        }
    }
}
