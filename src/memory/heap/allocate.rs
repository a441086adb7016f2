//! Allocate and free in the heap. Costs do not depend on the number of pieces, and no map is touched.
//!
//! Called by the cache. Invariant: a free range has no free neighbour, and is in the list of its size.

use super::{Heap, Payload, Piece, Taken, bins, nodes, nodes::NONE};
use std::ops::Range;

/// Most ranges that a search checks, over all lists. Refused ranges count, too, so that a search stays bounded.
const LOOKS: usize = 16;
/// Most ranges that a search checks in one list. The first that fits is taken: sizes differ by 3 %, and the best of
/// several made no difference (random allocations of 1 MiB to 4 GiB: reserved memory within 1 %).
const FEW: usize = 4;

impl<P: Payload> Heap<P> {
    /// Allocates `bytes` at a multiple of `align` from the first free range of the search in which `place` finds room.
    /// `place` gets the payload of a range, the positions to choose from, and the wanted bytes; it returns the first
    /// position where they can begin. None if no checked range has room.
    #[inline]
    pub(crate) fn allocate_in(
        &mut self,
        bytes: usize,
        align: usize,
        place: impl FnMut(&P, Range<usize>, usize) -> Option<usize>,
    ) -> Option<Taken<P>> {
        debug_assert!(align.is_power_of_two() && align <= 2 << 20);
        let grains = u32::try_from(bytes.div_ceil(Self::GRAIN).max(1)).ok()?;
        let (id, front) = self.search(grains, align as u64, place)?;
        Some(self.carve(id, grains, front))
    }

    /// Like [`allocate_in`](Self::allocate_in) after a failed search: checks every free range, the lowest list first.
    pub(crate) fn allocate_thoroughly(
        &mut self,
        bytes: usize,
        align: usize,
        mut place: impl FnMut(&P, Range<usize>, usize) -> Option<usize>,
    ) -> Option<Taken<P>> {
        let grains = u32::try_from(bytes.div_ceil(Self::GRAIN).max(1)).ok()?;
        let (id, front) = {
            let lists = std::iter::successors(self.bins.next(bins::floor(grains)), |list| self.bins.next(list + 1));
            let mut ranges = lists.flat_map(|list| self.list(list));
            ranges.find_map(|id| Some((id, self.fit(id, grains, align as u64, &mut place)?)))?
        };
        Some(self.carve(id, grains, front))
    }

    /// Keeps the first `bytes` of a live piece. The rest becomes free, with the payload `rest`.
    pub(crate) fn shrink(&mut self, piece: Piece, bytes: usize, rest: P) {
        let grains = u32::try_from(bytes.div_ceil(Self::GRAIN).max(1)).unwrap_or(u32::MAX);
        let node = self.nodes[piece.id];
        assert!(node.is_live(), "only a live piece has anything to give");
        if grains >= node.grains {
            return;
        }
        let at = node.address + u64::from(grains) * nodes::GRAIN;
        let later = self.live(node.region, at, node.grains - grains);
        self.nodes[piece.id].grains = grains;
        self.nodes.connect(piece.id, later);
        self.nodes.connect(later, node.after);
        self.free_grains += u64::from(node.grains - grains);
        self.settle(later, rest);
    }

    /// Frees a piece. `payload` is what must be known when its bytes are used again.
    #[inline]
    pub(crate) fn free(&mut self, piece: Piece, payload: P) {
        let id = piece.id;
        let node = &self.nodes[id];
        assert!(node.is_live(), "a piece is freed once");
        self.free_grains += u64::from(node.grains);
        self.live -= 1;
        #[cfg(debug_assertions)]
        {
            assert_eq!(*self.nodes.generation(id), piece.generation, "a piece is freed once");
            *self.nodes.generation(id) += 1;
        }
        self.settle(id, payload);
    }

    #[inline]
    fn search(
        &self,
        grains: u32,
        align: u64,
        mut place: impl FnMut(&P, Range<usize>, usize) -> Option<usize>,
    ) -> Option<(u32, u32)> {
        // From the list `sure` on every range is long enough, wherever it begins. At most half of the checks are spent
        // on the lists before it, so that some are left for a list that cannot fail.
        let sure = bins::ceil(u64::from(grains) + (align / nodes::GRAIN).saturating_sub(1));
        let mut looks = LOOKS;
        let mut list = self.bins.next(bins::floor(grains))?;
        loop {
            let keep = if list < sure { LOOKS / 2 } else { 0 };
            let mut few = FEW.min(looks - keep);
            let mut id = self.bins.head(list);
            while few > 0 && id != NONE {
                let node = &self.nodes[id];
                let after = node.list_after;
                if let Some(front) = self.fit(id, grains, align, &mut place) {
                    return Some((id, front));
                }
                id = after;
                few -= 1;
                looks -= 1;
            }
            if looks == 0 {
                return None;
            }
            list = self.bins.next(if looks == keep { sure } else { list + 1 })?;
        }
    }

    /// Where in a free range a piece may begin, in grains from the range's start.
    #[inline]
    fn fit(
        &self,
        id: u32,
        grains: u32,
        align: u64,
        place: &mut impl FnMut(&P, Range<usize>, usize) -> Option<usize>,
    ) -> Option<u32> {
        let node = &self.nodes[id];
        let (payload, room, bytes) =
            (&self.payloads[id as usize], node.bytes() as usize, grains as usize * Self::GRAIN);
        let mut front = gap(node.address, align);
        // The position that `place` returns need not be aligned.
        while u64::from(grains) + front <= u64::from(node.grains) {
            let at = (place(payload, front as usize * Self::GRAIN..room, bytes)? as u64).div_ceil(nodes::GRAIN);
            let aligned = at + gap(node.address + at * nodes::GRAIN, align);
            if aligned == at && at + u64::from(grains) <= u64::from(node.grains) {
                return Some(aligned as u32);
            }
            front = aligned;
        }
        None
    }

