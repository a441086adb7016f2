//! A transformer block over a group: embedding, attention with heads over the members, a perceptron, a language model's
//! head and loss. Norms and residuals are sequence parallel. In `f64`, so that finite differences say something.

use gpu_pool::{Device, DeviceBuffer, Group, Matrix, MatrixMut, ReduceOp, Result};
use gpu_pool_train::{
    Activation, ColumnLinear, Indices, LinearPart, NormSaved, RowLinear, SequenceNorm, VocabularyEmbedding,
    gather_rows, part_of, prelude::*, vocabulary_cross_entropy,
};

type Buffer = DeviceBuffer<f64>;

/// Tokens of the sequence, and their width.
pub const TOKENS: usize = 6;
pub const WIDTH: usize = 12;
const HEADS: usize = 4;
const HEAD: usize = WIDTH / HEADS;
const HIDDEN: usize = 10;
pub const WORDS: usize = 11;

/// The whole weights: matrices with their number of columns, by name.
pub const SHAPES: [(&str, usize, usize); 18] = [
    ("table", WORDS, WIDTH),
    ("gamma 1", 1, WIDTH),
    ("beta 1", 1, WIDTH),
    ("query", WIDTH, WIDTH),
    ("query bias", 1, WIDTH),
    ("key", WIDTH, WIDTH),
    ("key bias", 1, WIDTH),
    ("value", WIDTH, WIDTH),
    ("value bias", 1, WIDTH),
    ("out", WIDTH, WIDTH),
    ("out bias", 1, WIDTH),
    ("gamma 2", 1, WIDTH),
    ("up", WIDTH, HIDDEN),
    ("up bias", 1, HIDDEN),
    ("down", HIDDEN, WIDTH),
    ("down bias", 1, WIDTH),
    ("head", WIDTH, WORDS),
    ("head bias", 1, WORDS),
];

/// Weights in the order of [`SHAPES`].
pub fn weights() -> Vec<Vec<f64>> {
    let weight = |(i, &(name, rows, cols)): (usize, &(&str, usize, usize))| {
        let middle = if name.starts_with("gamma") { 1.0 } else { 0.0 };
        super::numbers(rows * cols, i as u64).iter().map(|&x| middle + f64::from(x)).collect()
    };
    SHAPES.iter().enumerate().map(weight).collect()
}

pub struct Block {
    embedding: VocabularyEmbedding<f64>,
    norm: [SequenceNorm<f64>; 2],
    qkv: [ColumnLinear<f64>; 3],
    out: RowLinear<f64>,
    up: ColumnLinear<f64>,
    down: RowLinear<f64>,
    head: ColumnLinear<f64>,
    mask: Buffer,
    heads: usize,
}

/// The values of attention that the steps back need.
struct Attention {
    qkv: [Buffer; 3],
    shares: Buffer,
    mixed: Buffer,
}

impl Block {
    pub fn new(group: &Group<'_>, w: &[Vec<f64>]) -> Result<Self> {
        let dev = group.device();
        let heads = part_of(group, group.rank(), HEADS, 1)?.len();
        let later = |i: usize| if i % TOKENS > i / TOKENS % TOKENS { -1e30 } else { 0.0 };
        let qkv = |i: usize| ColumnLinear::in_units(group, &w[i], &w[i + 1], HEAD);
        Ok(Block {
            embedding: VocabularyEmbedding::new(group, &w[0], WIDTH)?,
            norm: [SequenceNorm::layer(dev, &w[1], &w[2], 1e-5)?, SequenceNorm::rms(dev, &w[11], 1e-5)?],
            qkv: [qkv(3)?, qkv(5)?, qkv(7)?],
            out: RowLinear::in_units(group, &w[9], &w[10], HEAD)?,
            up: ColumnLinear::new(group, &w[12], &w[13])?,
            down: RowLinear::new(group, &w[14], &w[15])?,
            head: ColumnLinear::new(group, &w[16], &w[17])?,
            mask: dev.upload(&(0..heads * TOKENS * TOKENS).map(later).collect::<Vec<_>>())?,
            heads,
        })
    }

