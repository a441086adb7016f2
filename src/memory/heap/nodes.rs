//! The node table of the heap. Invariant: neighbours name each other.

use std::ops::{Index, IndexMut};

pub(in crate::memory) const GRAIN: u64 = 4096;

pub(super) const NONE: u32 = u32::MAX;
/// In `list_before`: a live piece.
const LIVE: u32 = u32::MAX - 1;
/// In `list_before`: an edge of mapped memory. It has no bytes and is never free, so joining stops there without a
/// further check: every piece and every free range has two neighbours.
const EDGE: u32 = u32::MAX - 2;
/// In `list_before`: not in use; `after` is the next spare node.
const SPARE: u32 = u32::MAX - 3;

#[derive(Clone, Copy)]
#[repr(align(32))]
pub(super) struct Node {
    pub address: u64,
    /// Size in grains: 16 TiB at most.
    pub grains: u32,
    pub region: u32,
    pub before: u32,
    pub after: u32,
    /// For a free range: its neighbours in its list. For other nodes `list_before` says what the node is.
    pub list_before: u32,
    pub list_after: u32,
}

const _: () = assert!(size_of::<Node>() == 32);

impl Node {
    pub(super) fn is_free(&self) -> bool {
        self.list_before == NONE || self.list_before < SPARE
    }

    pub(super) fn is_edge(&self) -> bool {
        self.list_before == EDGE
    }

    pub(super) fn is_live(&self) -> bool {
        self.list_before == LIVE
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.grains) * GRAIN
    }
}

pub(super) fn some(id: u32) -> Option<u32> {
    (id != NONE).then_some(id)
}

/// The nodes by number. Numbers are reused, the latest first, because that node is still in the CPU's cache.
#[derive(Default)]
pub(super) struct Nodes {
    table: Vec<Node>,
    /// The first spare node, plus one. 0: none.
    spare: u32,
    #[cfg(debug_assertions)]
    generations: Vec<u32>,
}

impl Nodes {
    /// A live node. The caller connects it with its neighbours.
    pub(super) fn live(&mut self, region: u32, address: u64, grains: u32) -> u32 {
        self.add(Node { address, grains, region, before: NONE, after: NONE, list_before: LIVE, list_after: NONE })
    }

    pub(super) fn edge(&mut self, region: u32, address: u64) -> u32 {
        self.add(Node { address, grains: 0, region, before: NONE, after: NONE, list_before: EDGE, list_after: NONE })
    }

    fn add(&mut self, node: Node) -> u32 {
        if let Some(id) = self.spare.checked_sub(1) {
            self.spare = self.table[id as usize].after;
            self.table[id as usize] = node;
            return id;
        }
        assert!(self.table.len() < SPARE as usize, "a heap has at most 2^32 pieces");
        self.table.push(node);
        #[cfg(debug_assertions)]
        self.generations.push(0);
        self.table.len() as u32 - 1
    }

    pub(super) fn release(&mut self, id: u32) {
        let node = &mut self.table[id as usize];
        node.list_before = SPARE;
        node.after = self.spare;
        self.spare = id + 1;
    }

    pub(super) fn hand_out(&mut self, id: u32) {
        self.table[id as usize].list_before = LIVE;
    }

    pub(super) fn connect(&mut self, before: u32, after: u32) {
        self.table[before as usize].after = after;
        self.table[after as usize].before = before;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.table.iter()
    }

    #[cfg(debug_assertions)]
    pub(super) fn generation(&mut self, id: u32) -> &mut u32 {
        &mut self.generations[id as usize]
    }
}

impl Index<u32> for Nodes {
    type Output = Node;

    fn index(&self, id: u32) -> &Node {
        &self.table[id as usize]
    }
}

impl IndexMut<u32> for Nodes {
    fn index_mut(&mut self, id: u32) -> &mut Node {
        &mut self.table[id as usize]
    }
}
