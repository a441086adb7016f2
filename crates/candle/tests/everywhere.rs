//! The doors between candle and gpu-pool, collectives, and the calls for inference: on software GPUs, and the same on
//! the GPUs that there are.

use candle_core::{D, DType, Device, Module as _, Tensor};
use candle_nn::RmsNorm;
use gpu_pool::{GpuPool, ReduceOp};
use gpu_pool_candle::{
    ColumnParallel, Parts, Result, RowParallel, VocabularyEmbedding, adopt, all_gather, all_reduce, all_reduce_norm,
    broadcast, enter, to_buffer, to_tensor,
};

/// A pool of 3 software GPUs, and one of all GPUs.
fn pools() -> Result<Vec<GpuPool>> {
    let mut pools = vec![GpuPool::builder().host(3).build()?];
    let all = GpuPool::builder().build()?;
    if all.run(|dev, _| Ok(dev.info().compute_capability != (0, 0)))?[0] {
        pools.push(all);
    } else {
        println!("skipped: no CUDA device");
    }
    Ok(pools)
}

fn numbers(shape: &[usize], seed: usize) -> candle_core::Result<Tensor> {
    let len = shape.iter().product::<usize>();
    let all: Vec<f32> = (0..len).map(|i| ((i * 31 + seed * 17) % 23) as f32 / 23.0 - 0.5).collect();
    Tensor::from_vec(all, shape, &Device::Cpu)
}

/// By plain loops: rows of `x`, each divided by the root of its mean square, times the weight.
fn norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let row = |x: &[f32]| {
        let square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
        x.iter().zip(weight).map(|(x, w)| x / (square + eps).sqrt() * w).collect::<Vec<f32>>()
    };
    x.chunks(weight.len()).flat_map(row).collect()
}

fn flat(x: &Tensor) -> candle_core::Result<Vec<f32>> {
    x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

fn near(found: &Tensor, wanted: &[f32], off: f32) -> candle_core::Result<()> {
    let found = flat(found)?;
    assert_eq!(found.len(), wanted.len());
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        assert!((found - wanted).abs() <= off * wanted.abs().max(1.0), "{at}: {found}, not {wanted}");
    }
    Ok(())
}

#[test]
fn tensors_are_buffers_and_buffers_tensors() -> Result<()> {
    for pool in pools()? {
        pool.try_run(|dev, _| {
            enter(dev, |device| {
                let x = numbers(&[6, 5], 1)?.to_device(device)?;
                let turned = x.t()?;
                let buffer = to_buffer::<f32>(dev, &turned)?;
                assert_eq!(dev.download(&buffer)?, flat(&turned.contiguous()?)?);
                near(&to_tensor(dev, &buffer, (5, 6))?, &flat(&turned)?, 0.0)?;
                // In place, between operations of candle.
                let part = x.affine(2.0, 1.0)?.narrow(0, 2, 2)?;
                // SAFETY: nothing else uses the tensor before the wait below.
                let mut adopted = unsafe { adopt::<f32>(dev, &part)? };
                dev.scale(&mut adopted, 3.0)?;
                drop(adopted);
                dev.synchronize()?;
                let wanted: Vec<f32> = flat(&numbers(&[6, 5], 1)?)?[10..20].iter().map(|x| 6.0 * x + 3.0).collect();
                near(&part.affine(1.0, 0.0)?, &wanted, 1e-6).map_err(gpu_pool_candle::Error::from)
            })
        })?;
    }
    Ok(())
}

#[test]
fn collectives_between_operations_of_candle() -> Result<()> {
    for pool in pools()? {
        let count = pool.device_count();
        pool.try_run(|dev, place| {
            enter(dev, |device| {
                let own = |rank: usize| numbers(&[rank + 1, 4], rank);
                // Made, summed, and used at once.
                let x = numbers(&[3, 4], 0)?.to_device(device)?.affine(1.0, place.index() as f64)?;
                let sum = all_reduce(&x, ReduceOp::Sum)?.affine(2.0, 0.0)?;
                let ranks = (0..count).sum::<usize>() as f32;
                let wanted: Vec<f32> =
                    flat(&numbers(&[3, 4], 0)?)?.iter().map(|x| 2.0 * (count as f32 * x + ranks)).collect();
                near(&sum, &wanted, 1e-5)?;
                let root = count - 1;
                near(
                    &broadcast(&own(0)?.to_device(device)?.affine(1.0, place.index() as f64)?, root)?,
                    &flat(&own(0)?)?.iter().map(|x| x + root as f32).collect::<Vec<_>>(),
                    1e-6,
                )?;
                let all = all_gather(&own(place.index())?.to_device(device)?, 0)?;
                let wanted: Vec<f32> =
                    (0..count).map(|rank| flat(&own(rank)?)).collect::<Result<Vec<_>, _>>()?.concat();
                near(&all, &wanted, 0.0)?;
                Ok(())
            })
        })?;
    }
    Ok(())
}

