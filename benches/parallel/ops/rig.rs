//! The memory of the operations, and a graph of one of them.

use std::{any::Any, time::Instant};

use gpu_pool::{
    Device, DeviceBuffer, DeviceCopy, Graph, Result,
    kernel::{CastTo, Float},
};
use gpu_pool_train::prelude::*;
use half::bf16;

use super::calls::{self, Call};
use crate::support::gpus;

/// An element type.
pub trait Number: Float<Acc = f32> + CastTo<Self::Other> {
    const NAME: &'static str;
    const ONE: Self;
    /// The type that it is cast to.
    type Other: DeviceCopy;
    /// Operations of this type only.
    fn further() -> Vec<Call<Self>> {
        Vec::new()
    }
}

impl Number for f32 {
    const NAME: &'static str = "f32";
    const ONE: Self = 1.0;
    type Other = bf16;

    fn further() -> Vec<Call<Self>> {
        calls::of_f32()
    }
}

impl Number for bf16 {
    const NAME: &'static str = "bf16";
    const ONE: Self = bf16::ONE;
    type Other = f32;
}

/// What an operation returns; it lives as long as the graph.
pub type Kept = Box<dyn Any>;

/// Enqueues the operation on the `i`-th buffers.
pub type Run<T> = fn(&Device, &mut Rig<T>, usize) -> Result<Kept>;

/// Inputs and outputs of `rows x cols` elements, and what else operations need.
pub struct Rig<T: Number> {
    pub rows: usize,
    pub cols: usize,
    /// As many as a graph has operations, and so `dy` and `y`.
    pub x: Vec<DeviceBuffer<T>>,
    pub dy: Vec<DeviceBuffer<T>>,
    pub y: Vec<DeviceBuffer<T>>,
    /// `cols x cols`
    pub square: DeviceBuffer<T>,
    pub gamma: DeviceBuffer<T>,
    pub beta: DeviceBuffer<T>,
    pub dgamma: DeviceBuffer<T>,
    pub dbeta: DeviceBuffer<T>,
    /// One for each row.
    pub mean: DeviceBuffer<f32>,
    pub rstd: DeviceBuffer<f32>,
    /// A column for each row.
    pub labels: DeviceBuffer<u32>,
    /// A row for each row.
    pub indices: DeviceBuffer<u32>,
    pub words: DeviceBuffer<u32>,
    graph: Option<(Graph, Vec<Kept>)>,
}

impl<T: Number> Rig<T> {
    pub fn new(dev: &Device, rows: usize, cols: usize, count: usize) -> Result<Self> {
        let mut seed = 0;
        let mut noise = |len: usize| {
            seed += 1;
            let mut x = dev.zeros::<T>(len)?;
            dev.normal(&mut x, 0.0, 1.0, seed, 0)?;
            Ok(x)
        };
        let mut many = || (0..count).map(|_| noise(rows * cols)).collect::<Result<Vec<_>>>();
        let (x, dy, y) = (many()?, many()?, many()?);
        let below = |bound: usize, seed| {
            let words: Vec<u32> = gpus::noise(rows, seed).into_iter().map(|word| word % bound as u32).collect();
            dev.upload(&words)
        };
        let (mut mean, mut rstd) = (dev.zeros(rows)?, dev.zeros(rows)?);
        dev.uniform(&mut mean, -0.1..0.1, 1, 0)?;
        dev.uniform(&mut rstd, 0.9..1.1, 2, 0)?;
        Ok(Rig {
            rows,
            cols,
            x,
            dy,
            y,
            square: noise(cols * cols)?,
            gamma: noise(cols)?,
            beta: noise(cols)?,
            dgamma: dev.zeros(cols)?,
            dbeta: dev.zeros(cols)?,
            mean,
            rstd,
            labels: below(cols, 3)?,
            indices: below(rows, 4)?,
            words: dev.zeros(rows * cols)?,
            graph: None,
        })
    }

    /// Captures the operation on all buffers, one after the other.
    pub fn capture(&mut self, dev: &Device, run: Run<T>) -> Result<()> {
        self.graph = None;
        // The first product loads cuBLAS, which a capture cannot.
        run(dev, self, 0)?;
        let graph = dev.capture(|dev| (0..self.x.len()).map(|i| run(dev, self, i)).collect::<Result<Vec<_>>>())?;
        self.graph = Some(graph);
        Ok(())
    }

    /// Microseconds per operation, over some launches after one that does not count.
    pub fn time(&self, dev: &Device, launches: usize) -> Result<f64> {
        let (graph, _) = self.graph.as_ref().expect("it is captured first");
        dev.launch_graph(graph)?;
        dev.synchronize()?;
        let clock = Instant::now();
        (0..launches).try_for_each(|_| dev.launch_graph(graph))?;
        dev.synchronize()?;
        Ok(clock.elapsed().as_secs_f64() * 1e6 / (launches * self.x.len()) as f64)
    }
}
