//! What holds for all operations: graphs, streams, several devices, no elements, wrong sizes.

use crate::{on_both, rig::values};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Result};
use gpu_pool_train::{Activation, prelude::*};

const ROWS: usize = 6;
const COLS: usize = 10;

/// Some of every family, and what came of it.
fn step(dev: &Device, x: &DeviceBuffer<f32>, labels: &DeviceBuffer<u32>) -> Result<Vec<DeviceBuffer<f32>>> {
    let weights = dev.copied(&x.slice(..COLS))?;
    let mut noise = dev.zeros::<f32>(x.len())?;
    dev.normal(&mut noise, 0.0, 1.0, 3, 4)?;
    dev.dropout_in_place(&mut noise, 0.5, 5, 6)?;
    let sum = dev.add(x, &noise)?;
    let (normed, mean, rstd) = dev.layer_norm(&sum, &weights, &weights, 1e-5)?;
    let active = dev.activation(Activation::Gelu.biased(&weights), &normed)?;
    let (loss, mut d) = dev.cross_entropy(&active, labels, 1.0)?;
    dev.activation_backward_in_place(Activation::Gelu.biased(&weights), &mut d, &normed)?;
    let mut bias = dev.zeros::<f32>(COLS)?;
    dev.column_sum_into(&d, &mut bias)?;
    let dx = dev.layer_norm_backward(&d, &sum, &weights, &mean, &rstd)?;
    let turned = dev.transpose(&dx, ROWS, COLS)?;
    let (mut dgamma, mut dbeta) = (dev.zeros::<f32>(COLS)?, dev.zeros::<f32>(COLS)?);
    dev.layer_norm_weights_backward(&d, &sum, &mean, &rstd, &mut dgamma, &mut dbeta)?;
    let mut product = dev.mul(&dgamma, &dbeta)?;
    dev.scale(&mut product, 0.5)?;
    dev.axpy(2.0, &dbeta, &mut product)?;
    let (squared, rrms) = dev.rms_norm(&sum, &weights, 1e-5)?;
    let dsquared = dev.rms_norm_backward(&d, &squared, &weights, &rrms)?;
    dev.rms_norm_weights_backward(&d, &squared, &rrms, &mut dgamma)?;
    let mut shares = dev.log_softmax(&sum, COLS)?;
    shares = dev.log_softmax_backward(&d, &shares, COLS)?;
    dev.softmax_in_place(&mut shares, COLS)?;
    let halves = dev.transpose_batch(&dx, 2, ROWS / 2, COLS)?;
    let best = dev.cast::<f32, _>(&dev.argmax(&active, COLS)?)?;
    let rows = dev.embedding(x, COLS, labels)?;
    let mut table = dev.zeros::<f32>(x.len())?;
    dev.embedding_backward(&dx, COLS, labels, &mut table)?;
    let mut part = dev.zeros::<f32>(ROWS * 3)?;
    dev.copy_2d(&turned, ROWS, &mut part, 3, ROWS, 3)?;
    Ok(vec![active, loss, bias, turned, best, rows, table, part, product, dgamma, dsquared, shares, halves])
}

trait Copied {
    fn copied<V: gpu_pool::AsView<Elem = f32>>(&self, x: &V) -> Result<DeviceBuffer<f32>>;
}
impl Copied for Device {
    fn copied<V: gpu_pool::AsView<Elem = f32>>(&self, x: &V) -> Result<DeviceBuffer<f32>> {
        let mut y = self.zeros(x.view().len())?;
        self.copy(&x.view(), &mut y)?;
        Ok(y)
    }
}

fn inputs(dev: &Device) -> Result<(DeviceBuffer<f32>, DeviceBuffer<u32>)> {
    let x: Vec<f32> = values::<f32>(ROWS * COLS, 1).into_iter().map(|x| x as f32).collect();
    Ok((dev.upload(&x)?, dev.upload(&[5u32, 0, 3, 3, 1, 2])?))
}

fn downloads(dev: &Device, all: &[DeviceBuffer<f32>]) -> Result<Vec<Vec<f32>>> {
    all.iter().map(|x| dev.download(x)).collect()
}

/// The error of an operation must name the operation, the device and this file.
#[track_caller]
fn refused<R>(result: Result<R>, op: &str) {
    match result {
        Err(error @ Error::InvalidArgument { op: named, .. }) => {
            let text = error.to_string();
            assert!(named == op && text.contains("device 0") && text.contains("general.rs"), "{text}");
        }
        Err(other) => panic!("{op}: {other}"),
        Ok(_) => panic!("{op} took it"),
    }
}

