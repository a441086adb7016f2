//! The heap for large blocks: which addresses are free, and which uses of them may still be in flight.
//!
//! It makes no driver call and has no `unsafe`. All of its state is host memory: a table of *nodes*, one per live piece
//! and per free range, which name their neighbours. A free joins its free neighbours, so no two free ranges ever touch.
//! Costs are the same for any number of pieces. (RMM's pool walks a linear list: from 0.65 us per operation at 1000
//! pieces to 10.9 us at 10,000, rapidsai/rmm#543.)
//!
//! * **Memory** comes by [`insert`](Heap::insert) and goes by [`remove`](Heap::remove), in *regions*. Adjacent ranges
//!   of one region are joined. Ranges of different regions never are, even if their addresses touch: one operation
//!   cannot use two allocations of the driver together.
//! * **Payload**: what is known of a free range (the uses that must be over before it may be written). It is split and
//!   joined with the range, so a piece that is handed out brings exactly what concerns its own bytes.
//! * **Choice**: the lists of [`bins`] hold ranges whose sizes differ by 3 % at most (TLSF: Masmano et al., "TLSF: a
//!   new dynamic memory allocator for real-time systems", 2004). Two bitmaps find the first list that can serve a
//!   request ([`allocate`]). Pieces lie at the low end of their range, so that high memory becomes free and can be
//!   given back.
//!
//! [`runs`] has mapped memory that comes and goes (the only part with a map, and the only part that may be slow).

mod allocate;
mod bins;
mod nodes;
mod runs;
#[cfg(test)]
#[path = "../../../tests/unit/memory/heap/tests/mod.rs"]
mod tests;

use bins::Bins;
pub(super) use nodes::GRAIN;
use nodes::{Node, Nodes};
use runs::Run;
use std::collections::BTreeMap;

/// Byte positions are relative to the range's start.
pub(crate) trait Payload: Default {
    /// Splits off the part from byte `at` on; its positions start at 0. `self` keeps the rest: nothing if `at` is 0.
    fn split_off(&mut self, at: usize) -> Self;
    /// Appends what is known of the range that begins at byte `at` of this one.
    fn join(&mut self, at: usize, later: Self);
}

/// A live piece. Its holder may free it once; builds with debug assertions detect a stale one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    id: u32,
    #[cfg(debug_assertions)]
    generation: u32,
}

#[derive(Debug)]
pub(crate) struct Taken<P> {
    pub piece: Piece,
    pub region: u32,
    pub address: u64,
    /// Rounded up to [`Heap::GRAIN`].
    pub bytes: usize,
    pub payload: P,
}

#[derive(Debug)]
pub(crate) struct FreeRange<'a, P> {
    pub region: u32,
    pub address: u64,
    pub bytes: u64,
    pub payload: &'a P,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub region: u32,
    pub address: u64,
    pub bytes: u64,
    /// The number of the live piece, unique among live pieces. None: the span is free.
    pub piece: Option<u32>,
}

#[derive(Default)]
pub(crate) struct Heap<P> {
    nodes: Nodes,
    /// By node: what is known of a free range; empty for other nodes. A separate array, so that nodes stay small.
    payloads: Vec<P>,
    bins: Bins,
    /// Runs: mapped memory without gaps, by region and first address.
    runs: BTreeMap<(u32, u64), Run>,
    free_grains: u64,
    live: usize,
}

impl<P: Payload> Heap<P> {
    /// Sizes are rounded up to it; addresses and sizes of all ranges are multiples of it.
    pub(crate) const GRAIN: usize = GRAIN as usize;

    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = FreeRange<'_, P>> {
        let free = self.nodes.iter().zip(&self.payloads).filter(|(node, _)| node.is_free());
        free.map(|(node, payload)| {
            let (region, address) = (node.region, node.address);
            FreeRange { region, address, bytes: node.bytes(), payload }
        })
    }

    /// The payloads of free ranges, so that the owner can forget uses that are over.
    pub(crate) fn free_payloads_mut(&mut self) -> impl Iterator<Item = &mut P> {
        let free = self.nodes.iter().zip(&mut self.payloads).filter(|(node, _)| node.is_free());
        free.map(|(_, payload)| payload)
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_grains * GRAIN
    }

    /// Bytes of the largest free range. Searches one list, whose ranges differ by 3 % at most.
    pub(crate) fn largest_free(&self) -> u64 {
        let Some(list) = self.bins.last() else { return 0 };
        self.list(list).map(|id| self.nodes[id].bytes()).max().unwrap_or(0)
    }

    /// Every piece and every free range, by region and address.
    pub(crate) fn walk(&self) -> Vec<Span> {
        let nodes = self.runs.values().flat_map(|run| self.nodes_of(run));
        nodes.map(|(id, node)| span(id, node)).collect()
    }

    fn list(&self, list: usize) -> impl Iterator<Item = u32> {
        std::iter::successors(nodes::some(self.bins.head(list)), |id| nodes::some(self.nodes[*id].list_after))
    }
}

fn span(id: u32, node: &Node) -> Span {
    Span { region: node.region, address: node.address, bytes: node.bytes(), piece: (!node.is_free()).then_some(id) }
}
