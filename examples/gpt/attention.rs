//! Causal attention by products of matrices, and its step back. `model.rs` calls it.
//!
//! Scores are one matrix for each head of each sequence. A place sees itself and those before it, so the upper half of
//! the matrix is not needed. Rows are computed in blocks: a block's products have the columns up to the block's end.
//! Elements behind it are never computed, written or read. With four blocks that saves three eighths of the work and of
//! the memory's traffic.

use crate::kernels::{Heads, Number, causal_softmax, causal_softmax_backward, merge_heads, room, split_heads};
use gpu_pool::{Device, DeviceBuffer, DeviceView, Matrix, MatrixMut, Result};

/// The parts of a layer's rows.
const QUERIES: usize = 0;
const KEYS: usize = 1;
const VALUES: usize = 2;

/// The shape of attention: that of its heads, and the rows of a block.
#[derive(Clone, Copy)]
pub struct Attention {
    pub heads: Heads,
    pub block: usize,
}

/// The values that the step back needs.
pub struct Saved<T: Number> {
    /// Queries, keys and values, each as matrices of `context x head`.
    qkv: DeviceBuffer<T>,
    /// Softmax of the scores: matrices of `context x context`.
    shares: DeviceBuffer<T>,
}

impl Attention {
    /// From rows of queries, keys and values beside each other, without their bias: the mixed values of all heads.
    pub fn forward<T: Number>(
        &self,
        dev: &Device,
        qkv: &DeviceBuffer<T>,
        bias: DeviceView<'_, T>,
    ) -> Result<(DeviceBuffer<T>, Saved<T>)> {
        let Attention { heads, block } = *self;
        let qkv = split_heads(dev, heads, 3, qkv, Some(bias))?;
        let mut shares = room(dev, heads.count() * heads.context * heads.context)?;
        for start in self.starts() {
            let end = start + block;
            let (q, k) = (self.part(&qkv, QUERIES)?.rows(start..end)?, self.part(&qkv, KEYS)?.rows(..end)?);
            let mut to = self.scores_mut(&mut shares)?.rows(start..end)?.columns(..end)?;
            dev.gemm(self.factor::<T>(), q, k.t(), T::factor(0.0), &mut to)?;
        }
        causal_softmax(dev, &mut shares, heads.context, block)?;
        let mut mixed = room(dev, heads.rows * heads.width())?;
        for start in self.starts() {
            let end = start + block;
            let (shares, v) = (self.scores(&shares)?.rows(start..end)?.columns(..end)?, self.part(&qkv, VALUES)?);
            let mut to = self.part_mut(&mut mixed, 0)?.rows(start..end)?;
            dev.gemm(T::factor(1.0), shares, v.rows(..end)?, T::factor(0.0), &mut to)?;
        }
        Ok((merge_heads(dev, heads, 1, &mixed)?, Saved { qkv, shares }))
    }

    /// The gradient of the rows of queries, keys and values, from that of the mixed values.
    pub fn backward<T: Number>(&self, dev: &Device, saved: &Saved<T>, dy: &DeviceBuffer<T>) -> Result<DeviceBuffer<T>> {
        let Attention { heads, block } = *self;
        let Saved { qkv, shares } = saved;
        let dmixed = split_heads(dev, heads, 1, dy, None)?;
        let mut dscores = room(dev, shares.len())?;
        for start in self.starts() {
            let end = start + block;
            let (dy, v) = (self.part(&dmixed, 0)?.rows(start..end)?, self.part(qkv, VALUES)?.rows(..end)?);
            let mut to = self.scores_mut(&mut dscores)?.rows(start..end)?.columns(..end)?;
            dev.gemm(T::factor(1.0), dy, v.t(), T::factor(0.0), &mut to)?;
        }
        causal_softmax_backward(dev, shares, &mut dscores, heads.context, block)?;
        let mut dqkv = room(dev, qkv.len())?;
        for start in self.starts() {
            let end = start + block;
            // Rows of the block, with the columns that they see; and columns of the block, with the rows that see them.
            let row = self.scores(&dscores)?.rows(start..end)?.columns(..end)?;
            let column = self.scores(&dscores)?.rows(start..)?.columns(start..end)?.t();
            let share = self.scores(shares)?.rows(start..)?.columns(start..end)?.t();
            let (q, k) = (self.part(qkv, QUERIES)?.rows(start..)?, self.part(qkv, KEYS)?.rows(..end)?);
            let dy = self.part(&dmixed, 0)?.rows(start..)?;
            for (part, factor, a, b) in [
                (QUERIES, self.factor::<T>(), row, k),
                (KEYS, self.factor::<T>(), column, q),
                (VALUES, T::factor(1.0), share, dy),
            ] {
                let mut to = self.part_mut(&mut dqkv, part)?.rows(start..end)?;
                dev.gemm(factor, a, b, T::factor(0.0), &mut to)?;
            }
        }
        merge_heads(dev, heads, 3, &dqkv)
    }

    /// Where the blocks of rows begin.
    fn starts(&self) -> impl Iterator<Item = usize> {
        (0..self.heads.context).step_by(self.block)
    }

    fn factor<T: Number>(&self) -> T::Acc {
        T::factor((self.heads.head as f64).powf(-0.5))
    }

    /// The matrices of all heads of one of queries, keys and values.
    fn part<'a, T: Number>(&self, x: &'a DeviceBuffer<T>, part: usize) -> Result<Matrix<'a, T>> {
        let (rows, Heads { head, .. }) = (self.heads.count() * self.heads.context, self.heads);
        Matrix::new(x, x.len() / head, head)?.rows(part * rows..(part + 1) * rows)?.split_rows(self.heads.count())
    }

    fn part_mut<'a, T: Number>(&self, x: &'a mut DeviceBuffer<T>, part: usize) -> Result<MatrixMut<'a, T>> {
        let (rows, Heads { head, .. }) = (self.heads.count() * self.heads.context, self.heads);
        let all = x.len() / head;
        MatrixMut::new(x, all, head)?.rows(part * rows..(part + 1) * rows)?.split_rows(self.heads.count())
    }

    fn scores<'a, T: Number>(&self, x: &'a DeviceBuffer<T>) -> Result<Matrix<'a, T>> {
        let (count, Heads { context, .. }) = (self.heads.count(), self.heads);
        Matrix::new(x, count * context, context)?.split_rows(count)
    }

    fn scores_mut<'a, T: Number>(&self, x: &'a mut DeviceBuffer<T>) -> Result<MatrixMut<'a, T>> {
        let (count, Heads { context, .. }) = (self.heads.count(), self.heads);
        MatrixMut::new(x, count * context, context)?.split_rows(count)
    }
}
