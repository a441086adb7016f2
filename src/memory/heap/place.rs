//! Allocate and free: nothing here depends on how many pieces there are, and no map is touched.

use super::{Heap, Payload, Piece, Taken, bins, nodes, nodes::NONE};

/// Ranges that a search looks at, over all lists. Refused ones count, so that a search stays bounded.
const LOOKS: usize = 16;
/// Ranges that it looks at in one list before it takes the best that it has seen.
const FEW: usize = 4;

impl<P: Payload> Heap<P> {
    /// `bytes` at a multiple of `align` (a power of two, 2 MiB at most), from a free range whose payload `accept` likes;
    /// none if there is no such range among those looked at: the first few of each list, the nearest sizes first, 16 in
    /// all. If `accept` likes everything, this succeeds wherever a range of `bytes + align`, rounded up to the next
    /// list's size, is free. What is left of the range, on both sides, stays free and keeps its part of the payload.
    pub(crate) fn allocate(&mut self, bytes: usize, align: usize, accept: impl FnMut(&P) -> bool) -> Option<Taken<P>> {
        debug_assert!(align.is_power_of_two() && align <= 2 << 20);
        let grains = u32::try_from(bytes.div_ceil(Self::GRAIN).max(1)).ok()?;
        let id = self.search(grains, align as u64, accept)?;
        Some(self.carve(id, grains, align as u64))
    }

    /// Gives a piece back, with what must be known when its bytes are used again.
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

    fn search(&self, grains: u32, align: u64, mut accept: impl FnMut(&P) -> bool) -> Option<u32> {
        // From the list `sure` on every range is long enough wherever it begins. In those before it half of the looks
        // may be spent, so that there are some left for a list that cannot disappoint.
        let sure = bins::ceil(u64::from(grains) + (align / nodes::GRAIN).saturating_sub(1));
        let mut looks = LOOKS;
        let mut next = self.bins.next(bins::floor(grains));
        while let Some(list) = next {
            let keep = if list < sure { LOOKS / 2 } else { 0 };
            let mut best: Option<(u32, u32)> = None;
            for id in self.list(list).take(FEW.min(looks - keep)) {
                looks -= 1;
                let node = &self.nodes[id];
                let better = best.is_none_or(|(size, _)| node.grains < size);
                if better
                    && u64::from(grains) + gap(node.address, align) <= node.grains.into()
                    && accept(&self.payloads[id as usize])
                {
                    best = Some((node.grains, id));
                    if node.grains == grains {
                        break;
                    }
                }
            }
            if let Some((_, id)) = best {
                return Some(id);
            }
            next = match looks - keep {
                0 if keep == 0 => None,
                0 => self.bins.next(sure),
                _ => self.bins.next(list + 1),
            };
        }
        None
    }

    /// Cuts a piece out of a free range that is long enough.
    fn carve(&mut self, id: u32, grains: u32, align: u64) -> Taken<P> {
        let range = self.nodes[id];
        let front = gap(range.address, align) as u32;
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
            // The rest keeps the node, as it often stays in its list, and freeing the piece is then the exact reverse.
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

    /// A node that is in no list becomes free, and one with its free neighbours.
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

    /// A node for a live piece, with a place for its payload.
    pub(super) fn live(&mut self, region: u32, address: u64, grains: u32) -> u32 {
        let id = self.nodes.live(region, address, grains);
        self.payloads.resize_with(self.nodes.len(), P::default);
        id
    }

    /// A free range gets another size, and moves to another list if it must.
    pub(super) fn resize(&mut self, id: u32, grains: u32) {
        if bins::floor(self.nodes[id].grains) == bins::floor(grains) {
            self.nodes[id].grains = grains;
        } else {
            self.unlist(id);
            self.nodes[id].grains = grains;
            self.list_up(id);
        }
    }

    pub(super) fn list_up(&mut self, id: u32) {
        let list = bins::floor(self.nodes[id].grains);
        let head = self.bins.head(list);
        self.nodes[id].list_before = NONE;
        self.nodes[id].list_after = head;
        if head != NONE {
            self.nodes[head].list_before = id;
        }
        self.bins.set_head(list, id);
    }

    pub(super) fn unlist(&mut self, id: u32) {
        let node = self.nodes[id];
        if node.list_after != NONE {
            self.nodes[node.list_after].list_before = node.list_before;
        }
        if node.list_before == NONE {
            self.bins.set_head(bins::floor(node.grains), node.list_after);
        } else {
            self.nodes[node.list_before].list_after = node.list_after;
        }
    }
}

/// Grains from `address` to the next multiple of `align`.
fn gap(address: u64, align: u64) -> u64 {
    (address.wrapping_neg() & (align - 1)) / nodes::GRAIN
}
