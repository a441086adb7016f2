//! Operations on rows, and sums of columns.

use crate::{
    each_type, on_both,
    rig::{Type, acc_eps, close, download, upload, values, widths},
    support::Gpus,
};
use gpu_pool::{Device, DeviceBuffer, Error};
use gpu_pool_train::{RowNorm, SequenceNorm, prelude::*};
use proptest::{prelude::*, test_runner::TestRunner};

/// Softmax of a row, and the logarithm of it, in `f64`.
fn softmax(x: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|x| (x - top).exp()).sum();
    let logs: Vec<_> = x.iter().map(|x| x - top - sum.ln()).collect();
    (logs.iter().map(|x| x.exp()).collect(), logs)
}

fn shapes(gpus: Gpus) -> Vec<(usize, usize)> {
    widths(gpus.is_cuda()).into_iter().flat_map(|cols| [(1, cols), (if cols > 600 { 2 } else { 5 }, cols)]).collect()
}

/// A sum of n terms is off by n roundings at most; pairs of threads and the four passes of a row add some.
fn of_sum<T: Type>(cols: usize) -> f64 {
    (cols as f64 + 16.0) * acc_eps::<T>()
}

fn softmaxes<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols) in shapes(gpus) {
            let (a, d) = (values::<T>(rows * cols, 1), values::<T>(rows * cols, 2));
            let (x, dy) = (upload::<T>(dev, &a)?, upload::<T>(dev, &d)?);
            let (y, logs): (Vec<_>, Vec<_>) = a.chunks(cols).map(softmax).unzip();
            let (y, logs) = (y.concat(), logs.concat());
            let slack = of_sum::<T>(cols);
            let got = dev.softmax(&x, cols)?;
            close::<T>(&download(dev, &got)?, &y, |i| slack * y[i]);
            let got_logs = dev.log_softmax(&x, cols)?;
            close::<T>(&download(dev, &got_logs)?, &logs, |i| slack * (1.0 + logs[i].abs()));
            for (assign, want) in [(false, &got), (true, &got_logs)] {
                let mut x = upload::<T>(dev, &a)?;
                if assign {
                    dev.log_softmax_in_place(&mut x, cols)?
                } else {
                    dev.softmax_in_place(&mut x, cols)?
                }
                assert_eq!(dev.download(&x)?, dev.download(want)?);
            }
            // The steps back take what the step forward gave, rounded.
            let (y, logs) = (download(dev, &got)?, download(dev, &got_logs)?);
            let row_sums = |v: &[f64]| v.chunks(cols).map(|row| row.iter().sum::<f64>()).collect::<Vec<_>>();
            let products: Vec<_> = y.iter().zip(&d).map(|(y, d)| y * d).collect();
            let sums = row_sums(&products);
            let dx: Vec<_> = (0..a.len()).map(|i| y[i] * (d[i] - sums[i / cols])).collect();
            let back = dev.softmax_backward(&dy, &got, cols)?;
            close::<T>(&download(dev, &back)?, &dx, |i| 4.0 * slack * y[i] + 8.0 * acc_eps::<T>() * y[i]);
            let sums = row_sums(&d);
            let dx: Vec<_> = (0..a.len()).map(|i| d[i] - logs[i].exp() * sums[i / cols]).collect();
            let back = dev.log_softmax_backward(&dy, &got_logs, cols)?;
            let sizes = row_sums(&d.iter().map(|d| d.abs()).collect::<Vec<_>>());
            let slack = |i: usize| slack * (8.0 + logs[i].exp() * sizes[i / cols]) * (1.0 + logs[i].abs());
            close::<T>(&download(dev, &back)?, &dx, slack);
        }
        Ok(())
    })
    .unwrap();
}

fn entropies<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols) in shapes(gpus) {
            let a = values::<T>(rows * cols, 3);
            let x = upload::<T>(dev, &a)?;
            let labels: Vec<u32> = (0..rows).map(|r| (r * 7 + 3) as u32 % cols as u32).collect();
            let signed: Vec<i32> = labels.iter().map(|&l| l as i32).collect();
            let (labels_u, labels_i) = (dev.upload(&labels)?, dev.upload(&signed)?);
            let (y, logs): (Vec<_>, Vec<_>) = a.chunks(cols).map(softmax).unzip();
            let losses: Vec<_> = (0..rows).map(|r| -logs[r][labels[r] as usize]).collect();
            let gradient = (0..a.len()).map(|i| {
                let one = if labels[i / cols] as usize == i % cols { 1.0 } else { 0.0 };
                (y[i / cols][i % cols] - one) * 0.25
            });
            let gradient: Vec<_> = gradient.collect();
            let slack = of_sum::<T>(cols);
            let (loss, dx) = dev.cross_entropy(&x, &labels_u, T::acc(0.25))?;
            let to = |loss: &DeviceBuffer<T::Acc>| -> gpu_pool::Result<Vec<f64>> {
                Ok(dev.download(loss)?.into_iter().map(T::acc_to).collect())
            };
            close::<f32>(&to(&loss)?, &losses, |i| slack * (8.0 + losses[i]));
            close::<T>(&download(dev, &dx)?, &gradient, |_| slack);
            assert_eq!(to(&dev.cross_entropy_loss(&x, &labels_i)?)?, to(&loss)?);
            let mut x = x;
            assert_eq!(to(&dev.cross_entropy_in_place(&mut x, &labels_i, T::acc(0.25))?)?, to(&loss)?);
            assert_eq!(dev.download(&x)?, dev.download(&dx)?);
        }
        Ok(())
    })
    .unwrap();
}