/// A row-parallel layer with the addition and the norm behind it, many times one after the other, against plain loops.
#[test]
fn a_sum_an_addition_and_a_norm_in_one_call() -> Result<()> {
    const WIDTH: usize = 64;
    let weight = flat(&numbers(&[WIDTH], 5)?)?;
    for (pool, (dtype, off)) in
        pools()?.iter().flat_map(|pool| [(DType::F32, 1e-4), (DType::BF16, 6e-2)].map(|dtype| (pool, dtype)))
    {
        for rows in [1, 5] {
            let mut residual = flat(&numbers(&[rows, WIDTH], 3)?)?;
            let bias = flat(&numbers(&[WIDTH], 8)?)?;
            let mut wanted = Vec::new();
            for step in 0..20 {
                let x = flat(&numbers(&[rows, WIDTH], step)?)?;
                for (at, residual) in residual.iter_mut().enumerate() {
                    // The weights are twice the identity, cut into columns.
                    *residual += 2.0 * x[at] + bias[at % WIDTH];
                }
                wanted.push(norm(&residual, &weight, 1e-5));
            }
            pool.try_run(|dev, place| {
                enter(dev, |device| {
                    let to = |x: Tensor| x.to_dtype(dtype)?.to_device(device);
                    let columns = place.range(WIDTH);
                    let identity = (Tensor::eye(WIDTH, DType::F32, &Device::Cpu)? * 2.0)?;
                    let cut = |x: &Tensor| x.narrow(1, columns.start, columns.len())?.contiguous();
                    let layer = RowParallel::new(to(cut(&identity)?)?, Some(to(numbers(&[WIDTH], 8)?)?));
                    let norm = RmsNorm::new(to(numbers(&[WIDTH], 5)?)?, 1e-5);
                    let sum = to(numbers(&[rows, WIDTH], 3)?)?;
                    for (step, wanted) in wanted.iter().enumerate() {
                        let x = to(cut(&numbers(&[rows, WIDTH], step)?)?)?;
                        near(&layer.forward_norm(&x, &sum, &norm)?, wanted, off)?;
                    }
                    near(&sum, &residual, off)?;
                    Ok(())
                })
            })?;
        }
    }
    Ok(())
}

#[test]
fn merged_layers_and_words_of_the_host() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let (first, second, words) = (numbers(&[5, 4], 1)?, numbers(&[7, 4], 2)?, numbers(&[10, 4], 3)?);
    let named = [("first.weight", &first), ("second.weight", &second), ("words.weight", &words)];
    let named = named.map(|(name, tensor)| (name.to_string(), tensor.clone()));
    candle_core::safetensors::save(&std::collections::HashMap::from(named), &file)?;
    // SAFETY: the file does not change.
    let parts = unsafe { Parts::mapped(&[&file])? };
    for pool in pools()? {
        pool.try_run(|dev, _| {
            enter(dev, |device| {
                let weights = parts.builder(DType::F32, device);
                let layer = |name, outputs| ColumnParallel::load(dev, (4, outputs, 1), false, &weights.pp(name));
                let (first, second) = (layer("first", 5)?, layer("second", 7)?);
                let x = numbers(&[3, 4], 9)?.to_device(device)?;
                let apart = Tensor::cat(&[first.forward(&x)?, second.forward(&x)?], D::Minus1)?;
                near(&ColumnParallel::merged(&[first, second])?.forward(&x)?, &flat(&apart)?, 1e-6)?;
                let embedding = VocabularyEmbedding::load(dev, 10, 4, &weights.pp("words"))?;
                let found = all_reduce(&embedding.partial(&[9, 0, 4, 9])?, ReduceOp::Sum)?;
                let wanted = words.index_select(&Tensor::new(&[9u32, 0, 4, 9], &Device::Cpu)?, 0)?;
                near(&found, &flat(&wanted)?, 0.0)?;
                near(&embedding.forward(&Tensor::new(&[9u32, 0, 4, 9], device)?)?, &flat(&wanted)?, 0.0)?;
                Ok(())
            })
        })?;
    }
    Ok(())
}

#[test]
fn residuals_that_cannot_change_in_place_are_refused() -> Result<()> {
    let pool = GpuPool::builder().host(1).build()?;
    pool.try_run(|dev, _| {
        enter(dev, |_| {
            let (x, norm) = (numbers(&[4, 4], 1)?, RmsNorm::new(numbers(&[4], 2)?, 1e-5));
            let why = |residual: &Tensor| all_reduce_norm(&x, residual, &norm).unwrap_err().to_string();
            let shape = why(&numbers(&[2, 4], 1)?);
            assert!(shape.starts_with("all_reduce_norm: [4, 4] of F32 and a residual of [2, 4]"), "{shape}");
            assert!(why(&x.to_dtype(DType::F64)?).contains("a residual of"));
            assert!(why(&x.t()?).contains("contiguous"));
            assert!(why(candle_core::Var::from_tensor(&x)?.as_tensor()).contains("tracked"));
            Ok(())
        })
    })?;
    Ok(())
}
