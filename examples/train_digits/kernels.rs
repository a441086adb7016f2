//! The kernels between the matrix products: `kernels/mlp.cu`, and a host kernel for each.
//!
//! A host kernel computes the same as its kernel; software GPUs run it. Only `expf` and `logf` may differ in the last
//! bit.

use gpu_pool::{Module, kernel};

/// Compiled ahead of time: a machine needs a driver, no CUDA toolkit.
pub static MLP: Module = Module::ptx(include_str!("../../kernels/ptx/mlp.ptx")).with_cubins(&[
    (80, include_bytes!("../../kernels/ptx/mlp.sm_80.cubin")),
    (90, include_bytes!("../../kernels/ptx/mlp.sm_90.cubin")),
]);

kernel! {
    /// `h = max(h + b, 0)`, row by row. NaN stays NaN, so that a diverged run is visible.
    pub static BIAS_RELU: "bias_relu" in MLP, fn(h: &mut [f32], b: &[f32], rows: u32, cols: u32) |_dims| {
        for row in h.chunks_exact_mut(cols as usize).take(rows as usize) {
            for (h, b) in row.iter_mut().zip(b) {
                let v = *h + b;
                *h = if v < 0.0 { 0.0 } else { v };
            }
        }
    }

    /// `h += b`, row by row.
    pub static BIAS_ADD: "bias_add" in MLP, fn(h: &mut [f32], b: &[f32], rows: u32, cols: u32) |_dims| {
        for row in h.chunks_exact_mut(cols as usize).take(rows as usize) {
            row.iter_mut().zip(b).for_each(|(h, b)| *h += b);
        }
    }

    /// `dlogits = (softmax(logits) - onehot(label)) * scale`, and the cross-entropy of every row.
    pub static SOFTMAX_XENT: "softmax_xent" in MLP, fn(
        logits: &[f32], labels: &[i32], dlogits: &mut [f32], loss: &mut [f32], rows: u32, cols: u32, scale: f32
    ) |_dims| {
        let cols = cols as usize;
        for r in 0..rows as usize {
            let row = &logits[r * cols..][..cols];
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum = row.iter().fold(0.0, |sum, x| sum + (x - top).exp());
            let label = usize::try_from(labels[r]).ok();
            for (c, d) in dlogits[r * cols..][..cols].iter_mut().enumerate() {
                *d = ((row[c] - top).exp() / sum - f32::from(u8::from(label == Some(c)))) * scale;
            }
            loss[r] = label.and_then(|c| row.get(c)).map_or(f32::NAN, |x| sum.ln() - (x - top));
        }
    }

    /// `dh = 0` where `h`, the output of [`BIAS_RELU`], is not positive.
    pub static RELU_BACKWARD: "relu_backward" in MLP, fn(dh: &mut [f32], h: &[f32], n: u64) |_dims| {
        for (dh, h) in dh.iter_mut().zip(h).take(n as usize) {
            if *h <= 0.0 { *dh = 0.0 }
        }
    }

    /// The sum of every column, from the first row to the last.
    pub static COL_SUM: "col_sum" in MLP, fn(x: &[f32], out: &mut [f32], rows: u32, cols: u32) |_dims| {
        let cols = cols as usize;
        out[..cols].fill(0.0);
        for row in x.chunks_exact(cols).take(rows as usize) {
            out.iter_mut().zip(row).for_each(|(out, x)| *out += x);
        }
    }

    /// `w -= lr * g`, rounded once.
    pub static SGD: "sgd" in MLP, fn(w: &mut [f32], g: &[f32], n: u64, lr: f32) |_dims| {
        w.iter_mut().zip(g).take(n as usize).for_each(|(w, g)| *w = (-lr).mul_add(*g, *w));
    }

    /// 1 where the first greatest logit of a row is at its label, else 0.
    pub static COUNT_CORRECT: "count_correct" in MLP,
    fn(logits: &[f32], labels: &[i32], correct: &mut [u32], rows: u32, cols: u32) |_dims| {
        let images = logits.chunks_exact(cols as usize).zip(labels).zip(correct);
        for ((row, label), correct) in images.take(rows as usize) {
            let best = (1..row.len()).fold(0, |best, c| if row[c] > row[best] { c } else { best });
            *correct = u32::from(best as i32 == *label);
        }
    }
}
