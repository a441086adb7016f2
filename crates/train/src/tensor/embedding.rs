//! Indices into a vocabulary that is spread over a group, and the table of their rows.

use super::{Wide, elements, fits, part_of};
#[cfg(feature = "checkpoints")]
use crate::checkpoint::{Checkpoint, Cut, named};
use crate::prelude::*;
use crate::runtime::{ErrorInternals, OpSite};
use gpu_pool::{AsView, DeviceBuffer, Element, Error, Group, ReduceOp, Result, kernel::Float};
use std::ops::Range;

/// Words of a vocabulary that is spread over a group, one for each row: labels, or inputs of an embedding. Each member
/// has its [part](part_of) of the vocabulary, and keeps the words' numbers in its part.
#[derive(Debug)]
pub struct Indices {
    pub(super) numbers: DeviceBuffer<u32>,
    own: Range<usize>,
    vocabulary: usize,
}

impl Indices {
    /// Checks the words and uploads them. All members give the same words. Does not wait for the device.
    ///
    /// ```
    /// # use gpu_pool_train::Indices;
    /// let pool = gpu_pool::GpuPool::builder().host(2).build()?;
    /// let failed = pool.run(|dev, _| Indices::new(&dev.group(&[0, 1])?, &[0, 7, 2], 5).map(drop));
    /// let error = failed.unwrap_err().to_string();
    /// assert!(error.contains("index 1 is 7: less than 5 are possible"), "{error}");
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the first word that is not in the vocabulary, and its place; those of
    /// [`Device::upload`](gpu_pool::Device::upload).
    #[track_caller]
    pub fn new(group: &Group<'_>, words: &[u32], vocabulary: usize) -> Result<Self> {
        let _here = OpSite::here("Indices::new");
        for (at, &word) in words.iter().enumerate() {
            let known = (word as usize) < vocabulary;
            invalid_if!(!known, "Indices::new", "index {at} is {word}: less than {vocabulary} are possible");
        }
        let own = part_of(group, group.rank(), vocabulary, 1)?;
        let of = |&word: &u32| (own.contains(&(word as usize))).then(|| word as usize - own.start);
        let numbers: Vec<u32> = words.iter().map(|word| of(word).unwrap_or(own.len()) as u32).collect();
        Ok(Indices { numbers: group.device().upload(&numbers)?, own, vocabulary })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    #[track_caller]
    pub(super) fn own(&self, op: &'static str, group: &Group<'_>) -> Result<Range<usize>> {
        let own = part_of(group, group.rank(), self.vocabulary, 1)?;
        invalid_if!(own != self.own, op, "the indices are of another group");
        Ok(own)
    }
}

/// A table of rows for the words of a vocabulary, spread over a group: each member has the rows of its words
/// (Megatron's vocabulary-parallel embedding).
#[derive(Debug)]
pub struct VocabularyEmbedding<T: Float> {
    /// The own rows, and behind them one row of zeros, which stands for the words of other members.
    pub table: DeviceBuffer<T>,
    /// The gradient of `table`. That of the last row stays 0.
    pub gradient: DeviceBuffer<T>,
    wide: Wide,
    cols: usize,
}

impl<T: Float + Element> VocabularyEmbedding<T> {
    /// This member's rows of `table`, which is rows of `cols` elements. All members give the same table.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if these are not whole rows; those of [`Device::upload`](gpu_pool::Device::upload).
    #[track_caller]
    pub fn new(group: &Group<'_>, table: &[T], cols: usize) -> Result<Self> {
        let _here = OpSite::here("VocabularyEmbedding::new");
        let rows = table.len() / cols.max(1);
        fits("VocabularyEmbedding::new", "table", table.len(), (rows, cols))?;
        let own = part_of(group, group.rank(), rows, 1)?;
        let (dev, part) = (group.device(), &table[own.start * cols..own.end * cols]);
        // Memory of the device: without rows there may be any number of columns.
        let len = elements("VocabularyEmbedding::new", own.len() + 1, cols)?;
        let (mut table, gradient) = (dev.zeros(len)?, dev.zeros(len)?);
        dev.upload_into(part, &mut table.slice_mut(..part.len()))?;
        Ok(VocabularyEmbedding { table, gradient, wide: Wide::default(), cols })
    }

