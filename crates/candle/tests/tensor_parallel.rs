//! Divided layers against whole ones.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::VarMap;
use gpu_pool::GpuPool;
use gpu_pool_candle::{
    ColumnParallel, Part, Parts, Result, RowParallel, VocabularyEmbedding, enter, vocabulary_cross_entropy,
};

fn numbers(shape: &[usize], seed: usize) -> candle_core::Result<Tensor> {
    let len = shape.iter().product::<usize>();
    let all: Vec<f32> = (0..len).map(|i| ((i * 31 + seed * 17) % 23) as f32 / 23.0 - 0.5).collect();
    Tensor::from_vec(all, shape, &Device::Cpu)
}

fn near(a: &Tensor, b: &Tensor) {
    assert_eq!(a.shape(), b.shape());
    let off = (a - b).unwrap().abs().unwrap().max_all().map_or(0.0, |x| x.to_scalar::<f32>().unwrap());
    assert!(off < 2e-6, "off by {off}");
}

/// The range of a dimension that a device has.
fn own(part: &Part) -> std::ops::Range<usize> {
    part.cut.clone().unwrap().1
}

const HIDDEN: usize = 7;
const WORDS: usize = 11;

/// Whole weights: table, up, its bias, down, its bias.
fn whole() -> Result<[Var; 5]> {
    let of = |shape: &[usize], seed| Var::from_tensor(&numbers(shape, seed)?);
    Ok([of(&[WORDS, 4], 1)?, of(&[HIDDEN, 4], 2)?, of(&[HIDDEN], 3)?, of(&[4, HIDDEN], 4)?, of(&[4], 5)?])
}

/// Loss and gradients of a small language model: embedding, two layers, and the embedding again as its head.
fn on_one_device(words: &Tensor, targets: &Tensor) -> Result<(f32, Vec<Tensor>)> {
    let all = whole()?;
    let [table, up, up_bias, down, down_bias] = &all;
    let x = table.index_select(words, 0)?;
    let hidden = x.matmul(&up.t()?)?.broadcast_add(up_bias)?.gelu()?;
    let y = hidden.matmul(&down.t()?)?.broadcast_add(down_bias)?;
    let loss = candle_nn::loss::cross_entropy(&y.matmul(&table.t()?)?, targets)?;
    let gradients = loss.backward()?;
    Ok((loss.to_scalar()?, all.iter().map(|var| gradients.get(var).unwrap().clone()).collect()))
}

#[test]
fn layers_of_any_size_give_the_results_and_gradients_of_whole_ones() -> Result<()> {
    let words = Tensor::new(&[3u32, 0, 10, 3, 7], &Device::Cpu)?;
    let targets = Tensor::new(&[1u32, 10, 4, 0, 9], &Device::Cpu)?;
    let (wanted, gradients) = on_one_device(&words, &targets)?;
    // 12 devices have 11 words and 7 hidden columns.
    for devices in [1, 2, 3, 4, 12] {
        let pool = GpuPool::builder().host(devices).build()?;
        let found = pool.try_run(|dev, _| {
            enter(dev, |device| {
                let variables = VarMap::new();
                let parts = Parts::trained(&variables);
                let weights = parts.builder(DType::F32, device);
                let embedding = VocabularyEmbedding::load(dev, WORDS, 4, &weights.pp("words"))?;
                let up = ColumnParallel::load(dev, (4, HIDDEN, 1), true, &weights.pp("up"))?;
                let down = RowParallel::load(dev, (HIDDEN, 4, 1), true, &weights.pp("down"))?;
                let var = |name: &str| variables.data().lock().unwrap()[name].clone();
                let (rows, hidden) = (own(&Part::of(dev, 0, WORDS, 1)), own(&Part::of(dev, 0, HIDDEN, 1)));
                let cut = |x: &Tensor, index: usize| match index {
                    0 => x.narrow(0, rows.start, rows.len()),
                    1 | 2 => x.narrow(0, hidden.start, hidden.len()),
                    3 => x.narrow(1, hidden.start, hidden.len()),
                    _ => Ok(x.clone()),
                };
                let names = ["words.weight", "up.weight", "up.bias", "down.weight", "down.bias"];
                for (index, (name, whole)) in names.iter().zip(whole()?).enumerate() {
                    var(name).set(&cut(&whole, index)?.contiguous()?)?;
                }
                let y = down.forward(&up.forward(&embedding.forward(&words)?)?.gelu()?)?;
                let head = ColumnParallel::new(embedding.table().clone(), None);
                let loss = vocabulary_cross_entropy(&head.forward(&y)?, &embedding.words(), &targets)?;
                assert_eq!(head.gathered().forward(&y)?.dims2()?, (5, WORDS));
                let found = loss.backward()?;
                for (index, name) in names.iter().enumerate() {
                    let wanted = cut(&gradients[index], index)?;
                    if wanted.elem_count() > 0 {
                        near(found.get(&var(name)).expect(name), &wanted);
                    }
                }
                Ok(loss.to_scalar::<f32>()?)
            })
        })?;
        assert!(found.iter().all(|loss| (loss - wanted).abs() < 1e-6), "{found:?}, not {wanted}");
    }
    Ok(())
}

