//! [`Layout`]: rows, columns, leading dimension and batches of the matrices in a view.
//!

use crate::{
    driver::{Address, GemmMatrix},
    error::{Error, Result},
};
use std::{
    fmt,
    ops::{Bound, RangeBounds},
};

pub(super) const DIMS: usize = 3;

/// Where elements of a batch of matrices lie in a view. Row-major; `rows` and `cols` are those of the matrix as used.
#[derive(Clone, Copy)]
pub struct Layout {
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) lead: usize,
    pub(super) transposed: bool,
    /// The number of matrices and the distance between them, by dimension. The last `depth` are in use.
    pub(super) batch: [(usize, usize); DIMS],
    pub(super) depth: usize,
}

impl Layout {
    pub(super) fn dense(rows: usize, cols: usize) -> Self {
        Layout { first: 0, rows, cols, lead: cols, transposed: false, batch: [(1, 0); DIMS], depth: 0 }
    }

    /// `None` when the shapes do not fit.
    pub(super) fn product(&self, other: &Self) -> Option<Self> {
        let mut batch = [(1, 0); DIMS];
        let mut stride = self.rows.saturating_mul(other.cols);
        for (to, (&(a, _), &(b, _))) in batch.iter_mut().zip(self.batch.iter().zip(&other.batch)).rev() {
            let count = if a == 1 { b } else { a };
            if self.cols != other.rows || ![1, count].contains(&b) {
                return None;
            }
            *to = (count, stride);
            stride = stride.saturating_mul(count);
        }
        let depth = self.depth.max(other.depth);
        Some(Layout { batch, depth, ..Layout::dense(self.rows, other.cols) }.normal())
    }

    pub(super) fn shape(&self) -> [usize; DIMS + 2] {
        let [x, y, z] = self.batch.map(|(count, _)| count);
        [x, y, z, self.rows, self.cols]
    }

