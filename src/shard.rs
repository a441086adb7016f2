//! Shards: the division of data among devices.
//!
//! The division is balanced: 9 items on 4 devices are 3, 2, 2, 2 (`torch.chunk` makes 3, 3, 3, 0). With weights the
//! remainder goes to the largest fractions. A shard may be empty; its closure still runs, so that collectives match.

use std::{ops::Range, sync::Arc};

/// A device's share of a scope's data. The closure gets it; it is cheap to clone and has no lifetime.
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
    pub(crate) fn new(index: usize, count: usize, weights: Option<Arc<[f64]>>) -> Self {
        debug_assert!(index < count && weights.as_ref().is_none_or(|w| w.len() == count));
        Shard { index, count, weights }
    }

    /// The rank of this shard's device in the gang.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The number of shards.
    pub fn count(&self) -> usize {
        self.count
    }

    /// This shard's part of `len` items.
    pub fn range(&self, len: usize) -> Range<usize> {
        self.range_of(self.index, len)
    }

    /// The part of `len` items that belongs to the shard with the index `rank`, for example a peer's rows. The parts of
    /// all ranks, in order, are `0..len` without a gap.
    ///
    /// # Panics
    /// If there is no such rank; in a scope this becomes [`Error::Panicked`](crate::Error::Panicked).
    #[track_caller]
    pub fn range_of(&self, rank: usize, len: usize) -> Range<usize> {
        assert!(rank < self.count, "rank {rank} of {} shards", self.count);
        match &self.weights {
            None => balanced(rank, self.count, len),
            Some(weights) => by_weight(weights, rank, len),
        }
    }

    /// This shard's part of a slice.
    pub fn of<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        &all[self.range(all.len())]
    }

    /// This shard's rows of a row-major matrix with rows of `width` items.
    ///
    /// # Panics
    /// If `width` is 0 or does not divide the slice's length; in a scope this becomes
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
pub fn balanced(index: usize, count: usize, len: usize) -> Range<usize> {
    let (each, more) = (len / count, len % count);
    let start = index * each + index.min(more);
    start..start + each + usize::from(index < more)
}

/// Up to this number of items, `f64` gives every share with its fraction, and the splits stay as in earlier versions.
/// For more items the error of `f64` would come near to whole items.
const MOST_BY_FLOAT: usize = 1 << 40;

/// Largest remainder method (Hare).
fn by_weight(weights: &[f64], index: usize, len: usize) -> Range<usize> {
    let weights = scaled(weights);
    // The whole part, and a number that grows with the fraction.
    let shares: Vec<(usize, u128)> = if len <= MOST_BY_FLOAT {
        let total: f64 = weights.iter().map(|&w| w as f64).sum();
        let ideal = weights.iter().map(|&w| w as f64 / total * len as f64);
        ideal.map(|x| (x.floor() as usize, x.fract().to_bits().into())).collect()
    } else {
        let total = weights.iter().sum();
        weights.iter().map(|&w| divided(len, w, total)).collect()
    };
    let mut parts: Vec<usize> = shares.iter().map(|&(whole, _)| whole).collect();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by(|&a, &b| shares[b].1.cmp(&shares[a].1).then(a.cmp(&b)));
    // Rounding may have given one item too many, which the smallest fractions give back.
    let given: usize = parts.iter().sum();
    order.iter().take(len.saturating_sub(given)).for_each(|&i| parts[i] += 1);
    let giving = order.iter().rev().filter(|&&i| shares[i].0 > 0);
    giving.take(given.saturating_sub(len)).for_each(|&i| parts[i] -= 1);
    let start = parts[..index].iter().sum();
    start..start + parts[index]
}

/// The weights as integers with the same ratios, small enough that their sum does not overflow. A weight that is
/// smaller than the largest by more than a factor of 2^100 may become 0: its share is less than a billionth of an item.
fn scaled(weights: &[f64]) -> Vec<u128> {
    // A positive float is `mantissa * 2^exponent`, apart from a bias; a subnormal one has exponent 1 and no hidden bit.
    let exponent = |w: f64| (w.to_bits() >> 52).max(1);
    let mantissa = |w: f64| (w.to_bits() & ((1 << 52) - 1)) | (u64::from(w.is_normal()) << 52);
    let largest = weights.iter().map(|&w| exponent(w)).max().unwrap_or(1);
    let below = |w: f64| (largest - exponent(w)).min(127) as u32;
    weights.iter().map(|&w| (u128::from(mantissa(w)) << 50) >> below(w)).collect()
}

/// Of `len * weight / total`, whose product may have more than 128 bits: a long division, bit by bit.
fn divided(len: usize, weight: u128, total: u128) -> (usize, u128) {
    (0..usize::BITS).rev().fold((0, 0), |(quotient, rest), bit| {
        let rest = 2 * rest + if len >> bit & 1 == 1 { weight } else { 0 };
        (2 * quotient + (rest / total) as usize, rest % total)
    })
}

#[cfg(test)]
#[path = "../tests/unit/shard_tests.rs"]
mod tests;
