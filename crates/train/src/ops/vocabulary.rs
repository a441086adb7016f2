//! The two halves of a cross-entropy over columns that lie on several devices: `kernels/vocabulary.cu`.
//! Invariant: the loss has the same bits on all members, since sums over members go in their order.

use super::family::{In, Input, Maybe, Out, kernels, small, wide};
use crate::kernels::VOCABULARY;
use crate::runtime::{ErrorInternals, Operations, Real, pairwise};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, LaunchDims, Result, kernel::Float,
};

/// For each row: the largest element, the sum of exponentials of the differences to it, the element at the label, and
/// whether the label is the member's.
pub const STATS: usize = 4;

/// A block per row, of as many threads as have work: by the width alone.
fn row_dims(rows: usize, cols: usize) -> LaunchDims {
    let threads = cols.div_ceil(4).next_power_of_two().clamp(32, 256) as u32;
    LaunchDims { grid: (rows.clamp(1, i32::MAX as usize) as u32, 1, 1), block: (threads, 1, 1), shared_bytes: 0 }
}

fn row<T>(x: &[T], row: usize, cols: u32) -> &[T] {
    &x[row * cols as usize..][..cols as usize]
}

/// All members' values of a row: the largest element, the sum, and the element at the label, NaN without a label.
fn joined<A: Real>(all: &[A], rows: usize, members: u32, r: usize) -> (A, A, A) {
    let lowest = A::of(f64::NEG_INFINITY);
    let stat = |member: u32, which: usize| all[(member as usize * STATS + which) * rows + r];
    let sum_of = |which| (0..members).fold(A::default(), |sum, member| sum + stat(member, which));
    let top = (0..members).fold(lowest, |top, member| top.max(stat(member, 0)));
    let share = |member| match stat(member, 0) == lowest {
        true => stat(member, 1),
        false => stat(member, 1) * (stat(member, 0) - top).exp(),
    };
    let sum = (0..members).fold(A::default(), |sum, member| sum + share(member));
    let known = sum_of(3) == A::of(1.0) && top != lowest;
    if known { (top, sum, sum_of(2)) } else { (top, A::of(f64::NAN), A::of(f64::NAN)) }
}

kernels! { VOCABULARY;
    fn stats_kernel(_, x: In<T>, labels: In<u32>, stats: Out<T::Acc>, rows: u64, cols: u32) = "vocabulary_stats" {
        let lowest = T::Acc::of(f64::NEG_INFINITY);
        let rows = rows as usize;
        for r in 0..rows {
            let x = row(x, r, cols);
            let top = x.iter().map(wide).fold(lowest, Real::max);
            let shift = if top == lowest { T::Acc::default() } else { top };
            let there = x.get(labels[r] as usize).map(wide);
            stats[r] = top;
            stats[rows + r] = pairwise(0..x.len(), &|i| (wide(&x[i]) - shift).exp());
            stats[2 * rows + r] = there.unwrap_or_default();
            stats[3 * rows + r] = T::Acc::of(f64::from(u8::from(there.is_some())));
        }
    }
    fn loss_kernel(
        _, _: Maybe<T>, labels: In<u32>, all: In<T::Acc>, x: Out<T>, loss: Out<T::Acc>, rows: u64, cols: u32,
        members: u32, scale: T::Acc,
    ) = "vocabulary_loss" {
        for r in 0..rows as usize {
            let (top, sum, there) = joined(all, rows as usize, members, r);
            loss[r] = sum.ln() - (there - top);
            let factor = T::Acc::of(1.0) / sum;
            for (c, x) in x[r * cols as usize..][..cols as usize].iter_mut().enumerate() {
                let share = (wide(x) - top).exp() * factor;
                *x = T::narrow((if c == labels[r] as usize { share - T::Acc::of(1.0) } else { share }) * scale);
            }
        }
    }
}

pub(crate) trait Vocabulary: Operations {
    /// This device's values of the rows of `x`: [`STATS`] arrays of one number for each label. `cols` may be 0. A label
    /// of `cols` or more is another member's.
    #[track_caller]
    fn vocabulary_stats<T: Float>(
        &self,
        x: DeviceView<'_, T>,
        cols: usize,
        labels: &DeviceBuffer<u32>,
    ) -> Result<DeviceBuffer<T::Acc>> {
        const OP: &str = "cross_entropy";
        let (rows, width) = rows_and_cols(OP, x.len(), cols, labels.len())?;
        let _here = self.enter(OP);
        let mut stats = self.allocate(OP, STATS * rows)?;
        let args = (x, labels.view(), &mut stats, rows as u64, width);
        // SAFETY: `x` has `rows` rows of `cols` elements; there are as many labels, and `STATS` numbers for each.
        unsafe { self.launch(&stats_kernel::<T>(), row_dims(rows, cols), args)? };
        Ok(stats)
    }

    /// The loss of each row, and the gradient in the place of `x`. `all`: the stats of all members.
    #[track_caller]
    fn vocabulary_loss<T: Float>(
        &self,
        mut x: DeviceViewMut<'_, T>,
        cols: usize,
        labels: &DeviceBuffer<u32>,
        all: &DeviceBuffer<T::Acc>,
        scale: T::Acc,
    ) -> Result<DeviceBuffer<T::Acc>> {
        const OP: &str = "cross_entropy";
        let (rows, width) = rows_and_cols(OP, x.len(), cols, labels.len())?;
        let members = all.len() / (STATS * rows.max(1));
        let _here = self.enter(OP);
        let mut loss = self.allocate(OP, rows)?;
        let from = Input::Output(x.address());
        let args =
            (from, labels.view(), all.view(), x.view_mut(), &mut loss, rows as u64, width, members as u32, scale);
        // SAFETY: `x` has `rows` rows of `cols` elements; there are as many labels and losses, and `STATS` numbers for
        // each of them and each member.
        unsafe { self.launch(&loss_kernel::<T>(), row_dims(rows, cols), args)? };
        Ok(loss)
    }
}

impl Vocabulary for Device {}

#[track_caller]
fn rows_and_cols(op: &'static str, len: usize, cols: usize, rows: usize) -> Result<(usize, u32)> {
    invalid_if!(rows.checked_mul(cols) != Some(len), op, "{rows} labels, and {len} logits in rows of {cols}");
    Ok((rows, small(op, "columns", cols)?))
}
