//! Tensor parallel: layers whose weights lie on several devices (Megatron-LM: Shoeybi et al., 2019; with sequence
//! parallel norms: Korthikanti et al., 2022).
//!
//! A layer holds this device's part of the weights and their gradients. With `accumulate` gradients are added to those
//! of earlier calls. Of half types the sums are in `f32` ([`Wide`]), and the gradients are these, rounded. Invariant: a
//! collective of a step back is enqueued before the weights' gradients, on its own stream, so both run in parallel.

mod embedding;
#[cfg(feature = "blas")]
mod linear;
mod loss;
mod norm;

pub use embedding::{Indices, VocabularyEmbedding};
#[cfg(feature = "blas")]
pub use linear::{ColumnLinear, LinearPart, RowLinear};
pub use loss::vocabulary_cross_entropy;
pub use norm::SequenceNorm;

use crate::prelude::*;
use crate::runtime::{DeviceInternals, ErrorInternals, GroupInternals, OpSite, balanced};
use crate::update::{add_up, wide_len};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, Element, Error, Group, ReduceOp, Result, kernel::Float};
use std::ops::Range;

/// The part of `len` columns or rows for member `rank` of the group. Parts are whole `unit`s and as equal as possible,
/// larger ones first: 7 in units of 1 on 3 members are 3, 2, 2. The heads of attention are units, so no head is cut.
///
/// ```
/// # use gpu_pool_train::part_of;
/// let pool = gpu_pool::GpuPool::builder().host(3).build()?;
/// let parts = pool.run(|dev, _| {
///     let group = dev.group(&[0, 1, 2])?;
///     Ok((part_of(&group, group.rank(), 7, 1)?, part_of(&group, group.rank(), 4 * 64, 64)?))
/// })?;
/// assert_eq!(parts, [(0..3, 0..128), (3..5, 128..192), (5..7, 192..256)]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] if `len` is not a multiple of `unit`, or there is no such member.
#[track_caller]
pub fn part_of(group: &Group<'_>, rank: usize, len: usize, unit: usize) -> Result<Range<usize>> {
    invalid_if!(unit == 0 || !len.is_multiple_of(unit), "part_of", "{len} in units of {unit}");
    invalid_if!(rank >= group.count(), "part_of", "rank {rank} of {} members", group.count());
    let units = balanced(rank, group.count(), len / unit);
    Ok(units.start * unit..units.end * unit)
}

/// All rows of a matrix of `rows x cols`, of which each member has its [part](part_of): an all-gather. The step back is
/// [`scatter_rows`].
///
/// # Errors
/// [`Error::InvalidArgument`] if `part` is not this member's part; those of [`Group::all_gather_v`].
#[track_caller]
pub fn gather_rows<X: AsView<Elem: Element>>(
    group: &Group<'_>,
    part: &X,
    rows: usize,
    cols: usize,
) -> Result<DeviceBuffer<X::Elem>> {
    let _here = OpSite::here("gather_rows");
    let part = part.view();
    let (counts, len) = row_counts("gather_rows", group, rows, cols)?;
    fits("gather_rows", "the part", part.len(), (counts[group.rank()] / cols.max(1), cols))?;
    let mut all = group.device().allocate("gather_rows", len)?;
    group.all_gather_v(&part, &mut all, &counts)?;
    Ok(all)
}

/// The sum over the members of their matrices of `rows x cols`, of which each member gets its [part](part_of) of the
/// rows: a reduce-scatter. The step back is [`gather_rows`].
///
/// # Errors
/// [`Error::InvalidArgument`] if `all` has another number of elements; those of [`Group::reduce_scatter_v`].
#[track_caller]
pub fn scatter_rows<X: AsView<Elem: Element>>(
    group: &Group<'_>,
    all: &X,
    rows: usize,
    cols: usize,
) -> Result<DeviceBuffer<X::Elem>> {
    let _here = OpSite::here("scatter_rows");
    let all = all.view();
    fits("scatter_rows", "the matrix", all.len(), (rows, cols))?;
    let (counts, _) = row_counts("scatter_rows", group, rows, cols)?;
    let mut part = group.device().allocate("scatter_rows", counts[group.rank()])?;
    group.reduce_scatter_v(&all, &mut part, &counts, ReduceOp::Sum)?;
    Ok(part)
}

