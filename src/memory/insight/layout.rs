//! From addresses to heights.
//!
//! A device's address space is mostly holes, so only what was mapped at some time gets a height; neighbours that touch
//! stay together, others get a gap. Every chunk has a few pixels whatever its size (a slab of 2 MiB beside chunks of a
//! GiB is still a line), the rest of the height is shared by bytes.

/// The height of a gap between chunks that do not touch, in pixels.
const GAP: f64 = 6.0;
/// What every chunk gets, in pixels.
const FLOOR: f64 = 5.0;

/// Where address ranges are drawn, from the bottom up.
pub(crate) struct Layout {
    height: f64,
    /// Parts between borders of chunks, by address.
    parts: Vec<Part>,
    /// The first part of each run of parts that touch.
    runs: Vec<usize>,
}

struct Part {
    from: u64,
    until: u64,
    /// Pixels above the bottom, and how many.
    bottom: f64,
    height: f64,
}

impl Layout {
    /// For chunks, of which some may have been where others were before, and blocks, which should lie in them.
    pub(crate) fn new(height: f64, chunks: &[(u64, u64)], blocks: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut ranges: Vec<(u64, u64)> = chunks.iter().copied().chain(blocks).map(until).filter(real).collect();
        ranges.sort_unstable();
        let mut runs = Vec::<(u64, u64)>::new();
        for (from, to) in ranges {
            match runs.last_mut() {
                Some((_, end)) if from <= *end => *end = to.max(*end),
                _ => runs.push((from, to)),
            }
        }
        let mut borders: Vec<u64> = chunks.iter().copied().map(until).filter(real).flat_map(|(a, b)| [a, b]).collect();
        borders.sort_unstable();
        borders.dedup();

        let mut parts = Vec::new();
        let mut starts = Vec::new();
        for (from, to) in runs {
            starts.push(parts.len());
            let inside = borders.partition_point(|&b| b <= from)..borders.partition_point(|&b| b < to);
            let mut from = from;
            for &border in borders[inside].iter().chain([&to]) {
                parts.push(Part { from, until: border, bottom: 0.0, height: 0.0 });
                from = border;
            }
        }
        // With very many parts or gaps at most a quarter of the height goes to each.
        let gap = GAP.min(height / 4.0 / starts.len().max(1) as f64);
        let floor = FLOOR.min(height / 4.0 / parts.len().max(1) as f64);
        let shared = height - gap * starts.len().saturating_sub(1) as f64 - floor * parts.len() as f64;
        let total: f64 = parts.iter().map(|part| (part.until - part.from) as f64).sum();
        let mut bottom = 0.0;
        for (i, part) in parts.iter_mut().enumerate() {
            if i > 0 && starts.binary_search(&i).is_ok() {
                bottom += gap;
            }
            part.bottom = bottom;
            part.height = floor + shared * ((part.until - part.from) as f64 / total);
            bottom += part.height;
        }
        Layout { height, parts, runs: starts }
    }

    /// Memory without holes: pixels from the top, how many, and its bytes.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (f64, f64, u64)> + '_ {
        let ends = self.runs.iter().skip(1).copied().chain([self.parts.len()]);
        self.runs.iter().zip(ends).map(|(&start, end)| {
            let (first, last) = (&self.parts[start], &self.parts[end - 1]);
            let top = last.bottom + last.height;
            (self.height - top, top - first.bottom, last.until - first.from)
        })
    }

    /// Where a range is: pixels from the top, and how many. None for what was never mapped.
    pub(crate) fn place(&self, (address, bytes): (u64, u64)) -> Option<(f64, f64)> {
        let (from, to) = until((address, bytes));
        let first = &self.parts[self.parts.partition_point(|part| part.until <= from)..];
        let last = &self.parts[..self.parts.partition_point(|part| part.from < to)];
        let (first, last) = (first.first()?, last.last()?);
        let bottom = first.at(from);
        let top = last.at(to);
        (from < to && from >= first.from && to <= last.until && top > bottom)
            .then_some(((self.height - top).max(0.0), top - bottom))
    }
}

impl Part {
    fn at(&self, address: u64) -> f64 {
        let part = address.saturating_sub(self.from) as f64 / (self.until - self.from) as f64;
        self.bottom + self.height * part.min(1.0)
    }
}

fn until((address, bytes): (u64, u64)) -> (u64, u64) {
    (address, address.saturating_add(bytes))
}

fn real(&(from, until): &(u64, u64)) -> bool {
    from < until
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn holes_are_left_out() {
        // Two neighbours, and one at the far end of the address space.
        let chunks = [(MIB, MIB), (2 * MIB, MIB), (1 << 60, 2 * MIB)];
        let layout = Layout::new(421.0, &chunks, [].into_iter());
        let [low, next, far] = chunks.map(|chunk| layout.place(chunk).unwrap());
        assert_eq!(low, (316.0, 105.0));
        assert_eq!(next, (211.0, 105.0));
        assert_eq!(far, (0.0, 205.0));
        let half = layout.place(((1 << 60) + MIB, MIB)).unwrap();
        assert_eq!(half, (0.0, 102.5), "the upper half of the upper chunk");
        assert_eq!(layout.place((3 * MIB, MIB)), None);
        assert_eq!(layout.place((MIB, 0)), None);
    }

    #[test]
    fn a_small_chunk_beside_a_huge_one_is_seen() {
        let layout = Layout::new(400.0, &[(0, 2 * MIB), (1 << 40, 1 << 37)], [].into_iter());
        assert!(layout.place((0, 2 * MIB)).unwrap().1 >= FLOOR);
        assert!(layout.place((1 << 40, 1 << 37)).unwrap().1 > 380.0);
    }

    proptest! {
        /// Higher addresses are higher up, nothing leaves the picture, and what is apart stays apart.
        #[test]
        fn order_is_kept(
            chunks in prop::collection::vec((0u64..100, 1u64..20), 1..20),
            blocks in prop::collection::vec((0u64..200, 0u64..20), 0..20),
        ) {
            let layout = Layout::new(300.0, &chunks, blocks.iter().copied());
            let places: Vec<_> = chunks.iter().chain(&blocks).map(|&range| (range, layout.place(range))).collect();
            for &((a, bytes), place) in &places {
                prop_assert_eq!(place.is_some(), bytes > 0);
                let Some((top, height)) = place else { continue };
                prop_assert!(top >= -1e-9 && height > 0.0 && top + height <= 300.0 + 1e-9);
                for &((b, others), other) in &places {
                    let Some((other, its)) = other else { continue };
                    if a + bytes <= b {
                        prop_assert!(top + 1e-9 >= other + its);
                    }
                    if a <= b && b + others <= a + bytes {
                        prop_assert!(top <= other + 1e-9 && other + its <= top + height + 1e-9);
                    }
                }
            }
        }
    }
}