    /// The rows of the words, the same on all members, in a new buffer: one all-reduce, in which all but one of the
    /// numbers that are added are 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the words are of another vocabulary; those of [`Group::all_reduce`].
    #[track_caller]
    pub fn forward(&self, group: &Group<'_>, words: &Indices) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("VocabularyEmbedding::forward");
        self.fits("VocabularyEmbedding::forward", group, words)?;
        let mut rows = group.device().embedding(&self.table, self.cols, &words.numbers)?;
        group.all_reduce(&mut rows, ReduceOp::Sum)?;
        Ok(rows)
    }

    /// The gradient of the own rows, added to [`gradient`](Self::gradient) with `accumulate`, else in its place. `dy`
    /// is the same on all members; nothing is exchanged. Half types are accumulated in `f32`, as of
    /// [`LinearPart`](super::LinearPart).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other shapes; those of
    /// [`Embeddings::embedding`](crate::ops::Embeddings::embedding).
    #[track_caller]
    pub fn backward(
        &mut self,
        group: &Group<'_>,
        words: &Indices,
        dy: &impl AsView<Elem = T>,
        accumulate: bool,
    ) -> Result<()> {
        let _here = OpSite::here("VocabularyEmbedding::backward");
        let (dev, dy) = (group.device(), dy.view());
        let own = self.fits("VocabularyEmbedding::backward", group, words)?;
        fits("VocabularyEmbedding::backward", "dy", dy.len(), (words.len(), self.cols))?;
        if !accumulate {
            self.wide.forget::<T>(dev, own * self.cols)?;
            dev.fill(&mut self.gradient, T::narrow(T::Acc::default()))?;
        }
        if own == 0 {
            return Ok(());
        }
        let mut rows = self.gradient.slice_mut(..own * self.cols);
        if !accumulate || !Wide::is_for::<T>() {
            return dev.embedding_backward(&dy, self.cols, &words.numbers, &mut rows);
        }
        let mut piece = dev.zeros(rows.len())?;
        dev.embedding_backward(&dy, self.cols, &words.numbers, &mut piece)?;
        self.wide.add(dev, &piece, &mut rows)
    }

    fn fits(&self, op: &'static str, group: &Group<'_>, words: &Indices) -> Result<usize> {
        let own = words.own(op, group)?.len();
        fits(op, "the table with its row of zeros", self.table.len(), (own + 1, self.cols))?;
        Ok(own)
    }
}

#[cfg(feature = "checkpoints")]
impl<T: Float + Element> VocabularyEmbedding<T> {
    /// How the own rows, without the row of zeros, lie on the devices of the group.
    pub fn cut(&self) -> Cut {
        let rows = (self.table.len() / self.cols.max(1)).saturating_sub(1);
        Cut::along(0, &[rows, self.cols])
    }

    /// Puts the whole table into the checkpoint of rank 0, as `name.weight`. All members of the group call it, each
    /// with a checkpoint of its own, and it **waits**. Errors: those of [`Checkpoint::insert_part`].
    #[track_caller]
    pub fn save(&self, group: &Group<'_>, to: &mut Checkpoint, name: &str) -> Result<()> {
        let _here = OpSite::here("VocabularyEmbedding::save");
        let cut = self.cut();
        to.insert_part(group, &named(name, "weight"), &cut, &self.table.slice(..cut.len()))
    }

    /// Takes this member's rows of the entries of [`save`](Self::save), also on another number of devices. All members
    /// of the group call it with the same checkpoint. Errors: those of [`Checkpoint::part`] and
    /// [`Device::upload_into`](gpu_pool::Device::upload_into).
    #[track_caller]
    pub fn load(&mut self, group: &Group<'_>, from: &Checkpoint, name: &str) -> Result<()> {
        let _here = OpSite::here("VocabularyEmbedding::load");
        let cut = self.cut();
        let rows = from.part::<T>(group, &named(name, "weight"), &cut)?;
        group.device().upload_into(&rows, &mut self.table.slice_mut(..cut.len()))
    }
}