/// A norm in `f64`: `y`, mean and rstd of each row. Without `beta` it is the RMS norm.
fn norm(x: &[f64], gamma: &[f64], beta: Option<&[f64]>, eps: f64) -> (Vec<f64>, Vec<(f64, f64)>) {
    let cols = gamma.len();
    let mut y = Vec::new();
    let mut stats = Vec::new();
    for x in x.chunks(cols) {
        let mean = beta.map_or(0.0, |_| x.iter().sum::<f64>() / cols as f64);
        let rstd = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64 + eps).sqrt();
        y.extend((0..cols).map(|i| (x[i] - mean) * rstd * gamma[i] + beta.map_or(0.0, |beta| beta[i])));
        stats.push((mean, rstd));
    }
    (y, stats)
}

fn norms<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols) in shapes(gpus) {
            let a = values::<T>(rows * cols, 4);
            let d = values::<T>(rows * cols, 5);
            let (g, b) = (values::<T>(cols, 6), values::<T>(cols, 7));
            let (x, dy) = (upload::<T>(dev, &a)?, upload::<T>(dev, &d)?);
            let (gamma, beta) = (upload::<T>(dev, &g)?, upload::<T>(dev, &b)?);
            let eps = 0.125;
            for layer in [true, false] {
                let (want, stats) = norm(&a, &g, layer.then_some(&b), eps);
                let (y, mean, rstd) = if layer {
                    dev.layer_norm(&x, &gamma, &beta, T::acc(eps))?
                } else {
                    let (y, rstd) = dev.rms_norm(&x, &gamma, T::acc(eps))?;
                    (y, dev.zeros(rows)?, rstd)
                };
                // rstd is less than 3, |x| and |gamma| at most 3: every term is less than 60.
                let slack = 100.0 * of_sum::<T>(cols);
                close::<T>(&download(dev, &y)?, &want, |_| slack);
                let got = dev.download(&rstd)?.into_iter().map(T::acc_to).collect::<Vec<_>>();
                close::<f32>(&got, &stats.iter().map(|s| s.1).collect::<Vec<_>>(), |_| slack);

                let h: Vec<_> = (0..a.len()).map(|i| (a[i] - stats[i / cols].0) * stats[i / cols].1).collect();
                let mean_of = |f: &dyn Fn(usize) -> f64, row: usize| {
                    (row * cols..(row + 1) * cols).map(f).sum::<f64>() / cols as f64
                };
                let means: Vec<_> = (0..rows)
                    .map(|row| {
                        let first = if layer { mean_of(&|i| d[i] * g[i % cols], row) } else { 0.0 };
                        (first, mean_of(&|i| d[i] * g[i % cols] * h[i], row))
                    })
                    .collect();
                let dx: Vec<_> = (0..a.len())
                    .map(|i| stats[i / cols].1 * (d[i] * g[i % cols] - means[i / cols].0 - h[i] * means[i / cols].1))
                    .collect();
                let back = if layer {
                    dev.layer_norm_backward(&dy, &x, &gamma, &mean, &rstd)?
                } else {
                    dev.rms_norm_backward(&dy, &x, &gamma, &rstd)?
                };
                close::<T>(&download(dev, &back)?, &dx, |_| 20.0 * slack);

                let (mut dgamma, mut dbeta) = (upload::<T>(dev, &g)?, upload::<T>(dev, &b)?);
                let column = |c: usize, f: &dyn Fn(usize) -> f64| (0..rows).map(|r| f(r * cols + c)).sum::<f64>();
                let sums: Vec<_> = (0..cols).map(|c| column(c, &|i| d[i] * h[i])).collect();
                let slack = 100.0 * of_sum::<T>(rows + cols) * rows as f64;
                if layer {
                    dev.layer_norm_weights_backward(&dy, &x, &mean, &rstd, &mut dgamma, &mut dbeta)?;
                    let plain: Vec<_> = (0..cols).map(|c| column(c, &|i| d[i])).collect();
                    close::<T>(&download(dev, &dbeta)?, &plain, |_| slack);
                } else {
                    dev.rms_norm_weights_backward(&dy, &x, &rstd, &mut dgamma)?;
                }
                close::<T>(&download(dev, &dgamma)?, &sums, |_| slack);
            }
        }
        Ok(())
    })
    .unwrap();
}

