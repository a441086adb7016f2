//! A model of Llama's shape with candle, tensor parallel: heads, the columns of the feed-forward layers, and words are
//! divided among the devices. `generate` and `serve` run it.

use candle_core::{D, DType, Device as Candle, Module, Tensor};
use candle_nn::{RmsNorm, ops, rotary_emb};
use gpu_pool::Device;
use gpu_pool_candle::{ColumnParallel, Part, PartBuilder, Result, RowParallel, VocabularyEmbedding, all_reduce_norm};
use std::{collections::HashMap, path::Path};

/// The sizes of a model. Its names are those of Llama's files.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub words: usize,
    pub width: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    /// Each is shared by `heads / kv_heads` heads.
    pub kv_heads: usize,
    /// The longest sequence.
    pub longest: usize,
}

/// Small enough for software GPUs. No number of devices above 1 divides all of its sizes.
pub const SMALL: Config =
    Config { words: 509, width: 192, inner: 515, layers: 4, heads: 12, kv_heads: 6, longest: 256 };

impl Config {
    fn head(&self) -> usize {
        self.width / self.heads
    }

    /// Names, shapes, and the largest value for random weights.
    pub fn weights(&self) -> Vec<(String, Vec<usize>, f64)> {
        let (width, inner, kv) = (self.width, self.inner, self.kv_heads * self.head());
        let by = 1.7 / (width as f64).sqrt();
        let mut all = vec![("model.embed_tokens.weight".into(), vec![self.words, width], 1.7)];
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize], largest| {
                all.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec(), largest));
            };
            add("self_attn.q_proj", &[width, width], by);
            add("self_attn.k_proj", &[kv, width], by);
            add("self_attn.v_proj", &[kv, width], by);
            add("self_attn.o_proj", &[width, width], by);
            add("mlp.gate_proj", &[inner, width], by);
            add("mlp.up_proj", &[inner, width], by);
            add("mlp.down_proj", &[width, inner], by);
            add("input_layernorm", &[width], 1.0);
            add("post_attention_layernorm", &[width], 1.0);
        }
        all.push(("model.norm.weight".into(), vec![width], 1.0));
        all.push(("lm_head.weight".into(), vec![self.words, width], by));
        all
    }

    /// Writes a file of random weights, the same in each run.
    pub fn write(&self, path: &Path) -> Result<()> {
        let (mut all, mut state) = (HashMap::new(), 1u64);
        for (name, shape, largest) in self.weights() {
            let numbers = (0..shape.iter().product::<usize>()).map(|_| random(&mut state, largest));
            all.insert(name, Tensor::from_vec(numbers.collect::<Vec<_>>(), shape, &Candle::Cpu)?);
        }
        Ok(candle_core::safetensors::save(&all, path)?)
    }
}

/// The next of a row of random numbers between minus `largest` and `largest`.
pub fn random(state: &mut u64, largest: f64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (((*state >> 33) as f64 / (1u64 << 30) as f64 - 1.0) * largest) as f32
}

/// One device's part of the model. Norms stand where the sums before them are: each is one call with its sum.
pub struct Model {
    embedding: VocabularyEmbedding,
    first: RmsNorm,
    layers: Vec<Layer>,
    head: ColumnParallel,
    cos: Tensor,
    sin: Tensor,
}

struct Layer {
    /// Queries, keys and values.
    qkv: ColumnParallel,
    o: RowParallel,
    between: RmsNorm,
    gate_up: ColumnParallel,
    down: RowParallel,
    /// The norm before the next layer, or before the head.
    after: RmsNorm,
    /// The width of a head, this device's heads for keys and values, and the heads that share each of them.
    heads: (usize, usize, usize),
}

/// One device's keys and values of a sequence, by layer, with room for more rows.
#[derive(Default)]
pub struct Cache {
    layers: Vec<[Option<Tensor>; 2]>,
    len: usize,
}