fn row_counts(op: &'static str, group: &Group<'_>, rows: usize, cols: usize) -> Result<(Vec<usize>, usize)> {
    let len = elements(op, rows, cols)?;
    Ok(((0..group.count()).map(|rank| balanced(rank, group.count(), rows).len() * cols).collect(), len))
}

/// Whether a collective can run beside other work. A capture has one stream, and an unordered token has no library that
/// orders the streams.
fn overlaps(group: &Group<'_>) -> bool {
    group.count() > 1 && !group.device().captures() && group.device().is_ordered()
}

/// If `beside`, on a stream of its own, which goes first; where that cannot be, on the current one.
fn overlapped<R>(group: &Group<'_>, beside: bool, collective: impl FnOnce(&Group<'_>) -> Result<R>) -> Result<R> {
    if !beside || !overlaps(group) {
        return collective(group);
    }
    let stream = group.device().stream_with_priority(-1)?;
    collective(&group.beside(&group.device().on(&stream)))
}

/// The sum of a gradient over calls, in `f32`, where its own type is narrower: there a sum of equal numbers stops
/// growing at 256 (`bf16`) or 2048 (`f16`) of them.
#[derive(Debug, Default)]
struct Wide(Option<[DeviceBuffer<f32>; 2]>);

impl Wide {
    const fn is_for<T>() -> bool {
        size_of::<T>() < size_of::<f32>()
    }

    /// `sum += piece`. Where the caller has written `sum`, that counts.
    fn add<T: Float + Element>(
        &mut self,
        dev: &Device,
        piece: &DeviceBuffer<T>,
        sum: &mut impl AsViewMut<Elem = T>,
    ) -> Result<()> {
        let sum = &mut sum.view_mut();
        if !Self::is_for::<T>() || piece.is_empty() {
            return dev.add_in_place(sum, piece);
        }
        let wide = match &mut self.0 {
            Some(wide) => wide,
            none => none.insert([dev.zeros(wide_len(piece.len()))?, dev.zeros(1)?]),
        };
        // The caller may have put another buffer in the gradient's place.
        let lens = [sum.len(), wide[0].len()];
        let fits = lens == [piece.len(), wide_len(piece.len())];
        invalid_if!(!fits, "accumulate", "a gradient of {} elements, where {} are added", lens[0], piece.len());
        add_up(dev, piece.view(), sum.view(), wide.each_ref())
    }

    /// The gradient begins anew. Its old sum could round to the new value by chance, and a NaN never does.
    /// A graph does it at each launch, so it needs the memory of later sums.
    fn forget<T>(&mut self, dev: &Device, len: usize) -> Result<()> {
        if self.0.is_none() && dev.captures() && Self::is_for::<T>() && len > 0 {
            self.0 = Some([dev.zeros(wide_len(len))?, dev.zeros(1)?]);
        }
        self.0.as_mut().map_or(Ok(()), |[wide, _]| dev.fill(wide, f32::NAN))
    }
}

fn put<T: Float + Element>(
    dev: &Device,
    value: &DeviceBuffer<T>,
    (sum, wide): (&mut DeviceBuffer<T>, &mut Wide),
    add: bool,
) -> Result<()> {
    if add {
        return wide.add(dev, value, sum);
    }
    wide.forget::<T>(dev, sum.len())?;
    dev.copy(value, sum)
}

#[track_caller]
fn elements(op: &'static str, rows: usize, cols: usize) -> Result<usize> {
    let elements = rows.checked_mul(cols);
    invalid_if!(elements.is_none(), op, "{rows} x {cols} elements are too many");
    Ok(elements.unwrap_or(0))
}

/// `Err` unless a matrix has `rows x cols` elements.
fn fits(op: &'static str, what: &str, len: usize, (rows, cols): (usize, usize)) -> Result<()> {
    invalid_if!(rows.checked_mul(cols) != Some(len), op, "{what} has {len} elements, not {rows} x {cols}");
    Ok(())
}

#[cfg(feature = "blas")]
fn columns<T: Copy>(matrix: &[T], cols: usize, range: Range<usize>) -> Vec<T> {
    matrix.chunks_exact(cols.max(1)).flat_map(|row| &row[range.clone()]).copied().collect()
}