    /// The loss of each token, whose next one is its label. The gradients are in the layers.
    pub fn step(&mut self, group: &Group<'_>, input: &[u32; TOKENS], labels: &[u32; TOKENS]) -> Result<Buffer> {
        let dev = group.device();
        let (input, labels) = (Indices::new(group, input, WORDS)?, Indices::new(group, labels, WORDS)?);
        let own = part_of(group, group.rank(), TOKENS, 1)?;

        let all = self.embedding.forward(group, &input)?;
        let mut x = dev.zeros::<f64>(own.len() * WIDTH)?;
        dev.copy(&all.slice(own.start * WIDTH..own.end * WIDTH), &mut x)?;
        let (n1, saved1) = self.normed(group, 0, &x)?;
        let attention = self.attend(group, &n1)?;
        let x1 = dev.add(&x, &self.out.forward_to_rows(group, &attention.mixed, TOKENS)?)?;
        let (n2, saved2) = self.normed(group, 1, &x1)?;
        let up = self.up.forward(group, &n2, TOKENS)?;
        let hidden = dev.activation(Activation::Gelu, &up)?;
        let x2 = dev.add(&x1, &self.down.forward_to_rows(group, &hidden, TOKENS)?)?;
        let last = gather_rows(group, &x2, TOKENS, WIDTH)?;
        let mut logits = self.head.forward(group, &last, TOKENS)?;
        let loss = vocabulary_cross_entropy(group, &mut logits, &labels, 1.0 / TOKENS as f64)?;

        let dx2 = self.head.backward_to_rows(group, &last, &logits, TOKENS, false)?;
        let mut dup = self.down.backward_from_rows(group, &hidden, &dx2, TOKENS, false)?;
        dev.activation_backward_in_place(Activation::Gelu, &mut dup, &up)?;
        let dn2 = self.up.backward_to_rows(group, &n2, &dup, TOKENS, false)?;
        let dx1 = dev.add(&dx2, &self.norm[1].backward(group, &x1, &saved2, &dn2, false)?)?;
        let dmixed = self.out.backward_from_rows(group, &attention.mixed, &dx1, TOKENS, false)?;
        let dn1 = self.attend_backward(group, &n1, &attention, &dmixed)?;
        let dx = dev.add(&dx1, &self.norm[0].backward(group, &x, &saved1, &dn1, false)?)?;
        self.embedding.backward(group, &input, &gather_rows(group, &dx, TOKENS, WIDTH)?, false)?;
        Ok(loss)
    }

    fn normed(&self, group: &Group<'_>, which: usize, x: &Buffer) -> Result<(Buffer, NormSaved<f64>)> {
        let (y, saved) = self.norm[which].forward(group.device(), x)?;
        Ok((gather_rows(group, &y, TOKENS, WIDTH)?, saved))
    }