#[test]
fn saved_parts_are_loaded_on_any_number_of_devices() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let x = numbers(&[3, 4], 6)?;
    let forward = |devices: usize, save: bool| -> Result<Vec<Vec<Vec<f32>>>> {
        let pool = GpuPool::builder().host(devices).build()?;
        let read = match save {
            true => None,
            // SAFETY: the file does not change while it is read.
            false => Some(unsafe { Parts::mapped(&[&file])? }),
        };
        pool.try_run(|dev, _| {
            enter(dev, |device| {
                let parts = read.clone().unwrap_or_else(|| Parts::trained(&VarMap::new()));
                let weights = parts.builder(DType::F32, device);
                let up = ColumnParallel::load(dev, (4, 10, 2), true, &weights.pp("up"))?;
                let down = RowParallel::load(dev, (10, 4, 2), false, &weights.pp("down"))?;
                if save {
                    parts.save(&file)?;
                } else {
                    let shape = weights.pp("up").contains_tensor("weight");
                    assert!(shape && ColumnParallel::load(dev, (4, 12, 2), true, &weights.pp("up")).is_err());
                    assert!(parts.save(&file).is_err());
                }
                Ok(down.forward(&up.forward(&x)?)?.to_vec2::<f32>()?)
            })
        })
    };
    let first = forward(3, true)?;
    for devices in [1, 2, 6] {
        for (found, wanted) in
            forward(devices, false)?.iter().flatten().flatten().zip(first[0].iter().flatten().cycle())
        {
            assert!((found - wanted).abs() < 2e-6, "{found}, not {wanted}");
        }
    }
    let whole = candle_core::safetensors::load(&file, &Device::Cpu)?;
    assert_eq!((whole["up.weight"].dims(), whole["down.weight"].dims()), (&[10, 4][..], &[4, 10][..]));
    Ok(())
}

#[test]
fn whole_weights_with_random_first_values_are_the_same_on_all_devices() -> Result<()> {
    let pool = GpuPool::builder().host(3).build()?;
    let found = pool.try_run(|dev, _| {
        enter(dev, |device| {
            let weights = Parts::trained(&VarMap::new()).builder(DType::F32, device);
            let random = Part::default().init(candle_nn::Init::Randn { mean: 0.0, stdev: 1.0 });
            let first = weights.get_with_hints(5, "norm", random.clone())?.to_vec1::<f32>()?;
            assert_eq!(first, weights.get_with_hints(5, "norm", random)?.to_vec1::<f32>()?);
            Ok(first)
        })
    })?;
    assert!(found.iter().all(|other| other == &found[0]) && found[0][0] != found[0][1], "{found:?}");
    Ok(())
}

#[test]
fn wrong_columns_are_refused() -> Result<()> {
    let pool = GpuPool::builder().host(1).build()?;
    let refused = pool.try_run(|dev, _| {
        enter(dev, |device| {
            let logits = Tensor::zeros((1, 3), DType::F32, device)?;
            vocabulary_cross_entropy(&logits, &(0..4), &Tensor::new(&[0u32], device)?).map(drop)
        })
    });
    assert_eq!(refused.unwrap_err().to_string(), "vocabulary_cross_entropy: 3 columns for 0..4");
    Ok(())
}
