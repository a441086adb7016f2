//! Arithmetic of two buffers, and activations.

use crate::{
    each_type, on_both,
    rig::{Type, acc_eps, close, download, upload, values},
    support::Gpus,
};
use gpu_pool::{Device, kernel::CastTo};
use gpu_pool_train::{Activation, prelude::*};
use half::{bf16, f16};

pub const ALL: [Activation; 5] =
    [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu];

/// `f(x)` and its slope, in `f64`.
pub fn function(f: Activation, x: f64) -> (f64, f64) {
    let pi = std::f64::consts::PI;
    match f {
        Activation::Relu => (x.max(0.0), if x > 0.0 { 1.0 } else { 0.0 }),
        Activation::Gelu => {
            let below = 0.5 * (1.0 + erf(x / 2f64.sqrt()));
            (x * below, below + x * (-0.5 * x * x).exp() / (2.0 * pi).sqrt())
        }
        Activation::GeluTanh => {
            let c = (2.0 / pi).sqrt();
            let t = (c * (x + 0.044715 * x.powi(3))).tanh();
            (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x))
        }
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
        _ => (x, 1.0),
    }
}

/// The error function by a series without cancellation, which converges for |x| up to 4.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * 2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp()
}

const LENGTHS: [usize; 8] = [0, 1, 2, 7, 8, 255, 1000, 5001];

/// `scale`, `axpy` and `cast`, of whole buffers and of parts that begin anywhere.
fn scaled<T: Type + CastTo<f64>>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for n in LENGTHS {
            for begin in [0, 1, 3, 4].into_iter().filter(|&begin| begin <= n) {
                let (a, b) = (values::<T>(n, 1), values::<T>(n, 2));
                let (mut x, mut y) = (upload::<T>(dev, &a)?, upload::<T>(dev, &b)?);
                let wide = dev.download(&dev.cast::<f64, _>(&x.slice(begin..))?)?;
                assert_eq!(wide, a[begin..]);
                dev.axpy(T::acc(0.75), &x.slice(begin..), &mut y.slice_mut(begin..))?;
                dev.scale(&mut x.slice_mut(begin..), T::acc(-0.75))?;
                let part = |i: usize| i >= begin;
                let sums = (0..n).map(|i| if part(i) { 0.75 * a[i] + b[i] } else { b[i] }).collect::<Vec<_>>();
                close::<T>(&download(dev, &y)?, &sums, |_| 6.0 * acc_eps::<T>());
                let products = (0..n).map(|i| if part(i) { -0.75 * a[i] } else { a[i] }).collect::<Vec<_>>();
                close::<T>(&download(dev, &x)?, &products, |_| 6.0 * acc_eps::<T>());
            }
        }
        Ok(())
    })
    .unwrap();
}

fn arithmetic<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for n in LENGTHS {
            let (a, b) = (values::<T>(n, 1), values::<T>(n, 2));
            let (mut x, y) = (upload::<T>(dev, &a)?, upload::<T>(dev, &b)?);
            let mut z = dev.zeros::<T>(n)?;
            let want = |f: fn(f64, f64) -> f64| a.iter().zip(&b).map(|(&a, &b)| f(a, b)).collect::<Vec<_>>();
            // One rounding of the exact result; of f64 the reference itself is rounded.
            let slack = |_| if size_of::<T>() == 8 { 1e-15 } else { f32::EPSILON as f64 * 9.0 };
            let (sum, difference, product) = (want(|a, b| a + b), want(|a, b| a - b), want(|a, b| a * b));
            close::<T>(&download(dev, &dev.add(&x, &y)?)?, &sum, slack);
            close::<T>(&download(dev, &dev.sub(&x, &y)?)?, &difference, slack);
            close::<T>(&download(dev, &dev.mul(&x, &y)?)?, &product, slack);
            dev.mul_into(&x, &y, &mut z)?;
            close::<T>(&download(dev, &z)?, &product, slack);
            dev.add_in_place(&mut x, &y)?;
            close::<T>(&download(dev, &x)?, &sum, slack);
            dev.sub_in_place(&mut x, &y)?;
            dev.sub_in_place(&mut x, &y)?;
            dev.mul_in_place(&mut z, &y)?;
            // A part that begins anywhere has the same bits.
            for begin in [1, 3].into_iter().filter(|&begin| begin < n) {
                let part = dev.download(&dev.mul(&y.slice(begin..), &y.slice(begin..))?)?;
                assert_eq!(part, dev.download(&dev.mul(&y, &y)?)?[begin..]);
            }
        }
        Ok(())
    })
    .unwrap();
}