    /// The heads of a matrix whose columns are this member's.
    fn split<'a>(&self, x: &'a Buffer) -> Result<Matrix<'a, f64>> {
        Matrix::new(x, TOKENS, self.heads * HEAD)?.split_columns(self.heads)
    }

    fn scores<'a>(&self, x: &'a Buffer) -> Result<Matrix<'a, f64>> {
        Matrix::new(x, self.heads * TOKENS, TOKENS)?.split_rows(self.heads)
    }

    /// `a b` of each head, as columns.
    fn heads(&self, dev: &Device, factor: f64, a: Matrix<'_, f64>, b: Matrix<'_, f64>) -> Result<Buffer> {
        let mut c = dev.zeros(TOKENS * self.heads * HEAD)?;
        let mut to = MatrixMut::new(&mut c, TOKENS, self.heads * HEAD)?.split_columns(self.heads)?;
        dev.gemm(factor, a, b, 0.0, &mut to)?;
        Ok(c)
    }

    fn attend(&self, group: &Group<'_>, x: &Buffer) -> Result<Attention> {
        let dev = group.device();
        let [q, k, v] = &self.qkv;
        let qkv = [q.forward(group, x, TOKENS)?, k.forward(group, x, TOKENS)?, v.forward(group, x, TOKENS)?];
        let mut shares = dev.zeros(self.heads * TOKENS * TOKENS)?;
        dev.gemm((HEAD as f64).powf(-0.5), self.split(&qkv[0])?, self.split(&qkv[1])?.t(), 0.0, &mut shares)?;
        dev.add_in_place(&mut shares, &self.mask)?;
        dev.softmax_in_place(&mut shares, TOKENS)?;
        let mixed = self.heads(dev, 1.0, self.scores(&shares)?, self.split(&qkv[2])?)?;
        Ok(Attention { qkv, shares, mixed })
    }

    /// The own rows of the gradient of `x`.
    fn attend_backward(&mut self, group: &Group<'_>, x: &Buffer, saved: &Attention, dy: &Buffer) -> Result<Buffer> {
        let dev = group.device();
        let (q, k, v) = (self.split(&saved.qkv[0])?, self.split(&saved.qkv[1])?, self.split(&saved.qkv[2])?);
        let (dy, factor) = (self.split(dy)?, (HEAD as f64).powf(-0.5));
        let mut dshares = dev.zeros::<f64>(saved.shares.len())?;
        dev.gemm(1.0, dy, v.t(), 0.0, &mut dshares)?;
        let dscores = dev.softmax_backward(&dshares, &saved.shares, TOKENS)?;
        let dscores = self.scores(&dscores)?;
        let gradients = [
            self.heads(dev, factor, dscores, k)?,
            self.heads(dev, factor, dscores.t(), q)?,
            self.heads(dev, 1.0, self.scores(&saved.shares)?.t(), dy)?,
        ];
        let mut sum = None;
        for (layer, dy) in self.qkv.iter_mut().zip(&gradients) {
            let dx = layer.backward_to_rows(group, x, dy, TOKENS, false)?;
            sum = Some(match sum {
                Some(sum) => dev.add(&sum, &dx)?,
                None => dx,
            });
        }
        Ok(sum.unwrap())
    }

    /// Weights and their gradients, in the order of [`SHAPES`].
    pub fn pairs(&mut self) -> Vec<(&mut Buffer, &Buffer)> {
        fn of(part: &mut LinearPart<f64>) -> [(&mut Buffer, &Buffer); 2] {
            [(&mut part.weight, &part.weight_gradient), (&mut part.bias, &part.bias_gradient)]
        }
        let [q, k, v] = &mut self.qkv;
        let [first, second] = &mut self.norm;
        let mut all = vec![(&mut self.embedding.table, &self.embedding.gradient)];
        all.push((&mut first.gamma, &first.gamma_gradient));
        all.push((first.beta.as_mut().unwrap(), first.beta_gradient.as_ref().unwrap()));
        for part in [&mut q.part, &mut k.part, &mut v.part, &mut self.out.part] {
            all.extend(of(part));
        }
        all.push((&mut second.gamma, &second.gamma_gradient));
        for part in [&mut self.up.part, &mut self.down.part, &mut self.head.part] {
            all.extend(of(part));
        }
        all
    }

    /// Gradient descent, by the mean of the gradients of all replicas: the devices that have the same parts.
    pub fn descend(&mut self, replicas: &Group<'_>, rate: f64) -> Result<()> {
        let dev = replicas.device();
        self.pairs().into_iter().try_for_each(|(weight, gradient)| {
            let mut mean = dev.zeros(gradient.len())?;
            replicas.all_reduce_into(gradient, &mut mean, ReduceOp::Avg)?;
            dev.axpy(-rate, &mean, weight)
        })
    }
}
