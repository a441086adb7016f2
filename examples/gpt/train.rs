//! Training: a replica of the model on each device, AdamW, and a batch that is divided by sequences. `main.rs` and the
//! bench `gpt` call it.

use crate::{
    kernels::{MODULE, Number},
    model::{Shape, Write, pass},
};
use gpu_pool::{AsView, Builder, Device, DeviceBuffer, GpuPool, PerDevice, Result, Shard};
use gpu_pool_train::{DataParallel, Gradients, Model, Optimizer, Parameter};

/// A pool with the kernels of the model.
pub fn pool(builder: Builder) -> Result<GpuPool> {
    builder.module(&MODULE).build()
}

/// The parameters of a device.
pub struct Gpt<T: Number> {
    parameters: Vec<DeviceBuffer<T>>,
}

impl<T: Number + Parameter> Model<T> for Gpt<T> {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<T>> {
        self.parameters.iter_mut().collect()
    }
}

/// A device's sequences: words, and the word behind each.
struct Batch {
    words: DeviceBuffer<u32>,
    labels: DeviceBuffer<u32>,
}

pub struct Training<T: Number + Parameter> {
    shape: Shape,
    sequences: usize,
    model: DataParallel<Gpt<T>, T>,
    batch: PerDevice<Batch>,
    losses: PerDevice<DeviceBuffer<T::Acc>>,
}

impl<T: Number + Parameter> Training<T> {
    /// Steps of `sequences` sequences, over all devices; at least one for each.
    pub fn new(pool: &GpuPool, shape: Shape, optimizer: Optimizer, sequences: usize) -> Result<Self> {
        let words = |shard: Shard| shard.range(sequences).len() * shape.context;
        Ok(Training {
            shape,
            sequences,
            model: DataParallel::new(pool, optimizer, |dev| Ok(Gpt { parameters: shape.parameters(dev)? }))?,
            batch: pool.per_device(|dev, shard| {
                let words = words(shard);
                Ok(Batch { words: dev.zeros(words)?, labels: dev.zeros(words)? })
            })?,
            losses: pool.per_device(|dev, shard| dev.zeros(words(shard)))?,
        })
    }

    /// The sequences of the next steps, one after the other: each has a word more than the context.
    pub fn load(&mut self, text: &[u32]) -> Result<()> {
        let with_next = self.shape.context + 1;
        assert_eq!(text.len(), self.sequences * with_next, "whole sequences");
        let all = self.batch.run(|dev, shard, batch| {
            let own = shard.rows(text, with_next).chunks(with_next);
            let (words, labels): (Vec<_>, Vec<_>) = own.map(|s| (&s[..with_next - 1], &s[1..])).unzip();
            dev.upload_into(&words.concat(), &mut batch.words)?;
            dev.upload_into(&labels.concat(), &mut batch.labels)
        });
        all.map(drop)
    }

    pub fn step(&mut self) -> Result<()> {
        let (shape, batch, losses) = (self.shape, &self.batch, &self.losses);
        let step = |dev: &Device, _: Shard, model: &mut Gpt<T>, gradients: &mut Gradients<'_, T>| {
            let parameters: Vec<_> = model.parameters.iter().map(|parameter| parameter.view()).collect();
            // The mean over the words of all devices.
            let scale = f64::from(gradients.scale) / shape.context as f64;
            let batch = batch.borrow(dev)?;
            let mut give = |i: usize, f: &Write<'_, T>| gradients.write(i, |gradient| f(gradient));
            let found = pass(dev, shape, &parameters, (&batch.words, &batch.labels), scale, &mut give)?;
            *losses.borrow_mut(dev)? = found;
            Ok(())
        };
        self.model.step(self.sequences, step).map(drop)
    }

    /// The mean loss of the last step. It waits.
    pub fn loss(&mut self) -> Result<f64> {
        let parts = self.losses.run(|dev, _, losses| dev.download(losses))?;
        let all: Vec<f64> = parts.concat().into_iter().map(Into::into).collect();
        Ok(all.iter().sum::<f64>() / all.len() as f64)
    }

    /// Checks that all replicas have the same bits.
    pub fn verify(&mut self) -> Result<()> {
        self.model.verify()
    }
}
