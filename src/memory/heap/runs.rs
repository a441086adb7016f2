//! Mapped memory that comes and goes. This is rare, so it may use a map and search.
//!
//! A *run* is mapped memory of one region without a gap. Its two edges are nodes that never change while the run lives,
//! so allocating and freeing at its ends need not know of it.

use super::{Heap, Node, Payload, bins, nodes::GRAIN};

pub(super) struct Run {
    first: u32,
    last: u32,
}

impl<P: Payload> Heap<P> {
    /// It is free from now on, and joined with free neighbours of its region.
    pub(crate) fn insert(&mut self, region: u32, address: u64, bytes: u64) {
        self.insert_used(region, address, bytes, P::default());
    }

    /// Like [`insert`](Self::insert), for memory with a payload.
    pub(crate) fn insert_used(&mut self, region: u32, address: u64, bytes: u64, payload: P) {
        if bytes == 0 {
            return;
        }
        let end = address + bytes;
        assert!(address.is_multiple_of(GRAIN) && bytes.is_multiple_of(GRAIN), "mapped memory comes in whole grains");
        let left = self.run_before(region, end).map(|run| (run.first, run.last, self.nodes[run.last].address));
        assert!(left.is_none_or(|(.., last)| last <= address), "memory is mapped once");
        let grains = u32::try_from(bytes / GRAIN).expect("at most 16 TiB are mapped at a time");
        let id = self.live(region, address, grains);
        // Memory that joins the left run keeps its first edge; memory that joins the right run keeps its last edge.
        let first = match left {
            Some((first, last, at)) if at == address => {
                self.nodes.connect(self.nodes[last].before, id);
                self.nodes.release(last);
                first
            }
            _ => {
                let edge = self.edge(region, address);
                self.nodes.connect(edge, id);
                edge
            }
        };
        let last = match self.runs.remove(&(region, end)) {
            Some(right) => {
                self.nodes.connect(id, self.nodes[right.first].after);
                self.nodes.release(right.first);
                right.last
            }
            None => {
                let edge = self.edge(region, end);
                self.nodes.connect(id, edge);
                edge
            }
        };
        let start = self.nodes[first].address;
        let whole = self.nodes[last].address - start;
        assert!(whole / GRAIN <= u32::MAX.into(), "at most 16 TiB are mapped side by side");
        self.runs.insert((region, start), Run { first, last });
        self.free_grains += u64::from(grains);
        self.settle(id, payload);
    }

    /// They must be wholly free. Returns their payload.
    pub(crate) fn remove(&mut self, region: u32, address: u64, bytes: u64) -> P {
        let end = address + bytes;
        assert!(bytes > 0 && address.is_multiple_of(GRAIN) && bytes.is_multiple_of(GRAIN), "whole grains are unmapped");
        let id = self.free_range(region, address, end).expect("what is taken out of the heap is free");
        let run = self.run_before(region, end).expect("free memory is mapped");
        let (first, last, range) = (run.first, run.last, self.nodes[id]);

        let mut payload = self.payloads[id as usize].split_off((address - range.address) as usize);
        let later = payload.split_off(bytes as usize);
        let front = ((address - range.address) / GRAIN) as u32;
        let rest = range.grains - front - (bytes / GRAIN) as u32;

        // Left of the hole: the run's first edge .. what is before the range, its front .. a new edge.
        let tail = if front > 0 {
            self.resize(id, front);
            id
        } else {
            self.unlist(id);
            self.nodes.release(id);
            range.before
        };
        self.runs.remove(&(region, self.nodes[first].address));
        if tail == first {
            self.nodes.release(first);
        } else {
            let edge = self.edge(region, address);
            self.nodes.connect(tail, edge);
            self.runs.insert((region, self.nodes[first].address), Run { first, last: edge });
        }
        // Right of it: a new edge .. the range's rest, what is after it .. the run's last edge.
        if rest == 0 && range.after == last {
            self.nodes.release(last);
        } else {
            let edge = self.edge(region, end);
            if rest > 0 {
                let id = self.live(region, end, rest);
                self.payloads[id as usize] = later;
                self.nodes.connect(edge, id);
                self.nodes.connect(id, range.after);
                self.list_up(id);
            } else {
                self.nodes.connect(edge, range.after);
            }
            self.runs.insert((region, end), Run { first: edge, last });
        }
        self.free_grains -= bytes / GRAIN;
        payload
    }

    /// Free bytes that end and that begin at `address`, at mapped edges, if `accept` accepts their payload.
    pub(crate) fn free_around(&self, region: u32, address: u64, accept: impl Fn(&P) -> bool) -> (u64, u64) {
        let is_free = |id: &u32| accept(&self.payloads[*id as usize]) && self.nodes[*id].is_free();
        let accepted = |id: u32| Some(id).filter(is_free).map_or(0, |id| self.nodes[id].bytes());
        let run = self.run_before(region, address).filter(|run| self.nodes[run.last].address == address);
        let before = run.map_or(0, |run| accepted(self.nodes[run.last].before));
        let after = self.runs.get(&(region, address)).map_or(0, |run| accepted(self.nodes[run.first].after));
        (before, after)
    }

    pub(super) fn nodes_of(&self, run: &Run) -> impl Iterator<Item = (u32, &Node)> {
        let after = |id: u32| Some(self.nodes[id].after).filter(|id| !self.nodes[*id].is_edge());
        std::iter::successors(after(run.first), move |id| after(*id)).map(|id| (id, &self.nodes[id]))
    }

    fn free_range(&self, region: u32, address: u64, end: u64) -> Option<u32> {
        let long_enough = bins::floor(u32::try_from((end - address) / GRAIN).ok()?);
        let lists = std::iter::successors(self.bins.next(long_enough), |list| self.bins.next(list + 1));
        lists.flat_map(|list| self.list(list)).find(|id| {
            let node = &self.nodes[*id];
            node.region == region && node.address <= address && end <= node.address + node.bytes()
        })
    }

    fn run_before(&self, region: u32, address: u64) -> Option<&Run> {
        self.runs.range((region, 0)..(region, address)).next_back().map(|(_, run)| run)
    }

    fn edge(&mut self, region: u32, address: u64) -> u32 {
        let id = self.nodes.edge(region, address);
        self.make_room(id);
        id
    }
}
