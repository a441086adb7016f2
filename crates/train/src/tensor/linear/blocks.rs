//! Products of many rows, with their exchanges beside them. Products and exchanges in blocks take longer than whole
//! ones, so only what is large is cut.

use super::super::{balanced, fits, gather_rows, overlapped, overlaps};
use super::LinearPart;
use crate::runtime::{DeviceInternals, GroupInternals};
use gpu_pool::{AsView, DeviceBuffer, DeviceView, DeviceViewMut, Element, Group, Result, kernel::Float};
use std::ops::Range;

/// Least bytes of the rows that are exchanged, between GPUs whose kernels meet: of sums, and of a gather, whose product
/// has as few parts as there are members. On two H200s sums of 64 MB were no faster beside the products, and those of
/// 32 MB slower; a gather of 32 MB was 1.14 times as fast.
const SUMMED: usize = 96 << 20;
const GATHERED: usize = 32 << 20;
/// Least multiplications of their product.
const WORK: usize = 1 << 35;
/// Blocks end where a tile of the product ends, whatever the library's tiles are.
const TILE: usize = 128;

/// Of each block its rows in each of the `parts`.
fn cut(parts: &[Range<usize>], weights: &[u16]) -> Vec<Vec<Range<usize>>> {
    let (count, upto) = (weights.len().max(1), |i| weights.iter().take(i).map(|&w| usize::from(w)).sum::<usize>());
    let place = |part: &Range<usize>, i: usize| match part.len() / upto(count).max(1) * upto(i) {
        _ if i == count => part.end,
        rows if rows < TILE => part.start + rows,
        rows => part.start + rows / TILE * TILE,
    };
    (0..count).map(|i| parts.iter().map(|part| place(part, i)..place(part, i + 1)).collect()).collect()
}

impl<T: Float + Element> LinearPart<T> {
    /// One weight: nothing is cut.
    fn weights(&self, group: &Group<'_>, least: usize, [rows, exchanged, inner]: [usize; 3]) -> &'static [u16] {
        let len = rows.saturating_mul(exchanged);
        let (bytes, work) = (len.saturating_mul(size_of::<T>()), len.saturating_mul(inner));
        match self.blocks {
            _ if !overlaps(group) => &[1],
            Some(blocks) => blocks,
            None if bytes < least || work < WORK || !group.kernels_meet() => &[1],
            None => &[2, 1, 1],
        }
    }

    /// The products of the rows, by blocks of some rows of each of the `parts`. `sum` gets each block's products, one
    /// after the other; it waits for no later product.
    pub(super) fn sums(
        &self,
        group: &Group<'_>,
        (x, rows): (&impl AsView<Elem = T>, usize),
        parts: &[Range<usize>],
        mut sum: impl FnMut(&Group<'_>, DeviceViewMut<'_, T>, &[Range<usize>]) -> Result<()>,
    ) -> Result<DeviceBuffer<T>> {
        let (x, dev, inputs, outputs) = (x.view(), group.device(), self.inputs, self.outputs);
        fits("linear", "x", x.len(), (rows, inputs))?;
        let mut y = Self::room(dev, [rows, outputs, inputs])?;
        let (blocks, mut done) = (cut(parts, self.weights(group, SUMMED, [rows, outputs, inputs])), 0);
        for run in blocks.iter().flat_map(|block| block.chunk_by(|a, b| a.end == b.start)) {
            let (start, end, from) = (run[0].start, run[run.len() - 1].end, done);
            done += (end - start) * outputs;
            self.multiply(dev, x.slice(start * inputs..end * inputs), &mut y.slice_mut(from..done), false)?;
            if blocks.len() > 1 {
                dev.record_early("linear")?;
            }
        }
        done = 0;
        overlapped(group, blocks.len() > 1, |group| {
            blocks.iter().try_for_each(|block| {
                let from = done;
                done += block.iter().map(|rows| rows.len() * outputs).sum::<usize>();
                sum(group, y.slice_mut(from..done), block)
            })
        })?;
        Ok(y)
    }

    /// All rows of a matrix of which `part` is the own ones, and their products.
    pub(super) fn gathered(
        &self,
        group: &Group<'_>,
        part: &impl AsView<Elem = T>,
        (rows, back): (usize, bool),
    ) -> Result<(DeviceBuffer<T>, DeviceBuffer<T>)> {
        let (inner, cols) = if back { (self.outputs, self.inputs) } else { (self.inputs, self.outputs) };
        let (part, beside) = (part.view(), self.weights(group, GATHERED, [rows, inner, cols]).len() > 1);
        let own = if beside { balanced(group.rank(), group.count(), rows) } else { 0..0 };
        let mut y = Self::room(group.device(), [rows, cols, inner])?;
        let mut product = |x: DeviceView<'_, T>, rows: Range<usize>| {
            self.multiply(group.device(), x, &mut y.slice_mut(rows.start * cols..rows.end * cols), back)
        };
        if beside {
            // The gather waits for what is before this, not for the product.
            group.device().record_early("linear")?;
            product(part, own.clone())?;
        }
        let all = overlapped(group, beside, |group| gather_rows(group, &part, rows, inner))?;
        for rest in [0..own.start, own.end..rows] {
            product(all.slice(rest.start * inner..rest.end * inner), rest)?;
        }
        Ok((all, y))
    }
}
