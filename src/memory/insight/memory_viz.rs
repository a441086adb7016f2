//! Snapshots in the format of PyTorch's memory viewer, <https://pytorch.org/memory_viz>.
//!
//! Users call [`MemorySnapshot::memory_viz`]. The types mirror what PyTorch's `torch/csrc/cuda/memory_snapshot.cpp`
//! writes; `torch/utils/viz/MemoryViz.js` and `torch/cuda/_memory_viz.py` read it. They read pickles, and no JSON.
//!
//! Invariants, which the viewer relies on:
//! * The blocks of a segment tile it, so touching chunks are one segment: a block may lie in several chunks.
//! * Numbers are `i64` below 2^53. A large `u64` becomes a pickle of nine bytes, which the viewer's script reads as a
//!   `BigInt`; larger numbers it rounds.

use super::{BlockInfo, BlockState, CallSite, EventKind, MemoryEvent, MemorySnapshot};
use serde::Serialize;

#[derive(Serialize)]
struct Viz {
    segments: Vec<Segment>,
    device_traces: Vec<Vec<TraceEntry>>,
    allocator_settings: Settings,
}

#[derive(Serialize)]
struct Settings {
    expandable_segments: bool,
}

#[derive(Default, Serialize)]
struct Segment {
    device: i64,
    address: i64,
    total_size: i64,
    allocated_size: i64,
    active_size: i64,
    requested_size: i64,
    stream: i64,
    segment_type: &'static str,
    segment_pool_id: (i64, i64),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Vec<Block>,
}

#[derive(Serialize)]
struct Block {
    address: i64,
    size: i64,
    requested_size: i64,
    state: &'static str,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct TraceEntry {
    action: &'static str,
    addr: i64,
    size: i64,
    stream: i64,
    time_us: i64,
    /// Only `oom` has it. The ledger does not record it, so it is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<i64>,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct Frame {
    name: String,
    filename: String,
    line: i64,
}

/// Needs the feature `insight`, which is a default feature.
impl MemorySnapshot {
    /// The snapshots of some devices as one file for PyTorch's memory viewer: a pickle, as
    /// `torch.cuda.memory._dump_snapshot` writes it.
    ///
    /// Drop the file on <https://pytorch.org/memory_viz>. That page draws in the browser and uploads nothing. It shows
    /// the memory over time, and the address space after each event. Both have call sites if recording was on.
    /// PyTorch's `torch/cuda/_memory_viz.py` reads the file too. The events have microseconds since the pool was built.
    ///
    /// `std::fs::write("memory.pickle", MemorySnapshot::memory_viz(&pool.memory_snapshots()?))`, for example.
    pub fn memory_viz(devices: &[MemorySnapshot]) -> Vec<u8> {
        let mut device_traces = Vec::new();
        for snapshot in devices {
            if device_traces.len() <= snapshot.device {
                device_traces.resize_with(snapshot.device + 1, Vec::new);
            }
            device_traces[snapshot.device].extend(snapshot.events.iter().flat_map(entries));
        }
        let segments = devices.iter().flat_map(segments).collect();
        let allocator_settings = Settings { expandable_segments: true };
        let viz = Viz { segments, device_traces, allocator_settings };
        serde_pickle::to_vec(&viz, Default::default()).expect("plain data")
    }
}

fn segments(snapshot: &MemorySnapshot) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for chunk in &snapshot.chunks {
        let (address, bytes) = (shown(chunk.address), chunk.bytes as i64);
        match segments.last_mut() {
            Some(last) if last.address.wrapping_add(last.total_size) == address => last.total_size += bytes,
            _ => segments.push(Segment::new(snapshot.device as i64, address, bytes)),
        }
    }
    for block in &snapshot.blocks {
        let after = segments.partition_point(|segment| segment.address <= shown(block.address));
        if let Some(segment) = after.checked_sub(1).and_then(|at| segments.get_mut(at)) {
            segment.add(block);
        }
    }
    segments
}

impl Segment {
    fn new(device: i64, address: i64, total_size: i64) -> Self {
        let known = Segment { device, address, total_size, ..Segment::default() };
        Segment { segment_type: "large", is_expandable: true, ..known }
    }

    fn add(&mut self, block: &BlockInfo) {
        let size = block.bytes as i64;
        let (state, requested_size) = match block.state {
            BlockState::Live => ("active_allocated", asked(block.requested, block.bytes)),
            BlockState::Pending => ("active_pending_free", size),
            BlockState::Free => ("inactive", size),
        };
        if block.state == BlockState::Live {
            self.allocated_size += size;
            self.requested_size += requested_size;
        }
        if block.state != BlockState::Free {
            self.active_size += size;
        }
        let (address, frames) = (shown(block.address), frames(&block.site));
        self.blocks.push(Block { address, size, requested_size, state, frames });
    }
}

/// An event as PyTorch names it. A free is two events, which the viewer shows as one.
fn entries(event: &MemoryEvent) -> impl Iterator<Item = TraceEntry> + '_ {
    let actions: &[&str] = match event.kind {
        EventKind::Allocated => &["alloc"],
        EventKind::Freed | EventKind::FreedRemotely => &["free_requested", "free_completed"],
        EventKind::Mapped => &["segment_map"],
        EventKind::Unmapped => &["segment_unmap"],
        EventKind::OutOfMemory => &["oom"],
        // What it gave back is recorded as unmapped, too.
        EventKind::Trimmed => &[],
    };
    actions.iter().map(|&action| TraceEntry {
        action,
        addr: shown(event.address),
        size: asked(event.requested, event.bytes),
        stream: event.stream as i64,
        time_us: event.micros as i64,
        device_free: (event.kind == EventKind::OutOfMemory).then_some(0),
        frames: frames(&event.site),
    })
}

/// Addresses of software GPUs begin at 2^62; their low 53 bits tell them apart.
fn shown(address: u64) -> i64 {
    (address & ((1 << 53) - 1)) as i64
}

fn asked(requested: u64, bytes: u64) -> i64 {
    (if requested == 0 { bytes } else { requested }) as i64
}

fn frames(site: &Option<CallSite>) -> Vec<Frame> {
    let frame = |site: &CallSite| Frame {
        name: site.op.to_string(),
        filename: site.file.to_string(),
        line: i64::from(site.line),
    };
    site.iter().map(frame).collect()
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/insight/memory_viz_tests.rs"]
mod tests;