fn columns<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols) in [(0, 3), (1, 1), (2, 5), (63, 33), (64, 8), (65, 3), (300, 17), (8200, 2)] {
            let a = values::<T>(rows * cols, 8);
            let x = upload::<T>(dev, &a)?;
            let mut sums = upload::<T>(dev, &vec![9.0; cols])?;
            dev.column_sum_into(&x, &mut sums)?;
            let want: Vec<_> = (0..cols).map(|c| (0..rows).map(|r| a[r * cols + c]).sum()).collect();
            close::<T>(&download(dev, &sums)?, &want, |_| 3.0 * rows as f64 * of_sum::<T>(rows));
            let mut again = upload::<T>(dev, &vec![9.0; cols])?;
            dev.column_sum_into(&x, &mut again)?;
            assert_eq!(dev.download(&again)?, dev.download(&sums)?);
        }
        Ok(())
    })
    .unwrap();
}

fn best<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols) in shapes(gpus) {
            // Few values, so that many are equal.
            let a: Vec<_> = values::<T>(rows * cols, 9).iter().map(|x| x.round()).collect();
            let want = a.chunks(cols).map(|x| (0..cols).rev().max_by(|&i, &j| x[i].total_cmp(&x[j])).unwrap() as u32);
            let a: Vec<_> = a.iter().map(|x| x + 0.0).collect();
            let x = upload::<T>(dev, &a)?;
            let at = dev.download(&dev.argmax(&x, cols)?)?;
            for (row, (at, want)) in at.iter().zip(want).enumerate() {
                let x = &a[row * cols..][..cols];
                assert_eq!(x[*at as usize], x[want as usize], "{rows} x {cols}");
                assert!(!x[..*at as usize].contains(&x[*at as usize]), "the first of equals: {rows} x {cols}");
            }
        }
        let nan = f64::NAN;
        let x = upload::<T>(dev, &[1.0, nan, 5.0, nan, -f64::INFINITY, -f64::INFINITY, nan, nan])?;
        assert_eq!(dev.download(&dev.argmax(&x, 4)?)?, [1, 2]);
        assert_eq!(dev.download(&dev.argmax(&x, 2)?)?, [1, 1, 0, 0]);
        Ok(())
    })
    .unwrap();
}

/// The bits of each row by itself, at its place or at another one, are those that it has among others.
fn alone<T: Type>(gpus: Gpus) {
    type Op<T> = fn(&Device, &DeviceBuffer<T>, usize) -> gpu_pool::Result<DeviceBuffer<T>>;
    let ops: [Op<T>; 4] = [
        |dev, x, cols| dev.softmax(x, cols),
        |dev, x, cols| dev.softmax_backward(x, x, cols),
        |dev, x, cols| Ok(dev.layer_norm(x, &x.slice(..cols), &x.slice(..cols), T::acc(0.1))?.0),
        |dev, x, cols| dev.rms_norm_backward(x, x, &x.slice(..cols), &dev.upload(&vec![T::acc(0.5); x.len() / cols])?),
    ];
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for cols in widths(gpus.is_cuda()) {
            let a = values::<T>(3 * cols, 10);
            // The first row is the weights: it stays.
            let all = upload::<T>(dev, &a)?;
            let two = upload::<T>(dev, &[&a[..cols], &a[2 * cols..]].concat())?;
            for op in ops {
                let (all, two) = (dev.download(&op(dev, &all, cols)?)?, dev.download(&op(dev, &two, cols)?)?);
                assert!(all[..cols] == two[..cols] && all[2 * cols..] == two[cols..], "{cols}");
            }
        }
        Ok(())
    })
    .unwrap();
}

