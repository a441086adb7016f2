//! A model of Llama's shape that writes words for several sequences together, tensor parallel: heads, the columns of
//! the feed-forward layers and the words of the last layer are divided among the devices. The program, the bench
//! `decode` and the tests call it.
//!
//! A step is one graph: it feeds each sequence's last word, and writes the most likely next one where the next step
//! reads it. The place in the sequences is in device memory, so one graph serves all places, and the host launches
//! steps far ahead of the devices. A prompt goes the same way: at places that are given, the step keeps the word.
//!
//! The sum over the devices, the residual and the norm that follow a layer are one call (`all_reduce_norm`). The
//! devices agree on a word by the largest of their numbers that hold a value and its word: an `all_reduce` of a few KB.

pub mod kernels;

use gpu_pool::{Device, DeviceBuffer, Error, Graph, Matrix, ReduceOp, Result, Shard};
use gpu_pool_train::{RowNorm, prelude::*};
use kernels::{HEAD, LONGEST, MOST_SHARED, Number, PARTS, Part};
use std::ops::Range;

/// Norms add it to the mean of the squares.
pub const EPS: f32 = 1e-5;

/// The sizes of a model. A head has [`HEAD`] numbers.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub words: usize,
    pub width: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    /// Each is shared by `heads / kv_heads` heads.
    pub kv_heads: usize,
}

/// The shapes of Llama 3 8B, with 8 of its 32 layers.
pub const LLAMA: Config = Config { words: 128_256, width: 4096, inner: 14_336, layers: 8, heads: 32, kv_heads: 8 };

/// Small enough for software GPUs. Two devices have different numbers of heads, columns and words, and so have four.
pub const SMALL: Config = Config { words: 509, width: 256, inner: 515, layers: 2, heads: 10, kv_heads: 5 };

/// A matrix of random weights: outputs x inputs.
#[derive(Clone, Copy)]
pub struct Shape {
    pub seed: u32,
    pub rows: usize,
    pub cols: usize,
    pub largest: f32,
}

impl Config {
    fn shape(&self, seed: usize, rows: usize, cols: usize) -> Shape {
        let largest = if rows == 1 { 1.0 } else { 1.7 / (self.width as f32).sqrt() };
        Shape { seed: seed as u32, rows, cols, largest }
    }

    /// The table of the words' vectors, the weights of the first norm, and the last layer.
    pub fn outer(&self) -> [Shape; 3] {
        let table = self.shape(0, self.words, self.width);
        [Shape { largest: 1.7, ..table }, self.shape(1, 1, self.width), self.shape(2, self.words, self.width)]
    }

    /// Queries, keys, values, the layer behind attention, gates, the other columns, the layer behind these; and the
    /// norms behind the fourth and the last one.
    pub fn layer(&self, index: usize) -> [Shape; 9] {
        let (width, q, kv) = (self.width, self.heads * HEAD, self.kv_heads * HEAD);
        let shapes = [
            (q, width),
            (kv, width),
            (kv, width),
            (width, q),
            (self.inner, width),
            (self.inner, width),
            (width, self.inner),
            (1, width),
            (1, width),
        ];
        std::array::from_fn(|i| self.shape(16 * (index + 1) + i, shapes[i].0, shapes[i].1))
    }

    /// A prompt of `len` words for each of `batch` sequences, without meaning.
    pub fn prompts(&self, batch: usize, len: usize) -> Vec<Vec<u32>> {
        let word = |s: usize, i: usize| ((31 * s + i + 1) * 7919 % self.words) as u32;
        (0..batch).map(|s| (0..len).map(|i| word(s, i)).collect()).collect()
    }

