//! Which part of the data belongs to which device.
//!
//! The split is balanced: 9 items on 4 devices are 3, 2, 2, 2 (not 3, 3, 3, 0, as `torch.chunk` has it). With weights the
//! remainder goes to the largest fractions. A shard may be empty: its closure runs all the same, so that collectives
//! match.

use std::{ops::Range, sync::Arc};

/// A device's share of a scope's data: given to the closure, cheap to clone, free of lifetimes.
///
/// ```
/// use gpu_pool::{GpuPool, Shard};
/// let pool = GpuPool::builder().host(4).build()?;
/// let rows: Vec<u32> = (0..9).collect();
/// let counts = pool.run(|_dev, shard| Ok(shard.of(&rows).len()))?;
/// assert_eq!(counts, [3, 2, 2, 2]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Shard {
    index: usize,
    count: usize,
    weights: Option<Arc<[f64]>>,
}

impl Shard {
    /// `weights`, when given, has one positive number per member.
    pub(crate) fn new(index: usize, count: usize, weights: Option<Arc<[f64]>>) -> Self {
        debug_assert!(index < count && weights.as_ref().is_none_or(|w| w.len() == count));
        Shard { index, count, weights }
    }

    /// The rank of this shard's device in the gang.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many shards there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// This shard's part of `len` items.
    pub fn range(&self, len: usize) -> Range<usize> {
        match &self.weights {
            None => balanced(self.index, self.count, len),
            Some(weights) => by_weight(weights, self.index, len),
        }
    }

    /// This shard's part of a slice.
    pub fn of<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        &all[self.range(all.len())]
    }

    /// This shard's rows of a row-major matrix with rows of `width` items.
    ///
    /// # Panics
    /// When `width` is 0 or does not divide the slice's length; in a scope that becomes
    /// [`Error::Panicked`](crate::Error::Panicked).
    #[track_caller]
    pub fn rows<'a, T>(&self, all: &'a [T], width: usize) -> &'a [T] {
        assert!(
            width > 0 && all.len().is_multiple_of(width),
            "{} items are not a whole number of rows of {width}",
            all.len()
        );
        let rows = self.range(all.len() / width);
        &all[rows.start * width..rows.end * width]
    }
}

/// The `index`-th of `count` parts of `len` items, larger parts first.
pub(crate) fn balanced(index: usize, count: usize, len: usize) -> Range<usize> {
    let (each, more) = (len / count, len % count);
    let start = index * each + index.min(more);
    start..start + each + usize::from(index < more)
}

/// Largest remainder (Hare): everyone gets the whole part of its ideal share, the rest goes to the largest fractions.
fn by_weight(weights: &[f64], index: usize, len: usize) -> Range<usize> {
    let total: f64 = weights.iter().sum();
    let ideal: Vec<f64> = weights.iter().map(|w| w / total * len as f64).collect();
    let mut parts: Vec<usize> = ideal.iter().map(|x| x.floor() as usize).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| ideal[b].fract().total_cmp(&ideal[a].fract()).then(a.cmp(&b)));
    // Rounding of huge lengths may hand out one too many; take it back from the smallest fractions.
    let mut given: usize = parts.iter().sum();
    while given > len {
        let i = *order.iter().rev().find(|&&i| parts[i] > 0).expect("the parts add up to more than nothing");
        parts[i] -= 1;
        given -= 1;
    }
    for &i in order.iter().cycle().take(len - given) {
        parts[i] += 1;
    }
    let start = parts[..index].iter().sum();
    start..start + parts[index]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_remainder_goes_to_the_first() {
        let parts: Vec<_> = (0..4).map(|i| balanced(i, 4, 9).len()).collect();
        assert_eq!(parts, [3, 2, 2, 2]);
    }

    #[test]
    fn weights_three_to_one() {
        let w: Arc<[f64]> = [3.0, 1.0].into();
        assert_eq!(Shard::new(0, 2, Some(w.clone())).range(10), 0..8);
        assert_eq!(Shard::new(1, 2, Some(w)).range(10), 8..10);
    }

    proptest! {
        #[test]
        fn shards_tile_the_data(len in 0usize..100_000, count in 1usize..65, weighted: bool, seed in 1u64..1000) {
            let weights: Option<Arc<[f64]>> =
                weighted.then(|| (0..count).map(|i| 0.1 + ((seed * (i as u64 + 7)) % 97) as f64).collect());
            let mut next = 0;
            for i in 0..count {
                let range = Shard::new(i, count, weights.clone()).range(len);
                prop_assert_eq!(range.start, next);
                next = range.end;
            }
            prop_assert_eq!(next, len);
        }
    }
}