fn functions<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    // 8 operations in the arithmetic's type, on numbers of at most 4.
    let slack = |_| 32.0 * acc_eps::<T>();
    pool.run(|dev, _| {
        for f in ALL {
            for n in [0, 1, 7, 1000] {
                let (a, b) = (values::<T>(n, 3), values::<T>(n, 4));
                let (mut x, mut dy) = (upload::<T>(dev, &a)?, upload::<T>(dev, &b)?);
                let y: Vec<_> = a.iter().map(|&a| function(f, a).0).collect();
                let dx: Vec<_> = a.iter().zip(&b).map(|(&a, &b)| b * function(f, a).1).collect();
                let fresh = dev.activation(f, &x)?;
                close::<T>(&download(dev, &fresh)?, &y, slack);
                close::<T>(&download(dev, &dev.activation_backward(f, &dy, &x)?)?, &dx, |_| 3.0 * slack(0));
                dev.activation_backward_in_place(f, &mut dy, &x)?;
                close::<T>(&download(dev, &dy)?, &dx, |_| 3.0 * slack(0));
                let mut other = dev.zeros::<T>(n)?;
                dev.activation_into(f, &x, &mut other)?;
                dev.activation_in_place(f, &mut x)?;
                assert_eq!(dev.download(&x)?, dev.download(&fresh)?);
                assert_eq!(dev.download(&other)?, dev.download(&fresh)?);
            }
        }
        let x = upload::<T>(dev, &values::<T>(20, 5))?;
        type Named<T> = fn(&Device, &gpu_pool::DeviceBuffer<T>) -> gpu_pool::Result<gpu_pool::DeviceBuffer<T>>;
        let named: [(Activation, Named<T>); 4] = [
            (Activation::Relu, |dev, x| dev.relu(x)),
            (Activation::Gelu, |dev, x| dev.gelu(x)),
            (Activation::GeluTanh, |dev, x| dev.gelu_tanh(x)),
            (Activation::Silu, |dev, x| dev.silu(x)),
        ];
        for (f, named) in named {
            assert_eq!(dev.download(&named(dev, &x)?)?, dev.download(&dev.activation(f, &x)?)?);
        }
        Ok(())
    })
    .unwrap();
}

fn biases<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    // As above, of numbers of at most 6.
    let slack = |_| 64.0 * acc_eps::<T>();
    pool.run(|dev, _| {
        for f in ALL {
            for (rows, cols) in [(0, 3), (1, 1), (5, 3), (7, 8), (3, 64), (4, 101)] {
                let (a, b, d) = (values::<T>(rows * cols, 6), values::<T>(cols, 7), values::<T>(rows * cols, 8));
                let b: Vec<_> = b.iter().map(|b| T::of(b / 4.0).to()).collect();
                let (mut x, bias, mut dy) = (upload::<T>(dev, &a)?, upload::<T>(dev, &b)?, upload::<T>(dev, &d)?);
                let at = |i: usize| function(f, a[i] + b[i % cols]);
                let y: Vec<_> = (0..a.len()).map(|i| at(i).0).collect();
                let dx: Vec<_> = (0..a.len()).map(|i| d[i] * at(i).1).collect();
                close::<T>(&download(dev, &dev.activation(f.biased(&bias), &x)?)?, &y, slack);
                let back = dev.activation_backward(f.biased(&bias), &dy, &x)?;
                close::<T>(&download(dev, &back)?, &dx, |_| 3.0 * slack(0));
                dev.activation_backward_in_place(f.biased(&bias), &mut dy, &x)?;
                assert_eq!(dev.download(&dy)?, dev.download(&back)?);
                dev.activation_in_place(f.biased(&bias), &mut x)?;
                close::<T>(&download(dev, &x)?, &y, slack);
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Far from 0 a function is 0 or its argument, and its slope 0 or 1.
fn limits<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        // Of these, f16 has 60000 alone, and infinity.
        let far = [f64::INFINITY, 1e300, 1e38, 1e30, 1e20, 6e4];
        let x: Vec<f64> = far.iter().flat_map(|&x| [T::of(x).to(), T::of(-x).to()]).collect();
        let y: Vec<f64> = x.iter().map(|x| x.max(0.0)).collect();
        let slopes: Vec<f64> = x.iter().map(|&x| if x > 0.0 { 1.0 } else { 0.0 }).collect();
        let (on, dy) = (upload::<T>(dev, &x)?, upload::<T>(dev, &vec![1.0; x.len()])?);
        let bias = upload::<T>(dev, &vec![0.5; x.len()])?;
        for f in &ALL[1..] {
            assert_eq!(download(dev, &dev.activation(*f, &on)?)?, y, "{f:?}");
            assert_eq!(download(dev, &dev.activation_backward(*f, &dy, &on)?)?, slopes, "{f:?}");
            // Rounding may take the bias away, or not; 0 stays 0.
            let with_bias = download(dev, &dev.activation(f.biased(&bias), &on)?)?;
            assert!(with_bias.iter().zip(&y).all(|(a, b)| a == b || (a - b).abs() <= 1.0), "{f:?} {with_bias:?}");
            assert_eq!(download(dev, &dev.activation_backward(f.biased(&bias), &dy, &on)?)?, slopes, "{f:?}");
        }
        Ok(())
    })
    .unwrap();
}

on_both! {
    1: fn scale_axpy_and_cast(gpus) {
        scaled::<f32>(gpus);
        scaled::<f16>(gpus);
        scaled::<bf16>(gpus);
    }

    1: fn sums_differences_products(gpus) { each_type!(arithmetic(gpus)) }
    1: fn activations(gpus) { each_type!(functions(gpus)) }
    1: fn activations_with_a_bias(gpus) { each_type!(biases(gpus)) }

    1: fn what_is_not_a_number_or_infinite(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let x = dev.upload(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -200.0, 200.0])?;
            for f in ALL {
                let y = dev.download(&dev.activation(f, &x)?)?;
                assert!(y[0].is_nan(), "{f:?}");
                assert_eq!((y[1], y[4]), (f32::INFINITY, 200.0), "{f:?}");
                assert!(f == Activation::Identity || (y[2] == 0.0 && y[3] == 0.0), "{f:?} {y:?}");
                let slopes = dev.activation_backward(f, &dev.upload(&[1.0f32; 5])?, &x)?;
                let slopes = dev.download(&slopes)?;
                // The slopes of `Identity` and `Relu` do not depend on what the number is.
                assert!(slopes[0].is_nan() || matches!(f, Activation::Identity | Activation::Relu), "{f:?} {slopes:?}");
            }
            Ok(())
        })
        .unwrap();
    }
    1: fn activations_at_their_limits(gpus) { each_type!(limits(gpus)) }
}