    fn shared(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// One device's part of a model.
pub struct Model<T: Number> {
    config: Config,
    /// The heads for keys, the columns of the feed-forward layers, and the words of the last layer that are here.
    groups: Range<usize>,
    inner: Range<usize>,
    words: Range<usize>,
    table: DeviceBuffer<T>,
    first: DeviceBuffer<T>,
    layers: Vec<Layer<T>>,
    head: DeviceBuffer<T>,
}

/// Each matrix has a row for each of its outputs.
struct Layer<T: Number> {
    /// Queries, keys and values.
    qkv: DeviceBuffer<T>,
    o: DeviceBuffer<T>,
    between: DeviceBuffer<T>,
    gate_up: DeviceBuffer<T>,
    down: DeviceBuffer<T>,
    /// The norm before the next layer, or before the last matrix.
    after: DeviceBuffer<T>,
}

/// The matrices' parts, one below the other: of each some rows, and the same columns.
fn parts<T: Number>(dev: &Device, all: &[(Shape, Range<usize>)], cols: Range<usize>) -> Result<DeviceBuffer<T>> {
    let rows: usize = all.iter().map(|(_, rows)| rows.len()).sum();
    let (mut w, mut from) = (dev.zeros::<T>(rows * cols.len())?, 0);
    for (shape, rows) in all {
        let to = from + rows.len() * cols.len();
        let at = (rows.start, cols.start);
        let part = Part { seed: shape.seed, at, cols: cols.len(), all_cols: shape.cols, largest: shape.largest };
        kernels::weights(dev, w.slice_mut(from..to), part)?;
        from = to;
    }
    Ok(w)
}

fn whole<T: Number>(dev: &Device, shape: Shape) -> Result<DeviceBuffer<T>> {
    parts(dev, &[(shape, 0..shape.rows)], 0..shape.cols)
}

/// The elements of whole heads.
fn in_heads(heads: &Range<usize>, by: usize) -> Range<usize> {
    heads.start * by * HEAD..heads.end * by * HEAD
}

impl<T: Number> Model<T> {
    /// This device's part, with random weights that are made there. Each has the whole table: then words need no
    /// further sum.
    pub fn new(dev: &Device, shard: &Shard, config: &Config) -> Result<Self> {
        let lanes = 16 / size_of::<T>();
        if config.kv_heads == 0
            || !config.heads.is_multiple_of(config.kv_heads)
            || config.shared() > MOST_SHARED
            || !config.width.is_multiple_of(lanes)
        {
            return Err(Error::custom(format!("the kernels do not fit {config:?}")));
        }
        let [groups, inner, words] = [config.kv_heads, config.inner, config.words].map(|all| shard.range(all));
        if [&groups, &inner, &words].iter().any(|own| own.is_empty()) {
            return Err(Error::custom(format!("{} devices are too many for {config:?}", shard.count())));
        }
        let (q, kv) = (in_heads(&groups, config.shared()), in_heads(&groups, 1));
        let layers = (0..config.layers).map(|index| {
            let [wq, wk, wv, o, gate, up, down, between, after] = config.layer(index);
            Ok(Layer {
                qkv: parts(dev, &[(wq, q.clone()), (wk, kv.clone()), (wv, kv.clone())], 0..config.width)?,
                o: parts(dev, &[(o, 0..o.rows)], q.clone())?,
                between: whole(dev, between)?,
                gate_up: parts(dev, &[(gate, inner.clone()), (up, inner.clone())], 0..config.width)?,
                down: parts(dev, &[(down, 0..down.rows)], inner.clone())?,
                after: whole(dev, after)?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let [table, first, head] = config.outer();
        let head = parts(dev, &[(head, words.clone())], 0..config.width)?;
        let (table, first) = (whole(dev, table)?, whole(dev, first)?);
        Ok(Model { config: *config, groups, inner, words, table, first, layers, head })
    }
}

/// The sequences of a batch, all of the same length, with the memory of a step.
struct Sequences<T: Number> {
    batch: usize,
    /// The first places, whose words are given.
    given: usize,
    longest: usize,
    /// A row of the batch's words for each place.
    words: DeviceBuffer<u32>,
    /// The place of the words that are next.
    place: DeviceBuffer<u32>,
    /// For each place the cosines and sines of its angles.
    angles: DeviceBuffer<f32>,
    /// Keys and values of each layer.
    caches: Vec<[DeviceBuffer<T>; 2]>,
    residual: DeviceBuffer<T>,
    qkv: DeviceBuffer<T>,
    mixed: DeviceBuffer<T>,
    gate_up: DeviceBuffer<T>,
    inner: DeviceBuffer<T>,
    logits: DeviceBuffer<T>,
    best: DeviceBuffer<u64>,
}

/// The cosines and sines of a place's angles, as Llama has them.
pub fn angles(place: usize) -> [f32; HEAD] {
    let angle = |i: usize| place as f64 * 10_000f64.powf(-2.0 * i as f64 / HEAD as f64);
    std::array::from_fn(|i| match i.checked_sub(HEAD / 2) {
        None => angle(i).cos() as f32,
        Some(i) => angle(i).sin() as f32,
    })
}

impl<T: Number> Sequences<T> {
    fn new(dev: &Device, model: &Model<T>, prompts: &[Vec<u32>], longest: usize) -> Result<Self> {
        let (batch, given) = (prompts.len(), prompts.first().map_or(0, Vec::len));
        let known = |word: &u32| (*word as usize) < model.config.words;
        if prompts.iter().any(|prompt| prompt.len() != given || !prompt.iter().all(known)) {
            return Err(Error::custom("prompts are equally long, and their words are known"));
        }
        if given == 0 || given >= longest || longest > LONGEST {
            return Err(Error::custom(format!("a prompt of {given} words, and {longest} words in all")));
        }
        let mut words = vec![0; longest * batch];
        for (s, prompt) in prompts.iter().enumerate() {
            prompt.iter().enumerate().for_each(|(place, word)| words[place * batch + s] = *word);
        }
        let angles: Vec<f32> = (0..longest).flat_map(angles).collect();
        let (groups, inner, shared) = (model.groups.len(), model.inner.len(), model.config.shared());
        let cache = || dev.zeros::<T>(batch * groups * longest * HEAD);
        Ok(Sequences {
            batch,
            given,
            longest,
            words: dev.upload(&words)?,
            place: dev.zeros(1)?,
            angles: dev.upload(&angles)?,
            caches: model.layers.iter().map(|_| Ok([cache()?, cache()?])).collect::<Result<_>>()?,
            residual: dev.zeros(batch * model.config.width)?,
            qkv: dev.zeros(batch * groups * (shared + 2) * HEAD)?,
            mixed: dev.zeros(batch * groups * shared * HEAD)?,
            gate_up: dev.zeros(batch * 2 * inner)?,
            inner: dev.zeros(batch * inner)?,
            logits: dev.zeros(batch * model.words.len())?,
            best: dev.zeros(batch * PARTS)?,
        })
    }

    /// Back to the first place. The words that are given stay.
    fn rewind(&mut self, dev: &Device, model: &Model<T>) -> Result<()> {
        dev.fill(&mut self.place, 0)?;
        self.next_word(dev, model)
    }

    fn next_word(&mut self, dev: &Device, model: &Model<T>) -> Result<()> {
        let words = (&mut self.words, &self.place);
        kernels::next_word(dev, (&self.best, &model.table), words, &mut self.residual, self.given)
    }

    /// Feeds the words of the place, and finds the next ones. All devices call it.
    fn step(&mut self, dev: &Device, model: &Model<T>) -> Result<()> {
        let (batch, width, shared) = (self.batch, model.config.width, model.config.shared());
        let (mut x, _) = dev.rms_norm(&self.residual, &model.first, EPS)?;
        for (layer, cache) in model.layers.iter().zip(&mut self.caches) {
            product(dev, batch, &x, &layer.qkv, &mut self.qkv)?;
            let from = (&self.qkv, &self.angles, &self.place);
            kernels::attend(dev, from, cache, &mut self.mixed, (batch, model.groups.len(), shared))?;
            product(dev, batch, &self.mixed, &layer.o, &mut x)?;
            dev.all_reduce_norm(&mut x, &mut self.residual, RowNorm::rms(&layer.between, EPS))?;
            product(dev, batch, &x, &layer.gate_up, &mut self.gate_up)?;
            kernels::swiglu(dev, &self.gate_up, &mut self.inner, model.inner.len())?;
            product(dev, batch, &self.inner, &layer.down, &mut x)?;
            dev.all_reduce_norm(&mut x, &mut self.residual, RowNorm::rms(&layer.after, EPS))?;
        }
        debug_assert_eq!(x.len(), batch * width);
        product(dev, batch, &x, &model.head, &mut self.logits)?;
        kernels::best_word(dev, &self.logits, &mut self.best, &mut self.place, model.words.start)?;
        dev.all_reduce(&mut self.best, ReduceOp::Max)?;
        self.next_word(dev, model)
    }
}

/// The product of the batch's rows with a matrix that has a row for each output.
fn product<T: Number>(
    dev: &Device,
    rows: usize,
    x: &DeviceBuffer<T>,
    w: &DeviceBuffer<T>,
    y: &mut DeviceBuffer<T>,
) -> Result<()> {
    let (inputs, outputs) = (x.len() / rows, y.len() / rows);
    dev.gemm(1.0, Matrix::new(x, rows, inputs)?, Matrix::new(w, outputs, inputs)?.t(), 0.0, y)
}

/// A model that writes. Each device has one, and all of them make the same calls.
pub struct Decoder<T: Number> {
    model: Model<T>,
    sequences: Sequences<T>,
    step: Graph,
    /// Places whose words are there, or on their way.
    place: usize,
}

impl<T: Number> Decoder<T> {
    /// Begins with these prompts, which are equally long. Sequences have room for `longest` words.
    pub fn new(dev: &Device, model: Model<T>, prompts: &[Vec<u32>], longest: usize) -> Result<Self> {
        let mut sequences = Sequences::new(dev, &model, prompts, longest)?;
        // The first product loads cuBLAS, which a graph cannot hold.
        sequences.step(dev, &model)?;
        let (step, ()) = dev.capture(|dev| sequences.step(dev, &model))?;
        let mut decoder = Decoder { model, sequences, step, place: 0 };
        decoder.rewind(dev)?;
        Ok(decoder)
    }

    /// The same model with other prompts.
    pub fn with(self, dev: &Device, prompts: &[Vec<u32>], longest: usize) -> Result<Self> {
        let Decoder { model, sequences, step, .. } = self;
        drop((sequences, step));
        Self::new(dev, model, prompts, longest)
    }

    /// Back to the first word of the prompts.
    pub fn rewind(&mut self, dev: &Device) -> Result<()> {
        self.place = 0;
        self.sequences.rewind(dev, &self.model)
    }

    /// Goes on by some words, the prompts' first. Does not wait for the device.
    pub fn advance(&mut self, dev: &Device, words: usize) -> Result<()> {
        self.place += words;
        if self.place >= self.sequences.longest {
            return Err(Error::custom(format!("there is room for {} words", self.sequences.longest)));
        }
        (0..words).try_for_each(|_| dev.launch_graph(&self.step))
    }

    /// The words of each sequence, the prompt's among them. Waits for the device.
    pub fn words(&self, dev: &Device) -> Result<Vec<Vec<u32>>> {
        let (words, batch) = (dev.download(&self.sequences.words)?, self.sequences.batch);
        Ok((0..batch).map(|s| (0..=self.place).map(|place| words[place * batch + s]).collect()).collect())
    }

    /// The operations of a step, and the parts that a launch submits.
    pub fn graph(&self) -> (usize, usize) {
        (self.step.operations(), self.step.parts())
    }
}
