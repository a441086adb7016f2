//! The host kernels of the norms, beside `kernels/rows.cu` and `kernels/columns.cu`. `norm` launches them.

use crate::kernels::{COLUMNS, ROWS};
use crate::ops::family::{In, Out, each_row, each_row_mut, kernels, wide};
use crate::ops::rows::{host_column_final, sum_parts};
use crate::runtime::{Real, pairwise};
use gpu_pool::kernel::Float;

fn mean<A: Real>(cols: u32, f: impl Fn(usize) -> A) -> A {
    pairwise(0..cols as usize, &f) / A::of(f64::from(cols))
}

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

kernels! { ROWS;
    pub(super) fn layer_norm(
        _, x: In<T>, gamma: In<T>, beta: In<T>, y: Out<T>, mean_of: Out<T::Acc>, rstd_of: Out<T::Acc>, rows: u64,
        cols: u32, eps: T::Acc,
    ) = "layer_norm" {
        let stats = mean_of.iter_mut().zip(rstd_of);
        for ((x, y), (mean_of, rstd_of)) in each_row(x, rows, cols).zip(each_row_mut(y, rows, cols)).zip(stats) {
            let average = mean(cols, |i| wide(&x[i]));
            let variance = mean(cols, |i| (wide(&x[i]) - average) * (wide(&x[i]) - average));
            let rstd = T::Acc::of(1.0) / (variance + eps).sqrt();
            (*mean_of, *rstd_of) = (average, rstd);
            for (i, y) in y.iter_mut().enumerate() {
                *y = T::narrow((wide(&x[i]) - average) * rstd * wide(&gamma[i]) + wide(&beta[i]));
            }
        }
    }
    pub(super) fn rms_norm(
        _, x: In<T>, gamma: In<T>, y: Out<T>, rstd_of: Out<T::Acc>, rows: u64, cols: u32, eps: T::Acc,
    ) = "rms_norm" {
        for ((x, y), rstd_of) in each_row(x, rows, cols).zip(each_row_mut(y, rows, cols)).zip(rstd_of) {
            let rstd = T::Acc::of(1.0) / (mean(cols, |i| wide(&x[i]) * wide(&x[i])) + eps).sqrt();
            *rstd_of = rstd;
            for (i, y) in y.iter_mut().enumerate() {
                *y = T::narrow(wide(&x[i]) * rstd * wide(&gamma[i]));
            }
        }
    }
    pub(super) fn layer_norm_backward(
        _, dy: In<T>, x: In<T>, gamma: In<T>, mean_of: In<T::Acc>, rstd_of: In<T::Acc>, dx: Out<T>, rows: u64,
        cols: u32,
    ) = "layer_norm_backward" {
        let inputs = each_row(dy, rows, cols).zip(each_row(x, rows, cols)).zip(mean_of.iter().zip(rstd_of));
        for (dx, ((dy, x), (average, rstd))) in each_row_mut(dx, rows, cols).zip(inputs) {
            norm_backward_row(dy, x, gamma, Some(*average), *rstd, dx);
        }
    }
    pub(super) fn rms_norm_backward(
        _, dy: In<T>, x: In<T>, gamma: In<T>, rstd_of: In<T::Acc>, dx: Out<T>, rows: u64, cols: u32,
    ) = "rms_norm_backward" {
        let inputs = each_row(dy, rows, cols).zip(each_row(x, rows, cols)).zip(rstd_of);
        for (dx, ((dy, x), rstd)) in each_row_mut(dx, rows, cols).zip(inputs) {
            norm_backward_row(dy, x, gamma, None, *rstd, dx);
        }
    }
}
kernels! { COLUMNS;
    pub(super) fn layer_norm_columns(
        _, dy: In<T>, x: In<T>, mean_of: In<T::Acc>, rstd_of: In<T::Acc>, dgamma: Out<T::Acc>, dbeta: Out<T::Acc>,
        rows: u64, cols: u32, parts: u32,
    ) = "layer_norm_columns" {
        let at = |row: usize, c: usize| row * cols as usize + c;
        let share = |row, c| wide(&dy[at(row, c)]) * ((wide(&x[at(row, c)]) - mean_of[row]) * rstd_of[row]);
        sum_parts(dgamma, rows, cols, parts, share);
        sum_parts(dbeta, rows, cols, parts, |row, c| wide(&dy[at(row, c)]));
    }
    pub(super) fn rms_norm_columns(
        _, dy: In<T>, x: In<T>, rstd_of: In<T::Acc>, dgamma: Out<T::Acc>, rows: u64, cols: u32, parts: u32,
    ) = "rms_norm_columns" {
        let at = |row: usize, c: usize| row * cols as usize + c;
        sum_parts(dgamma, rows, cols, parts, |row, c| wide(&dy[at(row, c)]) * (wide(&x[at(row, c)]) * rstd_of[row]));
    }
    pub(super) fn column_finals(
        dims, first: In<T::Acc>, second: In<T::Acc>, first_out: Out<T>, second_out: Out<T>, parts: u32, cols: u32,
    ) = "column_finals" {
        host_column_final(dims, first, first_out, parts, cols);
        host_column_final(dims, second, second_out, parts, cols);
    }
}
