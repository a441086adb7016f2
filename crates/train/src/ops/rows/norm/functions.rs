//! The host kernels of the norms, beside `kernels/rows.cu` and `kernels/columns.cu`. `norm` launches them.

use crate::{
    kernels::{COLUMNS, ROWS},
    ops::{
        family::{In, Out, each_row, each_row_mut, kernels, wide},
        rows::{host_column_final, sum_parts},
    },
};
use gpu_pool::{
    LaunchDims,
    extend::train::{Real, pairwise},
    kernel::Float,
};

/// The mean of `f(i)` over a row of `cols` elements.
fn mean<A: Real>(cols: u32, f: impl Fn(usize) -> A) -> A {
    pairwise(0..cols as usize, &f) / A::of(f64::from(cols))
}

#[allow(clippy::too_many_arguments)]
fn host_layer_norm<T: Float>(
    _: LaunchDims,
    x: &[T],
    gamma: &[T],
    beta: &[T],
    y: &mut [T],
    mean_of: &mut [T::Acc],
    rstd_of: &mut [T::Acc],
    rows: u64,
    cols: u32,
    eps: T::Acc,
) {
    let stats = mean_of.iter_mut().zip(rstd_of);
    for ((x, y), (mean_of, rstd_of)) in each_row(x, rows, cols).zip(each_row_mut(y, rows, cols)).zip(stats) {
        let average = mean(cols, |i| wide(&x[i]));
        let rstd = T::Acc::of(1.0) / (mean(cols, |i| (wide(&x[i]) - average) * (wide(&x[i]) - average)) + eps).sqrt();
        (*mean_of, *rstd_of) = (average, rstd);
        for (i, y) in y.iter_mut().enumerate() {
            *y = T::narrow((wide(&x[i]) - average) * rstd * wide(&gamma[i]) + wide(&beta[i]));
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn host_rms_norm<T: Float>(
    _: LaunchDims,
    x: &[T],
    gamma: &[T],
    y: &mut [T],
    rstd_of: &mut [T::Acc],
    rows: u64,
    cols: u32,
    eps: T::Acc,
) {
    for ((x, y), rstd_of) in each_row(x, rows, cols).zip(each_row_mut(y, rows, cols)).zip(rstd_of) {
        let rstd = T::Acc::of(1.0) / (mean(cols, |i| wide(&x[i]) * wide(&x[i])) + eps).sqrt();
        *rstd_of = rstd;
        for (i, y) in y.iter_mut().enumerate() {
            *y = T::narrow(wide(&x[i]) * rstd * wide(&gamma[i]));
        }
    }
}

/// The gradient of one row of a norm; `average` is the row's mean where the norm subtracts it.
fn norm_backward_row<T: Float>(dy: &[T], x: &[T], gamma: &[T], average: Option<T::Acc>, rstd: T::Acc, dx: &mut [T]) {
    let cols = x.len() as u32;
    let g = |i: usize| wide(&dy[i]) * wide(&gamma[i]);
    let h = |i: usize| (wide(&x[i]) - average.unwrap_or_default()) * rstd;
    let first = average.map_or(T::Acc::default(), |_| mean(cols, g));
    let second = mean(cols, |i| g(i) * h(i));
    for (i, dx) in dx.iter_mut().enumerate() {
        *dx = T::narrow(rstd * (g(i) - first - h(i) * second));
    }
}

#[allow(clippy::too_many_arguments)]
fn host_layer_norm_backward<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    gamma: &[T],
    mean_of: &[T::Acc],
    rstd_of: &[T::Acc],
    dx: &mut [T],
    rows: u64,
    cols: u32,
) {
    let inputs = each_row(dy, rows, cols).zip(each_row(x, rows, cols)).zip(mean_of.iter().zip(rstd_of));
    for (dx, ((dy, x), (average, rstd))) in each_row_mut(dx, rows, cols).zip(inputs) {
        norm_backward_row(dy, x, gamma, Some(*average), *rstd, dx);
    }
}

#[allow(clippy::too_many_arguments)]
fn host_rms_norm_backward<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    gamma: &[T],
    rstd_of: &[T::Acc],
    dx: &mut [T],
    rows: u64,
    cols: u32,
) {
    let inputs = each_row(dy, rows, cols).zip(each_row(x, rows, cols)).zip(rstd_of);
    for (dx, ((dy, x), rstd)) in each_row_mut(dx, rows, cols).zip(inputs) {
        norm_backward_row(dy, x, gamma, None, *rstd, dx);
    }
}

#[allow(clippy::too_many_arguments)]
fn host_layer_norm_columns<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    mean_of: &[T::Acc],
    rstd_of: &[T::Acc],
    dgamma: &mut [T::Acc],
    dbeta: &mut [T::Acc],
    rows: u64,
    cols: u32,
    parts: u32,
) {
    let at = |row: usize, c: usize| row * cols as usize + c;
    let share = |row, c| wide(&dy[at(row, c)]) * ((wide(&x[at(row, c)]) - mean_of[row]) * rstd_of[row]);
    sum_parts(dgamma, rows, cols, parts, share);
    sum_parts(dbeta, rows, cols, parts, |row, c| wide(&dy[at(row, c)]));
}

#[allow(clippy::too_many_arguments)]
fn host_rms_norm_columns<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    rstd_of: &[T::Acc],
    dgamma: &mut [T::Acc],
    rows: u64,
    cols: u32,
    parts: u32,
) {
    let at = |row: usize, c: usize| row * cols as usize + c;
    sum_parts(dgamma, rows, cols, parts, |row, c| wide(&dy[at(row, c)]) * (wide(&x[at(row, c)]) * rstd_of[row]));
}

fn host_column_finals<T: Float>(
    dims: LaunchDims,
    first: &[T::Acc],
    second: &[T::Acc],
    first_out: &mut [T],
    second_out: &mut [T],
    parts: u32,
    cols: u32,
) {
    host_column_final(dims, first, first_out, parts, cols);
    host_column_final(dims, second, second_out, parts, cols);
}

kernels! { ROWS;
    pub(super) fn layer_norm(In<T>, In<T>, In<T>, Out<T>, Out<T::Acc>, Out<T::Acc>, u64, u32, T::Acc)
        = "layer_norm", host_layer_norm::<T>;
    pub(super) fn rms_norm(In<T>, In<T>, Out<T>, Out<T::Acc>, u64, u32, T::Acc) = "rms_norm", host_rms_norm::<T>;
    pub(super) fn layer_norm_backward(In<T>, In<T>, In<T>, In<T::Acc>, In<T::Acc>, Out<T>, u64, u32)
        = "layer_norm_backward", host_layer_norm_backward::<T>;
    pub(super) fn rms_norm_backward(In<T>, In<T>, In<T>, In<T::Acc>, Out<T>, u64, u32)
        = "rms_norm_backward", host_rms_norm_backward::<T>;
}
kernels! { COLUMNS;
    pub(super) fn layer_norm_columns(In<T>, In<T>, In<T::Acc>, In<T::Acc>, Out<T::Acc>, Out<T::Acc>, u64, u32, u32)
        = "layer_norm_columns", host_layer_norm_columns::<T>;
    pub(super) fn rms_norm_columns(In<T>, In<T>, In<T::Acc>, Out<T::Acc>, u64, u32, u32)
        = "rms_norm_columns", host_rms_norm_columns::<T>;
    pub(super) fn column_finals(In<T::Acc>, In<T::Acc>, Out<T>, Out<T>, u32, u32)
        = "column_finals", host_column_finals::<T>;
}
