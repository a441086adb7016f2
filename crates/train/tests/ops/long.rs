//! Sums of very many terms: each equal term is rounded alike, so a sum from left to right drifts by per cents.

use crate::{
    on_both,
    rig::values,
    support::{Gpus, cases},
};
use gpu_pool_train::prelude::*;

/// A term that no large `f32` has room for.
const TERM: f32 = 0.7408;

/// As many terms as a test has time for. With `GPU_POOL_LONG` so many that a sum from left to right would stand still.
fn many() -> usize {
    cases(1 << 19, 20_000_000)
}

#[track_caller]
fn near(found: f32, want: f64, bound: f64, what: &str) {
    assert!((f64::from(found) - want).abs() <= bound * want.abs(), "{what}: {found} instead of {want}");
}

/// Rows far from 0: what the mean is off by counts as much as the deviation.
fn far_from_zero(gpus: Gpus) {
    gpus.pool(1)
        .run(|dev, _| {
            for cols in [1000, 4096] {
                let x: Vec<f32> =
                    values::<f32>(cols, 1).iter().map(|x| (40_000.0 + 0.9 * x / 3f64.sqrt()) as f32).collect();
                let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
                let mean = wide.iter().sum::<f64>() / cols as f64;
                let rstd = 1.0 / (wide.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64).sqrt();
                let dy: Vec<f32> = values::<f32>(cols, 2).iter().map(|&x| x as f32).collect();
                let (gamma, beta) = (dev.upload(&vec![1.0f32; cols])?, dev.zeros::<f32>(cols)?);
                let (on, dy_on) = (dev.upload(&x)?, dev.upload(&dy)?);
                let (y, mean_of, rstd_of) = dev.layer_norm(&on, &gamma, &beta, 0.0)?;
                // The mean is rounded to a multiple of 1/256.
                near(dev.download(&mean_of)?[0], mean, 2e-7, "mean");
                near(dev.download(&rstd_of)?[0], rstd, 1e-4, "rstd");
                for (y, x) in dev.download(&y)?.into_iter().zip(&wide) {
                    let want = (x - mean) * rstd;
                    assert!((f64::from(y) - want).abs() < 0.01, "{cols} columns: {y} instead of {want}");
                }
                let h = |i: usize| (wide[i] - mean) * rstd;
                let first = dy.iter().map(|&dy| f64::from(dy)).sum::<f64>() / cols as f64;
                let second = dy.iter().enumerate().map(|(i, &dy)| f64::from(dy) * h(i)).sum::<f64>() / cols as f64;
                let dx = dev.layer_norm_backward(&dy_on, &on, &gamma, &mean_of, &rstd_of)?;
                for (i, dx) in dev.download(&dx)?.into_iter().enumerate() {
                    let want = rstd * (f64::from(dy[i]) - first - h(i) * second);
                    assert!((f64::from(dx) - want).abs() < 0.02, "{cols} columns: {dx} instead of {want}");
                }
            }
            Ok(())
        })
        .unwrap();
}

fn rows(gpus: Gpus) {
    gpus.pool(1)
        .run(|dev, _| {
            let (n, term) = (many(), f64::from(TERM));
            let (ones, terms) = (dev.upload(&vec![1.0f32; n])?, dev.upload(&vec![TERM; n])?);
            // The first one is the top; the exponential of each other difference is the term.
            let low = TERM.ln();
            let mut x = vec![low; n];
            x[0] = 0.0;
            let sum = 1.0 + (n - 1) as f64 * f64::from(low).exp();
            let x = dev.upload(&x)?;
            near(dev.download(&dev.softmax(&x, n)?.slice(..1))?[0], 1.0 / sum, 1e-5, "softmax");
            let loss = dev.cross_entropy_loss(&x, &dev.upload(&[0u32])?)?;
            near(dev.download(&loss)?[0], sum.ln(), 1e-6, "cross entropy");

            // y * (dy - sum of dy * y), and dy - exp(y) * sum of dy.
            let share = (2.0 / n as f64) as f32;
            let want = f64::from(share) * (term - n as f64 * term * f64::from(share));
            let dx = dev.softmax_backward(&terms, &dev.upload(&vec![share; n])?, n)?;
            near(dev.download(&dx.slice(..1))?[0], want, 3e-5, "softmax_backward");
            let log = share.ln();
            let want = term - f64::from(log).exp() * term * n as f64;
            let dx = dev.log_softmax_backward(&terms, &dev.upload(&vec![log; n])?, n)?;
            near(dev.download(&dx.slice(..1))?[0], want, 3e-5, "log_softmax_backward");

            let (_, rstd) = dev.rms_norm(&terms, &ones, 0.0)?;
            near(dev.download(&rstd)?[0], 1.0 / term, 1e-6, "rms_norm");
            // With an rstd of 1: dy - x * (mean of dy * x).
            let dx = dev.rms_norm_backward(&ones, &terms, &ones, &dev.upload(&[1.0f32])?)?;
            near(dev.download(&dx.slice(..1))?[0], 1.0 - term * term, 1e-5, "rms_norm_backward");
            near(dev.download(&dev.dot(&terms, &terms)?)?[0], n as f64 * term * term, 1e-5, "dot");
            Ok(())
        })
        .unwrap();
}

fn columns(gpus: Gpus) {
    gpus.pool(1)
        .run(|dev, _| {
            let (n, term) = (many(), f64::from(TERM));
            let terms = dev.upload(&vec![TERM; n])?;
            let (mut one, mut two) = (dev.zeros::<f32>(1)?, dev.zeros::<f32>(1)?);
            dev.column_sum_into(&terms, &mut one)?;
            near(dev.download(&one)?[0], n as f64 * term, 1e-5, "column_sum");
            let (zeros, ones) = (dev.zeros::<f32>(n)?, dev.upload(&vec![1.0f32; n])?);
            dev.layer_norm_weights_backward(&terms, &ones, &zeros, &terms, &mut one, &mut two)?;
            near(dev.download(&one)?[0], n as f64 * term * term, 1e-5, "layer_norm_weights_backward, gamma");
            near(dev.download(&two)?[0], n as f64 * term, 1e-5, "layer_norm_weights_backward, beta");
            dev.rms_norm_weights_backward(&terms, &ones, &ones, &mut one)?;
            near(dev.download(&one)?[0], n as f64 * term, 1e-5, "rms_norm_weights_backward");
            let mut row = dev.zeros::<f32>(1)?;
            dev.embedding_backward(&terms, 1, &dev.zeros::<u32>(n)?, &mut row)?;
            // 20,000 sums of 1024 terms, one after the other. In one sum the terms would stop at 2^24.
            near(dev.download(&row)?[0], n as f64 * term, 1e-3, "embedding_backward");
            Ok(())
        })
        .unwrap();
}

on_both! {
    1: fn a_layer_norm_far_from_zero(gpus) { far_from_zero(gpus) }
    1: fn sums_of_long_rows(gpus) { rows(gpus) }
    1: fn sums_of_long_columns(gpus) { columns(gpus) }
}
