//! A training loop with an optimizer of one's own, outside `DataParallel`: `cargo run --example optimizer_loop`.
//!
//! A perceptron for handwritten digits lies on two software GPUs (tensor parallel). Each device keeps an optimizer
//! beside its parts of the layers: AdamW, without decay for the biases. Gradients are clipped by the norm over both.
use gpu_pool::{Device, DeviceBuffer, GpuPool, Group, Result};
use gpu_pool_train::{Activation::Relu, prelude::*, *};

const HIDDEN: usize = 96;
const BATCH: usize = 128;

struct Net {
    first: ColumnLinear<f32>,
    second: RowLinear<f32>,
    optimizer: LocalOptimizer,
}

impl Net {
    fn new(dev: &Device, group: &Group<'_>) -> Result<Net> {
        let random = |len: usize, seed| -> Result<Vec<f32>> {
            let mut x = dev.zeros(len)?;
            dev.normal(&mut x, 0.0, 0.1, seed, 0)?; // the same numbers on all devices; each layer takes its part
            dev.download(&x)
        };
        let first = ColumnLinear::new(group, &random(64 * HIDDEN, 1)?, &[0.0; HIDDEN])?;
        let second = RowLinear::new(group, &random(HIDDEN * 10, 2)?, &[0.0; 10])?;
        let rate = Optimizer::adam_w(3e-3).clip(1.0).warm_up(20);
        let groups = [
            ParameterGroup::new(rate.decay(0.05), &[first.part.weight.len(), second.part.weight.len()]),
            ParameterGroup::new(rate.decay(0.0), &[first.part.bias.len()]),
            ParameterGroup::new(rate.decay(0.0), &[second.part.bias.len()]).replicated(), // all devices have all of it
        ];
        Ok(Net { first, second, optimizer: LocalOptimizer::new(dev, &groups)? })
    }

    /// One step: the mean of the losses, and the norm of the gradients of both devices.
    fn step(&mut self, dev: &Device, group: &Group<'_>, pixels: &[f32], labels: &[u32]) -> Result<[f32; 2]> {
        let (rows, x) = (labels.len(), dev.upload(pixels)?);
        let z = self.first.forward(group, &x, rows)?; // own columns
        let h = dev.activation(Relu, &z)?;
        let y = self.second.forward(group, &h, rows)?; // an all-reduce
        let (loss, dy) = dev.cross_entropy(&y, &dev.upload(labels)?, 1.0 / rows as f32)?;
        let dh = self.second.backward(group, &h, &dy, rows, false)?;
        let dz = dev.activation_backward(Relu, &dh, &z)?;
        self.first.backward(group, &x, &dz, rows, false)?;

        let (a, b) = (&mut self.first.part, &mut self.second.part);
        let gradients: [&DeviceBuffer<f32>; 4] =
            [&a.weight_gradient, &b.weight_gradient, &a.bias_gradient, &b.bias_gradient];
        let weights = &mut [&mut a.weight, &mut b.weight, &mut a.bias, &mut b.bias];
        let norm = self.optimizer.step_in(group, &gradients, weights)?.expect("it clips");
        Ok([dev.download(&dev.sum(&loss)?)?[0] / rows as f32, dev.download(&norm)?[0]])
    }
}

fn main() -> anyhow::Result<()> {
    let text = std::io::read_to_string(flate2::read::GzDecoder::new(&include_bytes!("data/digits.csv.gz")[..]))?;
    let rows: Vec<Vec<f32>> = text.lines().map(|row| row.split(',').map(|n| n.parse().unwrap()).collect()).collect();
    let pixels: Vec<f32> = rows.iter().flat_map(|row| &row[..64]).map(|x| x / 16.0).collect();
    let labels: Vec<u32> = rows.iter().map(|row| row[64] as u32).collect();

    let pool = GpuPool::builder().host(2).build()?;
    let mut nets = pool.per_device(|dev, _| Net::new(dev, &dev.group(&[0, 1])?))?;
    let mut loss = f32::INFINITY;
    for epoch in 1..=10 {
        let (mut sum, mut norm) = (0.0, 0.0);
        for (pixels, rows) in pixels.chunks(64 * BATCH).zip(labels.chunks(BATCH)) {
            let [mean, now] = nets.run(|dev, _, net| net.step(dev, &dev.group(&[0, 1])?, pixels, rows))?[0];
            (sum, norm) = (sum + mean * rows.len() as f32, now);
        }
        loss = sum / labels.len() as f32;
        println!("epoch {epoch}: loss {loss:.3}, norm of the last gradients {norm:.3}");
    }
    anyhow::ensure!(loss < 0.3, "it has not learned");
    Ok(())
}