    pub(super) fn count(&self) -> usize {
        self.batch.iter().fold(1, |all, &(count, _)| all.saturating_mul(count))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Without distances that lead to no element. Those were not checked, and drivers multiply them.
    pub(super) fn normal(mut self) -> Self {
        let (stored, row) = if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        let empty = self.is_empty();
        for (count, stride) in &mut self.batch {
            if empty || *count == 1 {
                *stride = 0;
            }
        }
        if empty {
            self.first = 0;
        }
        if empty || stored == 1 {
            self.lead = row;
        }
        self
    }

    pub(super) fn elements(&self) -> Option<usize> {
        if self.is_empty() {
            return Some(0);
        }
        self.shape().iter().try_fold(1usize, |all, &n| all.checked_mul(n))
    }

    /// From an element to the one below it, and to the one beside it.
    pub(super) fn steps(&self) -> (usize, usize) {
        if self.transposed { (1, self.lead) } else { (self.lead, 1) }
    }

    fn dims(&self) -> [(usize, usize); DIMS + 2] {
        let ([x, y, z], (down, right)) = (self.batch, self.steps());
        [x, y, z, (self.rows, down), (self.cols, right)]
    }

    fn end(&self) -> Option<usize> {
        if self.is_empty() {
            return Some(self.first);
        }
        let last = self.dims().iter().try_fold(self.first, |at, &(n, step)| at.checked_add((n - 1).checked_mul(step)?));
        last?.checked_add(1)
    }

    #[track_caller]
    pub(super) fn within(self, op: &'static str, len: usize) -> Result<Self> {
        match self.end() {
            Some(end) if end <= len => Ok(self.normal()),
            _ => Err(Error::invalid(op, format_args!("{self} in a view of {len} elements"))),
        }
    }

    #[track_caller]
    pub(super) fn strided(op: &'static str, len: usize, rows: usize, cols: usize, lead: usize) -> Result<Self> {
        invalid_if!(lead < cols, op, "rows of {cols} elements at a leading dimension of {lead}");
        Layout { lead, ..Layout::dense(rows, cols) }.within(op, len)
    }

    /// Part `range` of `0..len`, which counts `what`.
    #[track_caller]
    pub(super) fn range(
        &self,
        op: &'static str,
        what: &str,
        len: usize,
        range: impl RangeBounds<usize>,
    ) -> Result<(usize, usize)> {
        let after = |bound: Bound<&usize>, unbounded, step| match bound {
            Bound::Included(&at) => at.saturating_add(step),
            Bound::Excluded(&at) => at.saturating_add(1 - step),
            Bound::Unbounded => unbounded,
        };
        let (start, end) = (after(range.start_bound(), 0, 0), after(range.end_bound(), len, 1));
        invalid_if!(start > end || end > len, op, "{what} {start}..{end} of {self}");
        Ok((start, end - start))
    }

    #[track_caller]
    pub(super) fn deeper(mut self, op: &'static str, outer: bool, count: usize, stride: usize) -> Result<Self> {
        invalid_if!(self.depth == DIMS, op, "{self} has {DIMS} dimensions of batches, the most");
        if outer {
            self.batch[DIMS - 1 - self.depth] = (count, stride);
        } else {
            self.batch.rotate_left(1);
            self.batch[DIMS - 1] = (count, stride);
        }
        self.depth += 1;
        Ok(self)
    }

    #[track_caller]
    pub(super) fn part(&self, op: &'static str, what: &str, whole: usize, parts: usize) -> Result<usize> {
        invalid_if!(parts == 0 || !whole.is_multiple_of(parts), op, "{parts} equal parts of the {what} of {self}");
        Ok(whole / parts)
    }

    /// No element belongs to two matrices: a step of each dimension goes beyond all elements of the shorter steps.
    pub(super) fn is_disjoint(&self) -> bool {
        let mut dims = self.dims();
        dims.sort_unstable_by_key(|&(_, step)| step);
        let mut reach = 1usize;
        self.is_empty()
            || dims.iter().filter(|(n, _)| *n > 1).all(|&(n, step)| {
                let apart = step >= reach;
                reach = reach.saturating_add((n - 1).saturating_mul(step));
                apart
            })
    }

    /// A matrix that fills a view of `len` elements.
    #[track_caller]
    pub(super) fn filling(op: &'static str, len: usize, rows: usize, cols: usize) -> Result<Self> {
        match rows.checked_mul(cols) {
            Some(n) if n == len => Ok(Layout::dense(rows, cols)),
            _ => Err(Error::invalid(op, format_args!("{rows} x {cols} of {len} elements"))),
        }
    }

    pub(super) fn in_memory(&self, view: Address, size: usize) -> GemmMatrix {
        let address = view + (self.first * size) as u64;
        GemmMatrix { address, transposed: self.transposed, lead: self.lead, stride: 0 }
    }
}

/// "2 x 3", "4 of 2 x 3 with a stride of 8", "2 of 4 of 2 x 3 with strides of 6 and 12".
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = &self.batch[DIMS - self.depth..];
        if self.count() != 1 {
            used.iter().try_for_each(|(count, _)| write!(f, "{count} of "))?;
        }
        write!(f, "{} x {}", self.rows, self.cols)?;
        if self.lead != if self.transposed { self.rows } else { self.cols } {
            write!(f, " with a leading dimension of {}", self.lead)?;
        }
        let mut dense = self.rows.saturating_mul(self.cols);
        let is_dense = used.iter().rev().all(|&(count, stride)| {
            let fits = count <= 1 || stride == dense;
            dense = dense.saturating_mul(count);
            fits
        });
        if !is_dense {
            let strides: Vec<_> = used.iter().map(|(_, stride)| stride.to_string()).collect();
            let words = if used.len() == 1 { "a stride" } else { "strides" };
            write!(f, " with {words} of {}", strides.join(" and "))?;
        }
        Ok(())
    }
}
debug_as!(Layout, |self| "{}", self);
