//! Data that [`GpuPool::with`](crate::GpuPool::with) splits into one part per device.

use crate::{
    error::{Error, Result},
    shard::Shard,
};

/// Data that [`GpuPool::with`](crate::GpuPool::with) splits into one part per device: rows of a mutable slice
/// ([`rows_mut`]), one item per device ([`each_mut`], or a `Vec` by value), rows of a
/// [`UnifiedBuffer`](crate::memory::UnifiedBuffer), and pairs and triples of these.
pub trait Parts {
    /// The part of one device.
    type Part: Send;

    /// Splits the data into one part per shard, in order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the data cannot be split in this way.
    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<Self::Part>>;
}

/// Rows of a mutable slice; see [`rows_mut`].
#[derive(Debug)]
pub struct RowsMut<'e, T> {
    data: &'e mut [T],
    width: usize,
}

/// Disjoint blocks of rows of `width` items, one block per device.
pub fn rows_mut<T>(data: &mut [T], width: usize) -> RowsMut<'_, T> {
    RowsMut { data, width }
}

impl<'e, T: Send> Parts for RowsMut<'e, T> {
    type Part = &'e mut [T];

    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<&'e mut [T]>> {
        let (len, width) = (self.data.len(), self.width);
        invalid_if!(width == 0 || !len.is_multiple_of(width), "rows_mut", "{len} items are not whole rows of {width}");
        let mut rest = self.data;
        let mut parts = Vec::with_capacity(shards.len());
        for shard in shards {
            let (part, behind) = rest.split_at_mut(shard.range(len / width).len() * width);
            parts.push(part);
            rest = behind;
        }
        Ok(parts)
    }
}

/// One item per device; see [`each_mut`].
#[derive(Debug)]
pub struct EachMut<'e, S>(&'e mut [S]);

/// One item of a slice for each device; the slice has as many items as there are devices.
pub fn each_mut<S>(items: &mut [S]) -> EachMut<'_, S> {
    EachMut(items)
}

impl<'e, S: Send> Parts for EachMut<'e, S> {
    type Part = &'e mut S;

    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<&'e mut S>> {
        one_each("each_mut", self.0.len(), shards)?;
        Ok(self.0.iter_mut().collect())
    }
}

/// By value: one item moves to each device.
impl<S: Send> Parts for Vec<S> {
    type Part = S;

    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<S>> {
        one_each("run", self.len(), shards)?;
        Ok(self)
    }
}

#[track_caller]
fn one_each(op: &'static str, items: usize, shards: &[Shard]) -> Result<()> {
    let devices = shards.len();
    if items == devices { Ok(()) } else { Err(Error::invalid(op, format_args!("{items} items, {devices} devices"))) }
}

impl<A: Parts, B: Parts> Parts for (A, B) {
    type Part = (A::Part, B::Part);

    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<Self::Part>> {
        Ok(self.0.split(shards)?.into_iter().zip(self.1.split(shards)?).collect())
    }
}

impl<A: Parts, B: Parts, C: Parts> Parts for (A, B, C) {
    type Part = (A::Part, B::Part, C::Part);

    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<Self::Part>> {
        let ((a, b), c) = ((self.0.split(shards)?, self.1.split(shards)?), self.2.split(shards)?);
        Ok(a.into_iter().zip(b).zip(c).map(|((a, b), c)| (a, b, c)).collect())
    }
}
