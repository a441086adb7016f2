//! A model of Llama's shape with candle, tensor parallel: heads, the columns of the feed-forward layers, and words are
//! divided among the devices. `generate` and `serve` run it.

use candle_core::{D, DType, Device as Candle, Module, Tensor};
use candle_nn::{RmsNorm, ops, rotary_emb};
use gpu_pool::Device;
use gpu_pool_candle::{ColumnParallel, Part, PartBuilder, Result, RowParallel, VocabularyEmbedding};
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

    /// Writes a file of random weights, the same in each run.
    pub fn write(&self, path: &Path) -> Result<()> {
        let (mut all, mut state) = (HashMap::new(), 1u64);
        let mut add = |name: String, shape: &[usize], scale: f64| -> Result<()> {
            let numbers = (0..shape.iter().product::<usize>()).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (((state >> 33) as f64 / (1u64 << 30) as f64 - 1.0) * scale) as f32
            });
            let tensor = Tensor::from_vec(numbers.collect::<Vec<_>>(), shape, &Candle::Cpu)?;
            all.insert(name, tensor);
            Ok(())
        };
        let kv = self.kv_heads * self.head();
        add("model.embed_tokens.weight".into(), &[self.words, self.width], 1.7)?;
        for layer in 0..self.layers {
            let of = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let by = 1.7 / (self.width as f64).sqrt();
            add(of("self_attn.q_proj"), &[self.width, self.width], by)?;
            add(of("self_attn.k_proj"), &[kv, self.width], by)?;
            add(of("self_attn.v_proj"), &[kv, self.width], by)?;
            add(of("self_attn.o_proj"), &[self.width, self.width], by)?;
            add(of("mlp.gate_proj"), &[self.inner, self.width], by)?;
            add(of("mlp.up_proj"), &[self.inner, self.width], by)?;
            add(of("mlp.down_proj"), &[self.width, self.inner], by)?;
            add(of("input_layernorm"), &[self.width], 1.0)?;
            add(of("post_attention_layernorm"), &[self.width], 1.0)?;
        }
        add("model.norm.weight".into(), &[self.width], 1.0)?;
        add("lm_head.weight".into(), &[self.words, self.width], 1.7 / (self.width as f64).sqrt())?;
        Ok(candle_core::safetensors::save(&all, path)?)
    }
}

/// One device's part of the model.
pub struct Model {
    embedding: VocabularyEmbedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: ColumnParallel,
    cos: Tensor,
    sin: Tensor,
}

struct Layer {
    before: RmsNorm,
    q: ColumnParallel,
    k: ColumnParallel,
    v: ColumnParallel,
    o: RowParallel,
    between: RmsNorm,
    gate: ColumnParallel,
    up: ColumnParallel,
    down: RowParallel,
    /// The width of a head, this device's heads for keys and values, and the heads that share each of them.
    heads: (usize, usize, usize),
}

