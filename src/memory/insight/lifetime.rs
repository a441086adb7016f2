//! From events to rectangles: which addresses were what, from which event to which.
//!
//! The past that a ring remembers begins in the middle of things. What was freed without having been seen to come was
//! there from the beginning; what is there at the end without having come, too.

use super::{
    site::CallSite,
    snapshot::{BlockState, EventKind, MemoryEvent, MemorySnapshot},
};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

/// The present's part of the width.
const PRESENT: usize = 24;

/// What a snapshot tells of the time that it covers. Times are counted in events: event `i` happens at `i`, the present
/// lasts from the last one to [`end`](Self::end).
pub(crate) struct History<'a> {
    /// Memory from the driver.
    pub(crate) chunks: Vec<Chunk>,
    /// Blocks that were handed out.
    pub(crate) blocks: Vec<Block>,
    /// Freed memory of now that is still used, since when it is free.
    pub(crate) pending: Vec<Chunk>,
    /// Who asked, the one with the most bytes at once first.
    pub(crate) sites: Vec<Row<'a>>,
    /// Events at which a request was refused.
    pub(crate) refusals: Vec<usize>,
    /// Where the picture ends: the present is some events wide, so that its state can be seen.
    pub(crate) end: usize,
}

/// An address range for a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) during: Range<usize>,
}

/// A block for the time that it was handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) stream: Option<u64>,
    /// Index into [`History::sites`].
    pub(crate) site: usize,
    pub(crate) during: Range<usize>,
    /// When it came and went, in microseconds, where that was seen.
    pub(crate) born: Option<u64>,
    pub(crate) died: Option<u64>,
    pub(crate) remote: bool,
}

/// What one call site did.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Row<'a> {
    pub(crate) site: Option<&'a CallSite>,
    pub(crate) live_blocks: usize,
    pub(crate) live_bytes: u64,
    /// The most bytes at once.
    pub(crate) peak: u64,
    pub(crate) allocations: usize,
    pub(crate) remote_frees: usize,
}

/// A block that is open while the events are replayed.
struct Open {
    bytes: u64,
    requested: u64,
    stream: Option<u64>,
    site: usize,
    since: usize,
    born: Option<u64>,
}

impl<'a> History<'a> {
    pub(crate) fn of(snapshot: &'a MemorySnapshot) -> Self {
        let end = snapshot.events.len() + (snapshot.events.len() / PRESENT).max(1);
        let mut sites = Sites::default();
        let blocks = blocks(snapshot, &mut sites, end);
        let (rows, blocks) = sites.rank(blocks, end);
        let refused = |event: &MemoryEvent| event.kind == EventKind::OutOfMemory;
        History {
            chunks: chunks(snapshot, end),
            pending: pending(snapshot, &blocks, end),
            sites: rows,
            refusals: (0..snapshot.events.len()).filter(|&i| refused(&snapshot.events[i])).collect(),
            blocks,
            end,
        }
    }

    /// Bytes over time, `(event, bytes from it on)`: of `what`.
    pub(crate) fn level<'b>(&self, what: impl Iterator<Item = (&'b Range<usize>, u64)>) -> Vec<f64> {
        // Sums of numbers that a file may claim: as floats they cannot overflow.
        let mut level = vec![0.0; self.end + 1];
        for (during, bytes) in what {
            level[during.start] += bytes as f64;
            level[during.end] -= if during.end < self.end { bytes as f64 } else { 0.0 };
        }
        level.pop();
        level.iter_mut().fold(0.0, |sum, change| {
            *change += sum;
            *change
        });
        level
    }
}

/// Replays what was handed out and what came back.
fn blocks<'a>(snapshot: &'a MemorySnapshot, sites: &mut Sites<'a>, end: usize) -> Vec<Block> {
    let mut open = HashMap::<u64, Open>::new();
    let mut blocks = Vec::new();
    let close = |address: u64, open: Open, at: usize, died: Option<u64>, remote: bool| {
        let Open { bytes, requested, stream, site, since, born } = open;
        Block { address, bytes, requested, stream, site, during: since..at, born, died, remote }
    };
    for (i, event) in snapshot.events.iter().enumerate() {
        let MemoryEvent { micros, kind, address, bytes, requested, stream, ref site } = *event;
        let new = |since, born, site| Open { bytes, requested, stream: Some(stream), site, since, born };
        match kind {
            EventKind::Allocated => {
                let site = sites.index(site.as_ref());
                if let Some(lost) = open.insert(address, new(i, Some(micros), site)) {
                    blocks.push(close(address, lost, i, None, false));
                }
            }
            EventKind::Freed | EventKind::FreedRemotely => {
                let index = sites.index(site.as_ref());
                let block = open.remove(&address).unwrap_or_else(|| new(0, None, index));
                blocks.push(close(address, block, i, Some(micros), kind == EventKind::FreedRemotely));
            }
            _ => {}
        }
    }
    for block in snapshot.blocks.iter().filter(|block| block.state == BlockState::Live) {
        open.entry(block.address).or_insert_with(|| Open {
            bytes: block.bytes,
            requested: block.requested,
            stream: block.stream,
            site: sites.index(block.site.as_ref()),
            since: 0,
            born: block.since,
        });
    }
    blocks.extend(open.into_iter().map(|(address, block)| close(address, block, end, None, false)));
    // From a hash map: the same snapshot must give the same page.
    blocks.sort_by_key(|block| (block.during.start, block.address, block.during.end));
    blocks
}

