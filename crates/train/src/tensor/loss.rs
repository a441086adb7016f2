//! Cross-entropy over a vocabulary that lies on several devices.

use super::{Indices, fits};
use crate::ops::vocabulary::{STATS, Vocabulary};
use crate::runtime::{DeviceInternals, OpSite};
use gpu_pool::{AsView, AsViewMut, DeviceBuffer, Element, Group, Result, kernel::Float};

/// Softmax and cross-entropy of rows whose columns lie on the group's members: the vocabulary-parallel loss of
/// Megatron-LM. `logits` is this member's [part](super::part_of) of the columns of each row, as a
/// [`ColumnLinear`](super::ColumnLinear) leaves them. It becomes its gradient: of `scale` times the sum of the losses.
/// Returns the loss of each row, with the same bits on all members.
///
/// `loss = log(sum of exp(x)) - x[label]`, `gradient = (softmax(x) - one at the label) * scale`. A row's logits never
/// come together on one device. Megatron all-reduces the maximum, the sum of exponentials and the logit at the label,
/// one by one. Here each member finds the three of its columns; one all-gather of them follows, 4 numbers for each row.
///
/// Rows of a NaN or `+inf`, or all of `-inf`, have a loss of NaN, as of
/// [`cross_entropy`](crate::ops::Softmax::cross_entropy).
///
/// The page "Tensor parallel" of the guide has an example.
///
/// # Errors
/// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) if `logits` is not one row of the own columns for each
/// label, or `labels` is of another part of the group; those of [`Group::all_gather`].
#[track_caller]
pub fn vocabulary_cross_entropy<X: AsViewMut<Elem: Float<Acc: Element>>>(
    group: &Group<'_>,
    logits: &mut X,
    labels: &Indices,
    scale: <X::Elem as Float>::Acc,
) -> Result<DeviceBuffer<<X::Elem as Float>::Acc>> {
    let _here = OpSite::here("vocabulary_cross_entropy");
    const OP: &str = "vocabulary_cross_entropy";
    let (dev, mut logits) = (group.device(), logits.view_mut());
    let (rows, cols) = (labels.len(), labels.own(OP, group)?.len());
    fits(OP, "logits", logits.len(), (rows, cols))?;
    let stats = dev.vocabulary_stats(logits.view(), cols, &labels.numbers)?;
    let mut all = dev.allocate(OP, STATS * rows * group.count())?;
    group.all_gather(&stats, &mut all)?;
    dev.vocabulary_loss(logits.view_mut(), cols, &labels.numbers, &all, scale)
}
