//! PyTorch's tutorial of `DataParallel`: a linear layer on two devices, 100 random rows in batches of 30.
//!
//! `cargo run --release --example data_parallel`. It uses the first two GPUs, else two software GPUs. Each batch is
//! split over the devices; the outputs come back in the order of the rows. The last batch has 10 rows.

use anyhow::{Result, ensure};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Matrix};
use gpu_pool_train::{self as parallel, Activation, DataParallel, Optimizer, prelude::*};
use std::{
    io::{Write, stdout},
    sync::Mutex,
};

const INPUT_SIZE: usize = 5;
const OUTPUT_SIZE: usize = 2;
const BATCH_SIZE: usize = 30;
const DATA_SIZE: usize = 100;

struct Model {
    w: DeviceBuffer<f32>,
    b: DeviceBuffer<f32>,
}

impl parallel::Model for Model {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<f32>> {
        vec![&mut self.w, &mut self.b]
    }
}

impl Model {
    fn new(dev: &Device) -> gpu_pool::Result<Model> {
        let mut model = Model { w: dev.zeros(INPUT_SIZE * OUTPUT_SIZE)?, b: dev.zeros(OUTPUT_SIZE)? };
        dev.uniform(&mut model.w, -0.4..0.4, 1, 0)?;
        dev.uniform(&mut model.b, -0.4..0.4, 2, 0)?;
        Ok(model)
    }

    fn forward(&self, dev: &Device, input: &DeviceBuffer<f32>) -> gpu_pool::Result<DeviceBuffer<f32>> {
        let rows = input.len() / INPUT_SIZE;
        let w = Matrix::new(&self.w, INPUT_SIZE, OUTPUT_SIZE)?;
        let mut output = dev.matmul(Matrix::new(input, rows, INPUT_SIZE)?, w)?;
        dev.activation_in_place(Activation::Identity.biased(&self.b), &mut output)?;
        Ok(output)
    }
}

fn main() -> Result<()> {
    run(&GpuPool::builder().devices(&[0, 1]).build()?, &mut stdout())
}

/// The tutorial.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send)) -> Result<()> {
    let data = pool.on(&[0]).run(|dev, _| {
        let mut data = dev.zeros::<f32>(DATA_SIZE * INPUT_SIZE)?;
        dev.normal(&mut data, 0.0, 1.0, 3, 0)?;
        dev.download(&data)
    })?;
    if pool.device_count() > 1 {
        writeln!(out, "Let's use {} GPUs!", pool.device_count())?;
    }
    // Nothing is trained here, as in the tutorial. So the optimizer has nothing to do.
    let mut model = DataParallel::new(pool, Optimizer::sgd(0.1), Model::new)?;
    let parameters = model.each(|dev, model| Ok((dev.download(&model.w)?, dev.download(&model.b)?)))?;

    for input in data[0].chunks(BATCH_SIZE * INPUT_SIZE) {
        let rows = input.len() / INPUT_SIZE;
        let shared = Mutex::new(&mut *out); // The devices' threads print.
        let output = model.forward(rows, |dev, shard, model| {
            let input = dev.upload(shard.rows(input, INPUT_SIZE))?;
            let output = model.forward(dev, &input)?;
            let (rows, mut out) = (shard.range(rows).len(), shared.lock().map_err(|_| Error::custom("a panic"))?);
            writeln!(out, "\tIn Model: input size [{rows}, {INPUT_SIZE}] output size [{rows}, {OUTPUT_SIZE}]")
                .map_err(Error::custom)?;
            dev.download(&output)
        })?;
        let rows_out = output.len() / OUTPUT_SIZE;
        writeln!(out, "Outside: input size [{rows}, {INPUT_SIZE}] output_size [{rows_out}, {OUTPUT_SIZE}]")?;
        check(input, &parameters[0], &output)?;
    }
    Ok(())
}

/// Compares outputs with a plain loop.
pub fn check(input: &[f32], (w, b): &(Vec<f32>, Vec<f32>), output: &[f32]) -> Result<()> {
    ensure!(output.len() * INPUT_SIZE == input.len() * OUTPUT_SIZE, "{} outputs", output.len());
    for (x, y) in input.chunks(INPUT_SIZE).zip(output.chunks(OUTPUT_SIZE)) {
        for j in 0..OUTPUT_SIZE {
            let expected = b[j] + (0..INPUT_SIZE).map(|i| x[i] * w[i * OUTPUT_SIZE + j]).sum::<f32>();
            ensure!((y[j] - expected).abs() < 1e-5, "{} instead of {expected}", y[j]);
        }
    }
    Ok(())
}
