//! The heap for large blocks: which addresses are free, and what is still going on in them.
//!
//! All of it is host memory, as the host cannot read a device's: a table of *nodes*, one for each live piece and each
//! free range, which name their neighbours. Freeing joins a range with its free neighbours at once, so no two of them
//! ever touch, and nothing has to be defragmented later. Allocating and freeing cost the same whatever the number of
//! pieces: RMM's pool walks a linear list, and its random allocations go from 0.65 us an operation at 1000 to 10.9 us
//! at 10,000 (rapidsai/rmm#543).
//!
//! * **Memory** comes and goes by [`insert`](Heap::insert) and [`remove`](Heap::remove), in *regions*. Ranges of one
//!   region that touch are joined; those of different regions never are, even if their addresses touch, since one
//!   allocation of the driver cannot be used together with another.
//! * **Payload**: what is known of a free range (the uses that must be over before it may be written) is split with it
//!   and joined with it, so a piece that is handed out brings exactly what concerns its own bytes.
//! * **Choice**: the lists of [`bins`] hold ranges whose sizes differ by 3 % at most (TLSF: Masmano et al., "TLSF: a
//!   new dynamic memory allocator for real-time systems", 2004). The first list that can hold a request is found by two
//!   bitmaps ([`allocate`]). Pieces lie at the low end of their range, so that high memory becomes free and can be given
//!   back.
//!
//! The heap makes no driver call, has no `unsafe` and knows nothing of devices.
//!
//! * [`nodes`]: the table. * [`bins`]: the lists of free ranges by size. * [`allocate`]: allocate and free.
//! * [`runs`]: mapped memory, which comes and goes; the only part with a map, and the only part that may be slow.

mod allocate;
mod bins;
mod nodes;
mod runs;
#[cfg(test)]
mod tests;

use bins::Bins;
use nodes::{Node, Nodes};
use runs::Run;
use std::collections::BTreeMap;

/// What is known of a range of free memory, with byte positions relative to its start.
pub(crate) trait Payload: Default {
    /// The part from byte `at` on, with positions that begin at 0 again; what lies before stays: of `at` 0, nothing.
    fn split_off(&mut self, at: usize) -> Self;
    /// Takes in what is known of the range that begins at byte `at` of this one.
    fn join(&mut self, at: usize, later: Self);
}

/// A live piece. Whoever has it may free it, once: builds with assertions notice when it is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    id: u32,
    #[cfg(debug_assertions)]
    generation: u32,
}

/// Memory that has been handed out.
#[derive(Debug)]
pub(crate) struct Taken<P> {
    pub piece: Piece,
    pub region: u32,
    pub address: u64,
    /// What was asked for, rounded up to [`Heap::GRAIN`].
    pub bytes: usize,
    /// What was known of these bytes while they were free.
    pub payload: P,
}

/// Free memory between live pieces or the edges of what is mapped.
#[derive(Debug)]
pub(crate) struct FreeRange<'a, P> {
    pub region: u32,
    pub address: u64,
    pub bytes: u64,
    pub payload: &'a P,
}

/// A live piece or a free range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub region: u32,
    pub address: u64,
    pub bytes: u64,
    /// The live piece's number, which is no other live piece's; none if the span is free.
    pub piece: Option<u32>,
}

/// Free ranges and live pieces of any number of regions. See the module.
pub(crate) struct Heap<P> {
    nodes: Nodes,
    /// By node: what is known of the free ones, nothing for the others. Apart from the nodes, which stay small.
    payloads: Vec<P>,
    bins: Bins,
    /// Mapped memory without gaps, by its region and first address.
    runs: BTreeMap<(u32, u64), Run>,
    free_grains: u64,
    live: usize,
}

impl<P: Payload> Heap<P> {
    /// All sizes are rounded up to it; addresses and sizes of all ranges are multiples.
    pub(crate) const GRAIN: usize = nodes::GRAIN as usize;

    pub(crate) fn new() -> Self {
        Heap {
            nodes: Nodes::default(),
            payloads: Vec::new(),
            bins: Bins::new(),
            runs: BTreeMap::new(),
            free_grains: 0,
            live: 0,
        }
    }

    /// What is free, in no order.
    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = FreeRange<'_, P>> {
        let free = self.nodes.iter().zip(&self.payloads).filter(|(node, _)| node.is_free());
        free.map(|(node, payload)| FreeRange {
            region: node.region,
            address: node.address,
            bytes: node.bytes(),
            payload,
        })
    }

    /// What is known of what is free, for its owner to forget what is over.
    pub(crate) fn free_payloads_mut(&mut self) -> impl Iterator<Item = &mut P> {
        let free = self.nodes.iter().zip(&mut self.payloads).filter(|(node, _)| node.is_free());
        free.map(|(_, payload)| payload)
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_grains * nodes::GRAIN
    }

    /// The largest free range. Looks through one list, all of whose ranges are within 3 %.
    pub(crate) fn largest_free(&self) -> u64 {
        let Some(list) = self.bins.last() else { return 0 };
        self.list(list).map(|id| self.nodes[id].bytes()).max().unwrap_or(0)
    }

    #[cfg(test)]
    pub(crate) fn live_pieces(&self) -> usize {
        self.live
    }

    /// Every piece and every free range, by region and address.
    pub(crate) fn walk(&self) -> Vec<Span> {
        let nodes = self.runs.values().flat_map(|run| self.nodes_of(run));
        nodes.map(|(id, node)| span(id, node)).collect()
    }

    /// The free ranges of one list, the latest first.
    fn list(&self, list: usize) -> impl Iterator<Item = u32> {
        std::iter::successors(nodes::some(self.bins.head(list)), |id| nodes::some(self.nodes[*id].list_after))
    }
}

fn span(id: u32, node: &Node) -> Span {
    Span { region: node.region, address: node.address, bytes: node.bytes(), piece: (!node.is_free()).then_some(id) }
}
