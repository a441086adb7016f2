//! D2L, "Automatic Parallelism": a perceptron of two layers on a CPU and two GPUs.
//!
//! The batch is split over the GPUs. The CPU adds the gradients of each layer and updates the weights (a parameter
//! server), and sends them back: those of layer 2 while those of layer 1 are computed.

use crate::{
    on_both,
    support::{cases, guarded},
};
use gpu_pool::{DeviceBuffer, GpuPool, Matrix, Result};
use gpu_pool_lab::Explorer;
use gpu_pool_train::{Activation, prelude::*};

const ROWS: usize = 6;
const INPUTS: usize = 4;
const HIDDEN: usize = 8;
const RATE: f32 = 0.1;

fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let hash = |i: u32| (i + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 8;
    (0..len as u32).map(|i| hash(i) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// `w -= RATE * (a + b)`
fn update(w: &mut [f32], a: &[f32], b: &[f32]) -> Result<()> {
    w.iter_mut().zip(a.iter().zip(b)).for_each(|(w, (a, b))| *w -= RATE * (a + b));
    Ok(())
}

fn as_tasks(pool: &GpuPool) -> Result<(Vec<f32>, Vec<f32>)> {
    let (batch, target) = (numbers(ROWS * INPUTS, 1), numbers(ROWS, 2));
    let rows = ROWS / 2;
    pool.tasks(|t| {
        let mut w1 = t.cpu().run((), |()| Ok(numbers(INPUTS * HIDDEN, 3)));
        let mut w2 = t.cpu().run((), |()| Ok(numbers(HIDDEN, 4)));
        for _step in 0..3 {
            let gradients = [0, 1].map(|i| {
                let (x, y) = (&batch[i * rows * INPUTS..][..rows * INPUTS], &target[i * rows..][..rows]);
                let gpu = t.gpu(i);
                let (w1, w2) = (gpu.upload(&w1), gpu.upload(&w2));
                let x = gpu.run((), move |dev, ()| dev.upload(x));
                let h = gpu.run((&x, &w1), move |dev, (x, w)| {
                    let mut h = dev.zeros::<f32>(rows * HIDDEN)?;
                    dev.gemm(1.0, Matrix::new(x, rows, INPUTS)?, Matrix::new(w, INPUTS, HIDDEN)?, 0.0, &mut h)?;
                    dev.activation_in_place(Activation::Relu, &mut h)?;
                    Ok(h)
                });
                let dy = gpu.run((&h, &w2), move |dev, (h, w)| {
                    let mut dy = dev.upload(y)?;
                    dev.gemm(1.0, Matrix::new(h, rows, HIDDEN)?, Matrix::new(w, HIDDEN, 1)?, -1.0, &mut dy)?;
                    Ok(dy)
                });
                let dw2 = gpu.run((&h, &dy), move |dev, (h, dy)| {
                    let mut dw: DeviceBuffer<f32> = dev.zeros(HIDDEN)?;
                    dev.gemm(1.0, Matrix::new(h, rows, HIDDEN)?.t(), Matrix::new(dy, rows, 1)?, 0.0, &mut dw)?;
                    Ok(dw)
                });
                let dw2 = gpu.download(&dw2);
                let dw1 = gpu.run((&x, &h, &dy, &w2), move |dev, (x, h, dy, w)| {
                    let mut dh = dev.zeros::<f32>(rows * HIDDEN)?;
                    dev.gemm(1.0, Matrix::new(dy, rows, 1)?, Matrix::new(w, 1, HIDDEN)?, 0.0, &mut dh)?;
                    dev.activation_backward_in_place(Activation::Relu, &mut dh, h)?;
                    let mut dw: DeviceBuffer<f32> = dev.zeros(INPUTS * HIDDEN)?;
                    dev.gemm(1.0, Matrix::new(x, rows, INPUTS)?.t(), Matrix::new(&dh, rows, HIDDEN)?, 0.0, &mut dw)?;
                    Ok(dw)
                });
                (gpu.download(&dw1), dw2)
            });
            let [(a1, a2), (b1, b2)] = &gradients;
            let _ = t.cpu().run((&mut w2, a2, b2), |(w, a, b)| update(w, a.as_slice()?, b.as_slice()?));
            let _ = t.cpu().run((&mut w1, a1, b1), |(w, a, b)| update(w, a.as_slice()?, b.as_slice()?));
        }
        Ok((t.get(&w1)?, t.get(&w2)?))
    })
}

fn by_hand() -> (Vec<f32>, Vec<f32>) {
    let (x, target) = (numbers(ROWS * INPUTS, 1), numbers(ROWS, 2));
    let (mut w1, mut w2) = (numbers(INPUTS * HIDDEN, 3), numbers(HIDDEN, 4));
    for _ in 0..3 {
        let (mut d1, mut d2) = (vec![0.0; INPUTS * HIDDEN], vec![0.0; HIDDEN]);
        for r in 0..ROWS {
            let row = &x[r * INPUTS..][..INPUTS];
            let sum = |j: usize| (0..INPUTS).map(|i| row[i] * w1[i * HIDDEN + j]).sum::<f32>();
            let h: Vec<f32> = (0..HIDDEN).map(|j| sum(j).max(0.0)).collect();
            let dy = (0..HIDDEN).map(|j| h[j] * w2[j]).sum::<f32>() - target[r];
            for j in 0..HIDDEN {
                d2[j] += h[j] * dy;
                for i in (0..INPUTS).filter(|_| h[j] > 0.0) {
                    d1[i * HIDDEN + j] += row[i] * dy * w2[j];
                }
            }
        }
        update(&mut w1, &d1, &[0.0; INPUTS * HIDDEN]).unwrap();
        update(&mut w2, &d2, &[0.0; HIDDEN]).unwrap();
    }
    (w1, w2)
}

#[track_caller]
fn assert_close(found: &(Vec<f32>, Vec<f32>), expected: &(Vec<f32>, Vec<f32>)) {
    let all = |w: &(Vec<f32>, Vec<f32>)| [&w.0[..], &w.1].concat();
    let (found, expected) = (all(found), all(expected));
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

on_both! {
    2: fn it_equals_the_computation_by_hand(gpus) {
        assert_close(&as_tasks(&gpus.pool(2)).unwrap(), &by_hand());
    }
}

#[test]
fn in_many_interleavings() {
    guarded(|| {
        let expected = by_hand();
        let run = Explorer::new().devices(2).seeds(cases(5, 100)).run(|pool| {
            assert_close(&as_tasks(pool)?, &expected);
            Ok(())
        });
        run.unwrap_or_else(|failure| panic!("{failure}"));
    });
}