/// One device's keys and values of a sequence, by layer.
#[derive(Clone, Default)]
pub struct Cache {
    layers: Vec<Option<(Tensor, Tensor)>>,
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
            let kv = (width, config.kv_heads * head, head);
            let own = Part::of(dev, 0, config.kv_heads, 1).cut.map_or(0, |(_, own, _)| own.len());
            Ok(Layer {
                before: norm(at.pp("input_layernorm"))?,
                q: ColumnParallel::load(dev, (width, width, head * shared), false, &attention.pp("q_proj"))?,
                k: ColumnParallel::load(dev, kv, false, &attention.pp("k_proj"))?,
                v: ColumnParallel::load(dev, kv, false, &attention.pp("v_proj"))?,
                o: RowParallel::load(dev, (width, width, head * shared), false, &attention.pp("o_proj"))?,
                between: norm(at.pp("post_attention_layernorm"))?,
                gate: ColumnParallel::load(dev, (width, config.inner, 1), false, &mlp.pp("gate_proj"))?,
                up: ColumnParallel::load(dev, (width, config.inner, 1), false, &mlp.pp("up_proj"))?,
                down: RowParallel::load(dev, (config.inner, width, 1), false, &mlp.pp("down_proj"))?,
                heads: (head, own, shared),
            })
        });
        let half: Vec<f32> = (0..head / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / head as f32)).collect();
        let half = Tensor::from_vec(half, (1, head / 2), weights.device())?;
        let place = Tensor::arange(0u32, config.longest as u32, weights.device())?.to_dtype(DType::F32)?;
        let angles = place.unsqueeze(1)?.matmul(&half)?;
        Ok(Model {
            embedding: VocabularyEmbedding::load(dev, config.words, width, &model.pp("embed_tokens"))?,
            layers: layers.collect::<Result<_>>()?,
            norm: norm(model.pp("norm"))?,
            head: ColumnParallel::load(dev, (width, config.words, 1), false, &weights.pp("lm_head"))?.gathered(),
            cos: angles.cos()?,
            sin: angles.sin()?,
        })
    }

    /// Feeds new words to several sequences, each with its cache, and returns the most likely next word of each. The
    /// rows of all sequences go through the layers together; only attention looks at one sequence after the other.
    pub fn step(&self, batch: &mut [(Vec<u32>, Cache)], device: &Candle) -> Result<Vec<u32>> {
        let words: Vec<u32> = batch.iter().flat_map(|(words, _)| words).copied().collect();
        let mut x = self.embedding.forward(&Tensor::new(words, device)?)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = layer.before.forward(&x)?;
            let (q, k, v) = (layer.q.forward(&normed)?, layer.k.forward(&normed)?, layer.v.forward(&normed)?);
            let (mut start, mut mixed) = (0, Vec::new());
            for (words, cache) in batch.iter_mut() {
                let rows = |x: &Tensor| x.narrow(0, start, words.len());
                mixed.push(self.attend(layer, index, [rows(&q)?, rows(&k)?, rows(&v)?], cache)?);
                start += words.len();
            }
            x = (x + layer.o.forward(&Tensor::cat(&mixed, 0)?)?)?;
            let normed = layer.between.forward(&x)?;
            let inner = (layer.gate.forward(&normed)?.silu()? * layer.up.forward(&normed)?)?;
            x = (x + layer.down.forward(&inner)?)?;
        }
        let mut last = Vec::new();
        for (words, cache) in batch.iter_mut() {
            cache.len += words.len();
            last.push(last.last().map_or(0, |&before: &u32| before + 1) + words.len() as u32 - 1);
        }
        let x = self.norm.forward(&x.index_select(&Tensor::new(last, device)?, 0)?)?;
        Ok(self.head.forward(&x)?.argmax(D::Minus1)?.to_vec1()?)
    }

    /// Attention of one sequence's new rows over all of its rows.
    fn attend(&self, layer: &Layer, index: usize, qkv: [Tensor; 3], cache: &mut Cache) -> Result<Tensor> {
        let ((head, own, shared), new) = (layer.heads, qkv[0].dim(0)?);
        if own == 0 {
            return Ok(qkv[0].clone()); // more devices than heads
        }
        let [q, k, v] = qkv;
        let split = |x: Tensor, heads| x.reshape((1, new, heads, head))?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (split(q, own * shared)?, split(k, own)?, split(v, own)?);
        let (cos, sin) = (self.cos.narrow(0, cache.len, new)?, self.sin.narrow(0, cache.len, new)?);
        let (q, k) = (rotary_emb::rope(&q, &cos, &sin)?, rotary_emb::rope(&k, &cos, &sin)?);
        cache.layers.resize(self.layers.len(), None);
        let (k, v) = match &cache.layers[index] {
            None => (k, v),
            Some((keys, values)) => (Tensor::cat(&[keys, &k], 2)?, Tensor::cat(&[values, &v], 2)?),
        };
        let (all, before) = (k.dim(2)?, cache.len);
        // Rows of the heads that share keys stand one below the other.
        let scores = q.reshape((own, shared * new, head))?.matmul(&k.squeeze(0)?.t()?)?;
        let later: Vec<f32> = (0..shared * new)
            .flat_map(|row| (0..all).map(move |at| if at > before + row % new { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        let later = Tensor::from_vec(later, (1, shared * new, all), k.device())?;
        let shares = ops::softmax_last_dim(&(scores / (head as f64).sqrt())?.broadcast_add(&later)?)?;
        let mixed = shares.matmul(&v.squeeze(0)?)?.reshape((own * shared, new, head))?;
        cache.layers[index] = Some((k, v));
        Ok(mixed.transpose(0, 1)?.reshape((new, own * shared * head))?)
    }
}