    /// Cuts a piece out of a free range that is long enough.
    fn carve(&mut self, id: u32, grains: u32, front: u32) -> Taken<P> {
        let range = self.nodes[id];
        let rest = range.grains - front - grains;
        let bytes = grains as usize * Self::GRAIN;
        let address = range.address + u64::from(front) * nodes::GRAIN;
        let slot = id as usize;
        let (piece, payload) = match (front, rest) {
            (0, 0) => {
                self.unlist(id);
                self.nodes.hand_out(id);
                (id, std::mem::take(&mut self.payloads[slot]))
            }
            // The rest keeps the node: it often stays in its list, and freeing the piece is then the exact reverse.
            (0, _) => {
                let piece = self.live(range.region, address, grains);
                self.nodes.connect(range.before, piece);
                self.nodes.connect(piece, id);
                self.nodes[id].address += bytes as u64;
                self.resize(id, rest);
                let later = self.payloads[slot].split_off(bytes);
                (piece, std::mem::replace(&mut self.payloads[slot], later))
            }
            _ => {
                let piece = self.live(range.region, address, grains);
                let mut payload = self.payloads[slot].split_off(front as usize * Self::GRAIN);
                self.nodes.connect(id, piece);
                self.resize(id, front);
                if rest > 0 {
                    let later = self.live(range.region, address + bytes as u64, rest);
                    self.payloads[later as usize] = payload.split_off(bytes);
                    self.nodes.connect(piece, later);
                    self.nodes.connect(later, range.after);
                    self.list_up(later);
                } else {
                    self.nodes.connect(piece, range.after);
                }
                (piece, payload)
            }
        };
        self.free_grains -= u64::from(grains);
        self.live += 1;
        let piece = Piece {
            id: piece,
            #[cfg(debug_assertions)]
            generation: *self.nodes.generation(piece),
        };
        Taken { piece, region: range.region, address, bytes, payload }
    }

    /// Makes a node that is in no list free, and joins it with its free neighbours.
    pub(super) fn settle(&mut self, id: u32, mut payload: P) {
        let node = self.nodes[id];
        let (before, after) = (node.before, node.after);
        match (self.nodes[before].is_free(), self.nodes[after].is_free()) {
            (false, false) => {
                self.payloads[id as usize] = payload;
                self.list_up(id);
            }
            (false, true) => {
                payload.join(node.bytes() as usize, std::mem::take(&mut self.payloads[after as usize]));
                self.payloads[after as usize] = payload;
                self.nodes.connect(before, after);
                self.nodes.release(id);
                self.nodes[after].address = node.address;
                self.resize(after, self.nodes[after].grains + node.grains);
            }
            (true, right) => {
                let range = self.nodes[before];
                let mut grains = range.grains + node.grains;
                let known = &mut self.payloads[before as usize];
                known.join(range.bytes() as usize, payload);
                self.nodes.release(id);
                if right {
                    let later = std::mem::take(&mut self.payloads[after as usize]);
                    self.payloads[before as usize].join((range.bytes() + node.bytes()) as usize, later);
                    let gone = self.nodes[after];
                    grains += gone.grains;
                    self.unlist(after);
                    self.nodes.connect(before, gone.after);
                    self.nodes.release(after);
                } else {
                    self.nodes.connect(before, after);
                }
                self.resize(before, grains);
            }
        }
    }

    /// A node for a live piece, with room for its payload.
    pub(super) fn live(&mut self, region: u32, address: u64, grains: u32) -> u32 {
        let id = self.nodes.live(region, address, grains);
        self.make_room(id);
        id
    }

    /// Makes room for the node's payload: every node has one.
    pub(super) fn make_room(&mut self, id: u32) {
        if id as usize == self.payloads.len() {
            self.payloads.push(P::default());
        }
    }

    /// Changes the size of a free range, and moves it to another list if needed.
    #[inline]
    pub(super) fn resize(&mut self, id: u32, grains: u32) {
        let (old, new) = (bins::floor(self.nodes[id].grains), bins::floor(grains));
        if old != new {
            self.leave(id, old);
        }
        self.nodes[id].grains = grains;
        if old != new {
            self.enter(id, new);
        }
    }

    pub(super) fn list_up(&mut self, id: u32) {
        self.enter(id, bins::floor(self.nodes[id].grains));
    }

    pub(super) fn unlist(&mut self, id: u32) {
        self.leave(id, bins::floor(self.nodes[id].grains));
    }

    #[inline]
    fn enter(&mut self, id: u32, list: usize) {
        let head = self.bins.push(list, id);
        let node = &mut self.nodes[id];
        node.list_before = NONE;
        node.list_after = head;
        if head != NONE {
            self.nodes[head].list_before = id;
        }
    }

    #[inline]
    fn leave(&mut self, id: u32, list: usize) {
        let node = &self.nodes[id];
        let (before, after) = (node.list_before, node.list_after);
        if after != NONE {
            self.nodes[after].list_before = before;
        }
        if before == NONE {
            self.bins.set_head(list, after);
        } else {
            self.nodes[before].list_after = after;
        }
    }
}

/// Grains from `address` to the next multiple of `align`.
#[inline]
fn gap(address: u64, align: u64) -> u64 {
    (address.wrapping_neg() & (align - 1)) / nodes::GRAIN
}