on_both! {
    1: fn softmax_and_its_logarithm(gpus) { each_type!(softmaxes(gpus)) }
    1: fn cross_entropy(gpus) { each_type!(entropies(gpus)) }
    1: fn layer_norm_and_rms_norm(gpus) { each_type!(norms(gpus)) }
    1: fn sums_of_columns(gpus) { each_type!(columns(gpus)) }
    1: fn argmax(gpus) { each_type!(best(gpus)) }
    1: fn a_row_does_not_depend_on_the_others(gpus) { each_type!(alone(gpus)) }

    1: fn labels_that_are_no_class(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let x = dev.upload(&[1.0f32; 9])?;
            let labels = dev.upload(&[0i32, -1, 3])?;
            let (loss, dx) = dev.cross_entropy(&x, &labels, 1.0)?;
            let (loss, dx) = (dev.download(&loss)?, dev.download(&dx)?);
            assert!((loss[0] - 3f32.ln()).abs() < 1e-6 && loss[1].is_nan() && loss[2].is_nan());
            assert!(dx[..3].iter().all(|x| x.is_finite()) && dx[3..].iter().all(|x| x.is_nan()));
            let error = dev.check_indices(&labels, 3).unwrap_err().to_string();
            assert!(["index 1 is -1", "device 0", "rows.rs"].iter().all(|part| error.contains(part)), "{error}");
            dev.check_indices(&dev.upload(&[0u32, 2])?, 3)
        })
        .unwrap();
    }

    1: fn an_eps_that_is_none(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (mut x, mut y) = (dev.upload(&[1.0f32, 2.0])?, dev.upload(&[1.0f32, 2.0])?);
            let (wide, gamma) = (dev.upload(&[1.0f64])?, dev.upload(&[1.0f32, 1.0])?);
            for eps in [f32::NAN, -1.0, f32::INFINITY, -1e-40] {
                let group = dev.group(&[0])?;
                for refused in [
                    dev.layer_norm(&x, &gamma, &gamma, eps).map(drop),
                    dev.rms_norm(&x, &gamma, eps).map(drop),
                    dev.rms_norm(&wide, &wide, eps.into()).map(drop),
                    group.all_reduce_norm(&mut x, &mut y, RowNorm::rms(&gamma, eps)).map(drop),
                    dev.all_reduce_norm_into(&gamma, &mut y, RowNorm::layer(&gamma, &gamma, eps), &mut x).map(drop),
                    SequenceNorm::rms(dev, &[1.0f32], eps).map(drop),
                    SequenceNorm::layer(dev, &[1.0f32], &[0.0], eps).map(drop),
                ] {
                    let error = refused.unwrap_err();
                    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                    assert!(error.to_string().contains(&format!("eps of {}", f64::from(eps))), "{error}");
                    assert!(error.to_string().contains("tests/ops/rows.rs"), "{error}");
                }
            }
            dev.rms_norm(&x, &gamma, 0.0).map(drop)
        })
        .unwrap();
    }

    1: fn rows_that_are_extreme(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (inf, nan) = (f32::INFINITY, f32::NAN);
            let x = dev.upload(&[-inf, 1e30, 1e30, -inf, -inf, -inf, 1.0, nan, -inf, 2.0, inf, 0.0])?;
            let y = dev.download(&dev.softmax(&x, 3)?)?;
            assert_eq!(y[..3], [0.0, 0.5, 0.5]);
            assert!(y[3..].iter().all(|y| y.is_nan()), "{y:?}");
            // Large offsets do not matter.
            let (a, b) = (dev.upload(&[1e4f32, 1e4 + 1.0])?, dev.upload(&[0.0f32, 1.0])?);
            assert_eq!(dev.download(&dev.softmax(&a, 2)?)?, dev.download(&dev.softmax(&b, 2)?)?);
            Ok(())
        })
        .unwrap();
    }

    1: fn shapes_of_all_kinds(gpus) {
        let pool = gpus.pool(1);
        let mut runner = TestRunner::new(ProptestConfig { cases: 20, failure_persistence: None, ..Default::default() });
        runner
            .run(&(0usize..9, 1usize..300, any::<u32>(), 0usize..5), |(rows, cols, seed, begin)| {
                let a = values::<f32>(rows * cols + begin, u64::from(seed));
                let labels: Vec<u32> = (0..rows as u32).map(|r| r.wrapping_mul(seed) % cols as u32).collect();
                let seen = pool.run(|dev, _| {
                    let x = upload::<f32>(dev, &a)?;
                    let x = x.slice(begin..);
                    let labels = dev.upload(&labels)?;
                    let (loss, dx) = dev.cross_entropy(&x, &labels, 1.0)?;
                    Ok((dev.download(&dev.softmax(&x, cols)?)?, dev.download(&loss)?, dev.download(&dx)?))
                });
                let (y, loss, dx) = seen.unwrap().remove(0);
                for (row, x) in a[begin..].chunks(cols).enumerate() {
                    let (want, logs) = softmax(x);
                    let label = labels[row] as usize;
                    prop_assert!((f64::from(loss[row]) + logs[label]).abs() < 1e-4);
                    for c in 0..cols {
                        let (y, dx) = (f64::from(y[row * cols + c]), f64::from(dx[row * cols + c]));
                        prop_assert!((y - want[c]).abs() < 1e-5);
                        let one = if c == label { 1.0 } else { 0.0 };
                        prop_assert!((dx - want[c] + one).abs() < 1e-5);
                    }
                }
                Ok(())
            })
            .unwrap();
    }
}