/// Replays what the driver gave and took. A chunk may go back in other pieces than it came in.
fn chunks(snapshot: &MemorySnapshot, end: usize) -> Vec<Chunk> {
    let mut open = BTreeMap::<u64, (u64, usize)>::new();
    let mut chunks = Vec::new();
    let mut cut = |open: &mut BTreeMap<u64, (u64, usize)>, address: u64, bytes: u64, at: usize| {
        let until = address.saturating_add(bytes);
        let mut before = Vec::new();
        for (&start, &(bytes, since)) in open.range(..until).rev() {
            // What is open never overlaps, so the first that ends too early ends the search.
            if start.saturating_add(bytes) <= address {
                break;
            }
            before.push((start, start.saturating_add(bytes), since));
        }
        for &(start, stop, since) in &before {
            open.remove(&start);
            let (from, to) = (start.max(address), stop.min(until));
            chunks.push(Chunk { address: from, bytes: to - from, during: since..at });
            for (from, to) in [(start, from), (to, stop)] {
                if from < to {
                    open.insert(from, (to - from, since));
                }
            }
        }
        !before.is_empty()
    };
    let mut unseen = Vec::new();
    for (i, event) in snapshot.events.iter().enumerate() {
        let MemoryEvent { kind, address, bytes, .. } = *event;
        if bytes == 0 {
            continue;
        }
        match kind {
            EventKind::Mapped => {
                cut(&mut open, address, bytes, i);
                open.insert(address, (bytes, i));
            }
            EventKind::Unmapped if !cut(&mut open, address, bytes, i) => {
                unseen.push(Chunk { address, bytes, during: 0..i });
            }
            _ => {}
        }
    }
    for chunk in snapshot.chunks.iter().filter(|chunk| chunk.bytes > 0) {
        let until = chunk.address.saturating_add(chunk.bytes);
        let known =
            open.range(..until).next_back().is_some_and(|(&at, &(bytes, _))| at.saturating_add(bytes) > chunk.address);
        if !known {
            unseen.push(Chunk { address: chunk.address, bytes: chunk.bytes, during: 0..end });
        }
    }
    chunks.extend(open.into_iter().map(|(address, (bytes, since))| Chunk { address, bytes, during: since..end }));
    chunks.append(&mut unseen);
    // A chunk that came and went within one event was never there to see.
    chunks.retain(|chunk| !chunk.during.is_empty());
    chunks.sort_by_key(|chunk| (chunk.address, chunk.during.start));
    chunks
}

/// Freed ranges that are still used: since the last free in them.
fn pending(snapshot: &MemorySnapshot, blocks: &[Block], end: usize) -> Vec<Chunk> {
    let mut freed: Vec<&Block> = blocks.iter().filter(|block| block.died.is_some()).collect();
    freed.sort_by_key(|block| block.address);
    let wanted = snapshot.blocks.iter().filter(|block| block.state == BlockState::Pending && block.bytes > 0);
    wanted
        .map(|&super::snapshot::BlockInfo { address, bytes, .. }| {
            let until = address.saturating_add(bytes);
            let within = freed.partition_point(|block| block.address < address);
            let frees = freed[within..].iter().take_while(|block| block.address < until);
            let since = frees.map(|block| block.during.end).max().unwrap_or(0).min(end - 1);
            Chunk { address, bytes, during: since..end }
        })
        .collect()
}

/// Call sites in order of their first appearance.
#[derive(Default)]
struct Sites<'a> {
    index: HashMap<Option<&'a CallSite>, usize>,
    names: Vec<Option<&'a CallSite>>,
}

impl<'a> Sites<'a> {
    fn index(&mut self, site: Option<&'a CallSite>) -> usize {
        *self.index.entry(site).or_insert_with(|| {
            self.names.push(site);
            self.names.len() - 1
        })
    }

    /// What each did, the most bytes at once first, and the blocks numbered in that order.
    fn rank(self, mut blocks: Vec<Block>, end: usize) -> (Vec<Row<'a>>, Vec<Block>) {
        let mut rows: Vec<Row> = self.names.iter().map(|&site| Row { site, ..Row::default() }).collect();
        let mut changes: Vec<(usize, bool, usize, u64)> = Vec::with_capacity(blocks.len() * 2);
        for block in &blocks {
            let row = &mut rows[block.site];
            row.allocations += usize::from(block.born.is_some());
            row.remote_frees += usize::from(block.remote);
            changes.push((block.during.start, true, block.site, block.bytes));
            if block.during.end < end {
                changes.push((block.during.end, false, block.site, block.bytes));
            } else {
                row.live_blocks += 1;
                row.live_bytes = row.live_bytes.saturating_add(block.bytes);
            }
        }
        // What goes makes room before what comes in the same event.
        changes.sort();
        let mut now = vec![0u64; rows.len()];
        for (_, came, site, bytes) in changes {
            now[site] = if came { now[site].saturating_add(bytes) } else { now[site].saturating_sub(bytes) };
            rows[site].peak = rows[site].peak.max(now[site]);
        }
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by(|&a, &b| rows[b].peak.cmp(&rows[a].peak).then_with(|| rows[a].site.cmp(&rows[b].site)));
        let mut rank = vec![0; rows.len()];
        order.iter().enumerate().for_each(|(place, &site)| rank[site] = place);
        blocks.iter_mut().for_each(|block| block.site = rank[block.site]);
        (order.into_iter().map(|site| rows[site].clone()).collect(), blocks)
    }
}

#[cfg(test)]
#[path = "lifetime_tests.rs"]
mod tests;
