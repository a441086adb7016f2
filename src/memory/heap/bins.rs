//! Free ranges by size: 32 lists per power of two, and two levels of bits that say which lists are not empty (TLSF).
//!
//! Up to 64 grains each size has a list of its own; above that, the ranges of one list differ by less than 1 in 32.

use super::nodes::NONE;

const STEPS: usize = 32;
const ROWS: usize = 28;
pub(super) const LISTS: usize = ROWS * STEPS;

#[inline]
pub(super) fn floor(grains: u32) -> usize {
    let shift = (grains | 32).ilog2() - 5;
    (shift << 5) as usize + (grains >> shift) as usize
}

/// The first list in which every range has at least `grains`; [`LISTS`] if there is none.
#[inline]
pub(super) fn ceil(grains: u64) -> usize {
    let shift = (grains | 32).ilog2() - 5;
    u32::try_from(grains + (1 << shift) - 1).map_or(LISTS, floor)
}

pub(super) struct Bins {
    rows: u32,
    lists: [u32; ROWS],
    heads: Box<[u32; LISTS]>,
}

impl Default for Bins {
    fn default() -> Self {
        Bins { rows: 0, lists: [0; ROWS], heads: Box::new([NONE; LISTS]) }
    }
}

impl Bins {
    pub(super) fn head(&self, list: usize) -> u32 {
        self.heads[list]
    }

    /// Makes `id` the head of a list. Returns the old head.
    #[inline]
    pub(super) fn push(&mut self, list: usize, id: u32) -> u32 {
        let head = std::mem::replace(&mut self.heads[list], id);
        if head == NONE {
            self.lists[list / STEPS] |= 1 << (list % STEPS);
            self.rows |= 1 << (list / STEPS);
        }
        head
    }

    /// Removes the head of a list; `next` was behind it.
    #[inline]
    pub(super) fn set_head(&mut self, list: usize, next: u32) {
        self.heads[list] = next;
        if next == NONE {
            let row = &mut self.lists[list / STEPS];
            *row &= !(1 << (list % STEPS));
            if *row == 0 {
                self.rows &= !(1 << (list / STEPS));
            }
        }
    }

    #[inline]
    pub(super) fn next(&self, list: usize) -> Option<usize> {
        let row = list / STEPS;
        let here = self.lists.get(row)? & (!0 << (list % STEPS));
        if here != 0 {
            return Some(row * STEPS + here.trailing_zeros() as usize);
        }
        let rows = self.rows & (!0 << (row + 1));
        let row = (rows != 0).then(|| rows.trailing_zeros() as usize)?;
        Some(row * STEPS + self.lists[row].trailing_zeros() as usize)
    }

    pub(super) fn last(&self) -> Option<usize> {
        let row = self.rows.checked_ilog2()? as usize;
        Some(row * STEPS + self.lists[row].ilog2() as usize)
    }
}