impl Model {
    /// Reads this device's parts. All devices call it.
    pub fn load(dev: &Device, config: &Config, weights: &PartBuilder) -> Result<Self> {
        let (width, head) = (config.width, config.head());
        let model = weights.pp("model");
        let norm = |at: PartBuilder| Ok::<_, candle_core::Error>(RmsNorm::new(at.get(width, "weight")?, 1e-5));
        let layers = (0..config.layers).map(|index| {
            let at = model.pp("layers").pp(index);
            let (attention, mlp) = (at.pp("self_attn"), at.pp("mlp"));
            // A device has whole groups: heads with the keys that they share.
            let shared = config.heads / config.kv_heads;
            let column = |outputs, unit, at: &PartBuilder| ColumnParallel::load(dev, (width, outputs, unit), false, at);
            let q = column(width, head * shared, &attention.pp("q_proj"))?;
            let kv = |name| column(config.kv_heads * head, head, &attention.pp(name));
            let own = Part::of(dev, 0, config.kv_heads, 1).cut.map_or(0, |(_, own, _)| own.len());
            let next = if index + 1 < config.layers {
                model.pp("layers").pp(index + 1).pp("input_layernorm")
            } else {
                model.pp("norm")
            };
            Ok(Layer {
                qkv: ColumnParallel::merged(&[q, kv("k_proj")?, kv("v_proj")?])?,
                o: RowParallel::load(dev, (width, width, head * shared), false, &attention.pp("o_proj"))?,
                between: norm(at.pp("post_attention_layernorm"))?,
                gate_up: ColumnParallel::merged(&[
                    column(config.inner, 1, &mlp.pp("gate_proj"))?,
                    column(config.inner, 1, &mlp.pp("up_proj"))?,
                ])?,
                down: RowParallel::load(dev, (config.inner, width, 1), false, &mlp.pp("down_proj"))?,
                after: norm(next)?,
                heads: (head, own, shared),
            })
        });
        let half: Vec<f32> = (0..head / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / head as f32)).collect();
        let half = Tensor::from_vec(half, (1, head / 2), weights.device())?;
        let place = Tensor::arange(0u32, config.longest as u32, weights.device())?.to_dtype(DType::F32)?;
        let angles = place.unsqueeze(1)?.matmul(&half)?;
        Ok(Model {
            embedding: VocabularyEmbedding::load(dev, config.words, width, &model.pp("embed_tokens"))?,
            first: norm(model.pp("layers").pp(0).pp("input_layernorm"))?,
            layers: layers.collect::<Result<_>>()?,
            head: ColumnParallel::load(dev, (width, config.words, 1), false, &weights.pp("lm_head"))?.gathered(),
            cos: angles.cos()?.to_dtype(weights.dtype())?,
            sin: angles.sin()?.to_dtype(weights.dtype())?,
        })
    }

    /// Feeds new words to several sequences, each with its cache, and returns the most likely next word of each. The
    /// rows of all sequences go through the layers together; only attention looks at one sequence after the other.
    pub fn step(&self, batch: &mut [(Vec<u32>, Cache)], device: &Candle) -> Result<Vec<u32>> {
        let words: Vec<u32> = batch.iter().flat_map(|(words, _)| words).copied().collect();
        let vectors = self.embedding.partial(&words)?;
        // The layers add to it, in place.
        let sum = vectors.zeros_like()?;
        let mut x = all_reduce_norm(&vectors, &sum, &self.first)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let qkv = layer.qkv.forward(&x)?;
            let (mut start, mut mixed) = (0, Vec::new());
            for (words, cache) in batch.iter_mut() {
                mixed.push(self.attend(layer, index, &qkv.narrow(0, start, words.len())?, cache)?);
                start += words.len();
            }
            x = layer.o.forward_norm(&Tensor::cat(&mixed, 0)?, &sum, &layer.between)?;
            let inner = ops::swiglu(&layer.gate_up.forward(&x)?)?;
            x = layer.down.forward_norm(&inner, &sum, &layer.after)?;
        }
        let mut last = Vec::new();
        for (words, cache) in batch.iter_mut() {
            cache.len += words.len();
            last.push(last.last().map_or(0, |&before: &u32| before + 1) + words.len() as u32 - 1);
        }
        if last.len() < words.len() {
            x = x.index_select(&Tensor::new(last, device)?, 0)?;
        }
        Ok(self.head.forward(&x)?.argmax(D::Minus1)?.to_vec1()?)
    }

    /// Attention of one sequence's new rows over all of its rows.
    fn attend(&self, layer: &Layer, index: usize, qkv: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let ((head, own, shared), new) = (layer.heads, qkv.dim(0)?);
        if own == 0 {
            return Ok(qkv.clone()); // more devices than heads
        }
        let heads = qkv.reshape((new, own * (shared + 2), head))?.transpose(0, 1)?.contiguous()?;
        let (cos, sin) = (self.cos.narrow(0, cache.len, new)?, self.sin.narrow(0, cache.len, new)?);
        let turned = heads.narrow(0, 0, own * (shared + 1))?.unsqueeze(0)?;
        let turned = rotary_emb::rope(&turned, &cos, &sin)?.squeeze(0)?;
        let (q, k) = (turned.narrow(0, 0, own * shared)?, turned.narrow(0, own * shared, own)?);
        let v = heads.narrow(0, own * (shared + 1), own)?;
        cache.layers.resize(self.layers.len(), [None, None]);
        let [keys, values] = &mut cache.layers[index];
        let (k, v) = (append(keys, cache.len, &k)?, append(values, cache.len, &v)?);
        Ok(attention(&q, &k, &v)?.transpose(0, 1)?.reshape((new, own * shared * head))?)
    }
}

/// Puts new rows (heads x rows x width) behind the `len` rows that are there, and returns all. The room doubles.
fn append(room: &mut Option<Tensor>, len: usize, rows: &Tensor) -> Result<Tensor> {
    let (heads, new, head) = rows.dims3()?;
    let all = len + new;
    let room = match room {
        Some(room) if room.dim(1)? >= all => room,
        _ => {
            let larger = Tensor::zeros((heads, all.next_power_of_two(), head), rows.dtype(), rows.device())?;
            if let Some(old) = room {
                larger.slice_set(old, 1, 0)?;
            }
            room.insert(larger)
        }
    };
    room.slice_set(rows, 1, len)?;
    Ok(room.narrow(1, 0, all)?)
}

/// Attention of the last rows over all rows: queries are heads x new rows x width, keys and values have fewer heads,
/// each of which is shared by as many heads in a row.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
    let ((heads, new, head), (own, all, _)) = (q.dims3()?, k.dims3()?);
    // Rows of the heads that share keys stand one below the other.
    let rows = heads / own * new;
    let mut scores = (q.reshape((own, rows, head))?.matmul(&k.t()?)? / (head as f64).sqrt())?;
    if new > 1 {
        let later: Vec<f32> = (0..rows)
            .flat_map(|row| (0..all).map(move |at| if at > all - new + row % new { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        let later = Tensor::from_vec(later, (1, rows, all), k.device())?.to_dtype(k.dtype())?;
        scores = scores.broadcast_add(&later)?;
    }
    ops::softmax_last_dim(&scores)?.matmul(v)?.reshape((heads, new, head))
}
