//! The matrix products of "Dive into Deep Learning", 13.3 (automatic parallelism): 50 products of 4000 x 4000 in `f32`
//! (no TF32), on one GPU and on two at once; and their results on the way to page-locked memory while the GPU computes.
//!
//! * `.../products/<streams or tasks>/one`, `two`: milliseconds of 50 products on one GPU, and of 50 on each of two
//! * `.../copy_one`, `copy_two`: the same with copies of all results (50 times 64 MB)
//!
//! `streams` is a scope with a second stream for the copies, into page-locked memory that is there before. `tasks` is
//! `GpuPool::tasks`, with a task for each product and `download` for each copy. torch runs in one process. Its copies
//! are `non_blocking` into page-locked memory, on the stream of the products as the book has them, or on a second one.
//! Targets: 135 ms on two GPUs, 140 ms with copies on one.

use std::{cell::RefCell, time::Instant};

use gpu_pool::{Device, DeviceBuffer, GpuPool, Matrix, PinnedBuffer, Result, Shard, Stream};
use gpu_pool_train::prelude::*;

use crate::{
    Machine,
    machine::uninit,
    support::{Bench, MILLISECONDS, Side},
};

/// Products in a turn.
const COUNT: usize = 50;

/// A device's factor and results.
struct Results {
    side: usize,
    x: DeviceBuffer<f32>,
    y: Vec<DeviceBuffer<f32>>,
    /// Empty until copies are asked for.
    pinned: Vec<PinnedBuffer<f32>>,
    copies: Stream,
}

impl Results {
    fn new(dev: &Device, shard: &Shard, side: usize) -> Result<Self> {
        let mut x = dev.zeros(side * side)?;
        dev.normal(&mut x, 0.0, 1.0, shard.index() as u64, 0)?;
        let y = (0..COUNT).map(|_| dev.zeros(side * side)).collect::<Result<_>>()?;
        Ok(Results { side, x, y, pinned: Vec::new(), copies: dev.stream()? })
    }

    /// Makes room for the copies.
    fn pin(&mut self, dev: &Device) -> Result<()> {
        while self.pinned.len() < COUNT {
            self.pinned.push(dev.pinned(self.side * self.side)?);
        }
        Ok(())
    }

    fn run(&mut self, dev: &Device, copy: bool) -> Result<()> {
        let x = Matrix::new(&self.x, self.side, self.side)?;
        for (i, y) in self.y.iter_mut().enumerate() {
            dev.gemm(1.0, x, x, 0.0, y)?;
            if copy {
                // The copy waits for the product that writes `y`, and the next product goes on beside it.
                dev.on(&self.copies).download_pinned(y, &mut self.pinned[i])?;
            }
        }
        Ok(())
    }

    /// Compares an element of each copy with the product in `f64`.
    fn check(&self, dev: &Device) -> Result<()> {
        let (n, x) = (self.side, dev.download(&self.x)?);
        for (i, y) in self.pinned.iter().enumerate() {
            let (row, col) = (i % n, (7 * i) % n);
            let right: f64 = (0..n).map(|k| f64::from(x[row * n + k]) * f64::from(x[k * n + col])).sum();
            let found = f64::from(y.as_slice()?[row * n + col]);
            assert!((found - right).abs() < 1e-2, "product {i}: {found} is not {right}");
        }
        Ok(())
    }
}

/// The same as tasks. The copies are new page-locked memory each time, which the pool keeps for the next time.
fn tasks(pool: &GpuPool, factors: &[DeviceBuffer<f32>], side: usize, devices: usize, copy: bool) -> Result<()> {
    let product = |dev: &Device, x: &DeviceBuffer<f32>| {
        let (mut y, x) = (uninit(dev, side * side)?, Matrix::new(x, side, side)?);
        dev.gemm(1.0, x, x, 0.0, &mut y)?;
        Ok(y)
    };
    pool.tasks(|t| {
        let (mut results, mut copies) = (Vec::new(), Vec::new());
        for _ in 0..COUNT {
            for (device, x) in factors[..devices].iter().enumerate() {
                let y = t.gpu(device).run((), move |dev, ()| product(dev, x));
                if copy {
                    copies.push(t.gpu(device).download(&y));
                }
                results.push(y);
            }
        }
        // All results live until all are there.
        t.wait()
    })
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    let case = |form: &str, what: &str| format!("{}/products/{form}/{what}", machine.kind);
    let wanted: Vec<_> = [("one", 1, false), ("two", 2, false), ("copy_one", 1, true), ("copy_two", 2, true)]
        .into_iter()
        .flat_map(|(what, devices, copy)| ["streams", "tasks"].map(|form| (form, what, devices, copy)))
        .filter(|&(form, what, devices, _)| devices <= machine.devices && bench.wants(&case(form, what)))
        .collect();
    let Some(most) = wanted.iter().map(|wanted| wanted.2).max() else { return };
    let pool = machine.pool(most);
    let torch = machine.torch("products.py", most);
    let side = if machine.software { 64 } else { 4000 };
    let results = pool.per_device(|dev, shard| Results::new(dev, &shard, side)).expect("memory for it");
    let results = RefCell::new(results);
    bench.set_turns(1, bench.size(5, 3));
    let factors = results.borrow_mut().run(|dev, _, own| {
        let mut x = uninit(dev, own.x.len())?;
        dev.copy(&own.x, &mut x)?;
        Ok(x)
    });
    let factors = factors.expect("memory for it");
    for (form, what, devices, copy) in wanted {
        let members: Vec<usize> = (0..devices).collect();
        let run = |f: &(dyn Fn(&Device, &mut Results) -> Result<()> + Sync)| {
            let clock = Instant::now();
            results.borrow_mut().on(&members).run(|dev, _, own| f(dev, own)).expect("products");
            clock.elapsed().as_secs_f64() * 1e3
        };
        let is_tasks = form == "tasks";
        if copy && !is_tasks {
            run(&|dev, own| own.pin(dev));
        }
        let ours = Side::new("gpu-pool", || {
            if is_tasks {
                let clock = Instant::now();
                tasks(&pool, &factors, side, devices, copy).expect("products");
                return clock.elapsed().as_secs_f64() * 1e3;
            }
            // A scope ends when the streams of its devices are empty.
            run(&|dev, own| own.run(dev, copy))
        });
        let forms: &[&str] = if copy { &["torch", "torch, second stream"] } else { &["torch"] };
        let peers = torch.iter().flat_map(|torch| {
            forms
                .iter()
                .map(move |form| torch.side(form, format!("{what}:{}", form.replace(", second ", "_second_")), 1))
        });
        bench.compare(&case(form, what), MILLISECONDS, ours, peers.collect());
        if copy && !is_tasks {
            run(&|dev, own| own.check(dev));
        }
    }
}
