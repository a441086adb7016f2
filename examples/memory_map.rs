//! Shows the work of a memory pool: a small mixed workload on every device, and a file that shows which call held which
//! addresses when.
//!
//! `cargo run --release --example memory_map [-- memory.pickle]`, then drop the file on
//! <https://pytorch.org/memory_viz>. It uses GPUs if there are any, else four software GPUs (`GPU_POOL_BACKEND=host:8`
//! for eight).

use gpu_pool::{Device, GpuPool, ReduceOp, Result, memory::MemorySnapshot};

/// Elements of each layer's activations; its weights have as many.
const LAYERS: [usize; 5] = [800_000, 600_000, 450_000, 300_000, 30_000];
const STEPS: usize = 12;

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "memory_map.pickle".to_owned());
    let pool = GpuPool::builder().record_memory(true).build()?;
    let snapshots = pool.run(|dev, _| {
        let mut model = Model::new(dev)?;
        for step in 0..STEPS {
            model.step(dev, step)?;
        }
        Ok(dev.memory_snapshot())
    })?;
    for snapshot in &snapshots {
        println!("{snapshot}\n");
    }
    std::fs::write(&path, MemorySnapshot::memory_viz(&snapshots))?;
    println!("written to {path}: drop it on https://pytorch.org/memory_viz");
    println!("{}", pool.leaks()?);
    Ok(pool.close()?)
}

type Buffer = gpu_pool::DeviceBuffer<f32>;

/// Long-lived buffers: weights, gradients, and the optimiser's state.
struct Model {
    weights: Vec<Buffer>,
    gradients: Vec<Buffer>,
    momentum: Vec<Buffer>,
}

impl Model {
    fn new(dev: &Device) -> Result<Self> {
        let all = |make: &dyn Fn(usize) -> Result<Buffer>| LAYERS.iter().map(|&n| make(n)).collect::<Result<Vec<_>>>();
        Ok(Model {
            weights: all(&|n| dev.upload(&vec![0.5; n]))?,
            gradients: all(&|n| dev.zeros(n))?,
            momentum: all(&|n| dev.zeros(n))?,
        })
    }

    /// The allocations of a training step, without the training.
    fn step(&mut self, dev: &Device, step: usize) -> Result<()> {
        // Every fourth batch is shorter: sizes that differ a little fragment pools (pytorch#35901).
        let rows = if step % 4 == 3 { 330_000 } else { 500_000 };
        let loader = dev.stream()?;
        let batch = dev.on(&loader).upload(&vec![1.0f32; rows])?;

        // Forward: activations pile up, next to temporaries of all sizes.
        let mut activations = Vec::new();
        for (layer, &n) in LAYERS.iter().enumerate() {
            let mut x = dev.zeros::<f32>(n)?;
            dev.axpy(1.0, &self.weights[layer], &mut x)?;
            let small: Vec<Buffer> = (0..6).map(|i| dev.zeros(100 << (2 * i))).collect::<Result<_>>()?;
            drop((dev.sum(&x)?, small));
            activations.push(x);
        }
        // Backward: activations are freed in reverse order; each leaves a gradient, which is added on another stream.
        let side = dev.stream()?;
        for (layer, x) in activations.into_iter().enumerate().rev() {
            let mut local = dev.zeros::<f32>(x.len())?;
            dev.axpy(0.1, &x, &mut local)?;
            drop(x);
            dev.on(&side).axpy(1.0, &local, &mut self.gradients[layer])?;
        }
        let mut last = dev.zeros::<f32>(30_000)?;
        dev.all_reduce(&mut last, ReduceOp::Avg)?;
        for (momentum, gradient) in self.momentum.iter_mut().zip(&self.gradients) {
            dev.axpy(0.9, gradient, momentum)?;
        }
        // The batch is freed on another device's thread, as buffers are that go through queues.
        let neighbours = dev.exchange(std::sync::Arc::new(batch))?;
        drop(neighbours);
        dev.synchronize()
    }
}