on_both! {
    // Nothing is launched before: the modules are loaded while the graph is captured.
    1: fn in_graphs(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (x, labels) = inputs(dev)?;
            let (graph, captured) = dev.capture(|dev| step(dev, &x, &labels))?;
            dev.launch_graph(&graph)?;
            dev.launch_graph(&graph)?;
            let direct = step(dev, &x, &labels)?;
            assert_eq!(downloads(dev, &captured)?, downloads(dev, &direct)?);
            Ok(())
        })
        .unwrap();
    }

    1: fn on_streams(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (x, labels) = inputs(dev)?;
            let side = dev.stream()?;
            let there = step(&dev.on(&side), &x, &labels)?;
            let here = step(dev, &x, &labels)?;
            assert_eq!(downloads(dev, &there)?, downloads(dev, &here)?);
            Ok(())
        })
        .unwrap();
    }

    1: fn on_several_devices(gpus) {
        let run = |pool: &GpuPool| {
            pool.run(|dev, _| {
                let (x, labels) = inputs(dev)?;
                downloads(dev, &step(dev, &x, &labels)?)
            })
            .unwrap()
        };
        let all = run(&gpus.pool(gpus.up_to(3)));
        assert!(all.iter().all(|one| *one == all[0]));
        assert_eq!(run(&gpus.pool(1))[0], all[0]);
    }

    1: fn nothing_at_all(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (mut x, w) = (dev.zeros::<f32>(0)?, dev.upload(&[1.0f32; 3])?);
            assert!(dev.add(&x, &x)?.is_empty() && dev.gelu(&x)?.is_empty() && dev.softmax(&x, 5)?.is_empty());
            let (loss, dx) = dev.cross_entropy(&x, &dev.zeros::<u32>(0)?, 1.0)?;
            assert!(loss.is_empty() && dx.is_empty());
            let (y, mean, rstd) = dev.layer_norm(&x, &w, &w, 1e-5)?;
            assert!(y.is_empty() && dev.layer_norm_backward(&x, &x, &w, &mean, &rstd)?.is_empty());
            let mut sum = dev.upload(&[1.0f32; 3])?;
            dev.column_sum_into(&x, &mut sum)?;
            assert_eq!(dev.download(&sum)?, [0.0; 3]);
            assert!(dev.argmax(&x, 2)?.is_empty() && dev.transpose(&x, 0, 9)?.is_empty());
            assert!(dev.embedding(&w, 3, &dev.zeros::<u32>(0)?)?.is_empty());
            dev.normal(&mut x, 0.0, 1.0, 0, 0)?;
            assert!(dev.dropout(&x, 0.5, 0, 0)?.is_empty());
            assert!(dev.cast::<i32, _>(&x)?.is_empty());
            dev.copy_2d(&w, 1, &mut x, 1, 0, 0)
        })
        .unwrap();
    }

    1: fn wrong_sizes(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (mut six, five) = (dev.zeros::<f32>(6)?, dev.zeros::<f32>(5)?);
            let (two, labels) = (dev.zeros::<f32>(2)?, dev.zeros::<u32>(4)?);
            refused(dev.add(&six, &five), "add");
            refused(dev.mul_in_place(&mut six, &five), "mul_in_place");
            refused(dev.sub_into(&five, &five, &mut six), "sub_into");
            refused(dev.activation_into(Activation::Relu, &five, &mut six), "activation_into");
            refused(dev.activation_backward(Activation::Relu, &five, &six), "activation_backward");
            refused(dev.activation(Activation::Relu.biased(&five), &six), "activation");
            refused(dev.activation(Activation::Relu.biased(&dev.zeros::<f32>(0)?), &six), "activation");
            refused(dev.softmax(&six, 4), "softmax");
            refused(dev.softmax(&six, 0), "softmax");
            refused(dev.log_softmax_in_place(&mut six, 5), "log_softmax_in_place");
            refused(dev.softmax_backward(&five, &six, 3), "softmax_backward");
            refused(dev.cross_entropy(&six, &labels, 1.0), "cross_entropy");
            refused(dev.cross_entropy_loss(&dev.zeros::<f32>(0)?, &labels), "cross_entropy_loss");
            refused(dev.layer_norm(&six, &two, &five, 0.1), "layer_norm");
            refused(dev.layer_norm(&six, &five, &five, 0.1), "layer_norm");
            refused(dev.rms_norm_backward(&six, &six, &two, &two), "rms_norm_backward");
            let mut dgamma = dev.zeros::<f32>(2)?;
            refused(dev.rms_norm_weights_backward(&five, &six, &five, &mut dgamma), "rms_norm_weights_backward");
            refused(dev.argmax(&six, 4), "argmax");
            refused(dev.column_sum_into(&six, &mut dev.zeros::<f32>(4)?), "column_sum_into");
            refused(dev.transpose(&six, 2, 2), "transpose");
            refused(dev.transpose_batch(&six, 2, 2, 2), "transpose_batch");
            refused(dev.transpose_batch(&six, usize::MAX, 2, 3), "transpose_batch");
            refused(dev.transpose(&dev.zeros::<[u8; 3]>(6)?, 2, 3), "transpose");
            refused(dev.copy_2d(&five, 3, &mut six, 3, 2, 3), "copy_2d");
            refused(dev.copy_2d(&five, 2, &mut six, 3, 2, 3), "copy_2d");
            refused(dev.copy_2d(&six, usize::MAX, &mut dev.zeros::<f32>(6)?, 3, 3, 3), "copy_2d");
            refused(dev.embedding(&six, 4, &labels), "embedding");
            refused(dev.embedding_backward(&six, 2, &labels, &mut dev.zeros::<f32>(6)?), "embedding_backward");
            refused(dev.dropout(&six, 1.5, 0, 0), "dropout");
            refused(dev.dropout(&six, f64::NAN, 0, 0), "dropout");
            refused(dev.uniform(&mut six, 0.0..1.0, 0, u64::MAX), "uniform");
            // The device works on.
            assert_eq!(dev.download(&dev.relu(&six)?)?, [0.0; 6]);
            Ok(())
        })
        .unwrap();
    }
}
