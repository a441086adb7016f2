//! A network for handwritten digits in four stages on four software GPUs (1F1B): `cargo run --example pipeline`.
use gpu_pool::{Device, DeviceBuffer as Buffer, GpuPool, Matrix, Result};
use gpu_pool_train::{prelude::*, *};
struct Layer(Buffer<f32>, Buffer<f32>); // gelu(x w): the weights, 64 x 64, and their gradient
impl Stage for Layer {
    type Activation = Buffer<f32>;
    type Saved = [Buffer<f32>; 2];
    fn forward(&mut self, dev: &Device, _: StageContext, x: Buffer<f32>) -> Result<(Buffer<f32>, [Buffer<f32>; 2])> {
        let z = dev.matmul(Matrix::new(&x, x.len() / 64, 64)?, Matrix::new(&self.0, 64, 64)?)?;
        Ok((dev.gelu(&z)?, [x, z]))
    }
    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        [x, z]: Self::Saved,
        dy: Buffer<f32>,
    ) -> Result<Option<Buffer<f32>>> {
        let (rows, old) = (x.len() / 64, if at.accumulate { 1.0 } else { 0.0 });
        let dz = dev.activation_backward(Activation::Gelu, &dy, &z)?;
        dev.gemm(1.0, Matrix::new(&x, rows, 64)?.t(), Matrix::new(&dz, rows, 64)?, old, &mut self.1)?;
        dev.matmul(Matrix::new(&dz, rows, 64)?, Matrix::new(&self.0, 64, 64)?.t()).map(Some)
    }
}
fn main() -> anyhow::Result<()> {
    let text = std::io::read_to_string(flate2::read::GzDecoder::new(&include_bytes!("data/digits.csv.gz")[..]))?;
    let rows: Vec<Vec<f32>> = text.lines().map(|row| row.split(',').map(|n| n.parse().unwrap()).collect()).collect();
    let micro = |m: usize| rows.chunks(225).nth(m).expect("eight, of which the last has 222 rows");
    let pixels = |m| micro(m).iter().flat_map(|row| &row[..64]).map(|pixel| pixel / 16.0).collect::<Vec<_>>();
    let input = |dev: &Device, m| dev.upload(&pixels(m));
    let loss = |dev: &Device, m, y| {
        let labels: Vec<u32> = micro(m).iter().map(|row| row[64] as u32).collect();
        let (loss, dy) = dev.cross_entropy(&y, &dev.upload(&labels)?, 1.0 / rows.len() as f32)?;
        Ok((dy, dev.download(&dev.sum(&loss)?)?[0] / rows.len() as f32))
    };
    let pool = GpuPool::builder().host(4).build()?;
    let mut model = Pipeline::new(&pool, PipelineSchedule::one_f_one_b(4, 8)?, |dev, stage| {
        let mut layer = Layer(dev.zeros(64 * 64)?, dev.zeros(64 * 64)?);
        dev.normal(&mut layer.0, 0.0, 0.25, stage as u64, 0).map(|()| layer)
    })?;
    let mut last = f32::INFINITY;
    for step in 1..=100 {
        let now = model.step(input, loss)?.iter().sum::<f32>();
        println!("step {step}: loss {now:.3}");
        anyhow::ensure!(now < last, "the loss has risen");
        last = now;
        model.each(|dev, _, layer| dev.axpy(-0.05, &layer.1, &mut layer.0))?;
    }
    Ok(())
}
