//! Drops on other threads than the owner's.
//!
//! The owner's thread takes a batch and hands it over, which is not timed. The producers drop it, all at once. They are
//! plain threads, which share a lane of the owner's remote free list, or other devices' threads, which have a lane
//! each.

use std::{mem, sync::Barrier, thread, time::Instant};

use cudarc::driver::sys;
use gpu_pool::{Device, DeviceBuffer, GpuPool, Result};
use parking_lot::Mutex;

use crate::{
    Machine,
    driver_pool::{self, DriverPool, check},
    sides::Contender,
    support::{Bench, NANOSECONDS, Side},
};

const BYTES: usize = 4096;
const PRODUCERS: [usize; 2] = [1, 3];

pub fn run(bench: &mut Bench, machine: &Machine) {
    let kind = machine.kind;
    let batch = bench.size(1000, 100);
    let pool = machine.pool(machine.devices);
    let driver = (!machine.software).then(|| Contender::new(&pool, 0, DriverPool::new));
    bench.set_turns(bench.size(3, 1), bench.size(31, 5));
    for producers in PRODUCERS {
        let mut peers = Vec::new();
        if let Some(driver) = &driver {
            peers.push(Side::sampling(driver_pool::NAME, move |samples| {
                driver_frees(driver, producers, batch, samples)
            }));
        }
        if let Some(torch) = &machine.torch {
            peers.push(torch.side(format!("remote:{BYTES}:{producers}"), batch));
        }
        let ours = Side::sampling("gpu-pool", |samples| by_threads(&pool, producers, batch, samples));
        bench.compare(&format!("{kind}/remote/thread/{producers}"), NANOSECONDS, ours, peers);
        if producers < machine.devices {
            let ours = Side::sampling("gpu-pool", |samples| by_devices(&pool, producers, batch, samples));
            let plain = Side::sampling("plain threads", |samples| by_threads(&pool, producers, batch, samples));
            bench.compare(&format!("{kind}/remote/device/{producers}"), NANOSECONDS, ours, vec![plain]);
        }
    }
    // The owner's cost: it takes all remote frees, and then allocates from them.
    let after = |by: fn(&GpuPool, usize, usize, &mut Vec<f64>), producers| {
        let pool = &pool;
        move |samples: &mut Vec<f64>| {
            by(pool, producers, batch, &mut Vec::new());
            samples.push(retake(pool, producers * batch));
        }
    };
    let own = Side::sampling("freed by the owner", after(by_owner, 1));
    let ours = Side::sampling("gpu-pool", after(by_threads, 1));
    bench.compare(&format!("{kind}/remote/take"), NANOSECONDS, ours, vec![own]);
    if let Some(driver) = driver {
        driver.end();
    }
}

type Batch = Mutex<Vec<DeviceBuffer<u8>>>;

fn take(dev: &Device, blocks: usize) -> Result<Vec<DeviceBuffer<u8>>> {
    // SAFETY: nobody reads them.
    (0..blocks).map(|_| unsafe { dev.uninit(BYTES) }).collect()
}

/// A batch of device 0's for each producer.
fn batches(pool: &GpuPool, producers: usize, batch: usize) -> Vec<Batch> {
    let taken = pool.on(&[0]).run(|dev, _| (0..producers).map(|_| take(dev, batch).map(Mutex::new)).collect());
    taken.expect("little memory").remove(0)
}

/// Nanoseconds a drop.
fn drop_all(batch: &Batch, start: &Barrier) -> f64 {
    let batch = mem::take(&mut *batch.lock());
    let blocks = batch.len();
    start.wait();
    let clock = Instant::now();
    batch.into_iter().for_each(drop);
    clock.elapsed().as_secs_f64() * 1e9 / blocks as f64
}

fn by_threads(pool: &GpuPool, producers: usize, batch: usize, samples: &mut Vec<f64>) {
    let (batches, start) = (batches(pool, producers, batch), Barrier::new(producers));
    thread::scope(|scope| {
        let threads: Vec<_> = batches.iter().map(|batch| scope.spawn(|| drop_all(batch, &start))).collect();
        samples.extend(threads.into_iter().map(|thread| thread.join().expect("a drop does not panic")));
    });
}

fn by_devices(pool: &GpuPool, producers: usize, batch: usize, samples: &mut Vec<f64>) {
    let (batches, start) = (batches(pool, producers, batch), Barrier::new(producers));
    let others: Vec<usize> = (1..=producers).collect();
    let times = pool.on(&others).run(|dev, _| Ok(drop_all(&batches[dev.rank()], &start)));
    samples.extend(times.expect("drops succeed"));
}

fn by_owner(pool: &GpuPool, producers: usize, batch: usize, samples: &mut Vec<f64>) {
    let (batches, start) = (batches(pool, producers, batch), Barrier::new(1));
    let times = pool.on(&[0]).run(|_, _| Ok(batches.iter().map(|batch| drop_all(batch, &start)).collect()));
    samples.extend::<Vec<f64>>(times.expect("drops succeed").remove(0));
}

/// Nanoseconds an allocation, for the owner.
fn retake(pool: &GpuPool, blocks: usize) -> f64 {
    let times = pool.on(&[0]).run(|dev, _| {
        let mut taken: Vec<DeviceBuffer<u8>> = Vec::with_capacity(blocks);
        let clock = Instant::now();
        for _ in 0..blocks {
            // SAFETY: nobody reads it.
            taken.push(unsafe { dev.uninit(BYTES) }?);
        }
        Ok(clock.elapsed().as_secs_f64() * 1e9 / blocks as f64)
    });
    times.expect("the memory is there")[0]
}

/// A handle that may go to another thread: an address, a stream or a context.
#[derive(Clone, Copy)]
struct Portable<T>(*mut T);
// SAFETY: the driver's handles may be used by any thread.
unsafe impl<T> Send for Portable<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Portable<T> {}

/// The same with `cuMemFreeAsync`, by plain threads on which the device's context is current.
fn driver_frees(driver: &Contender<'_, DriverPool>, producers: usize, batch: usize, samples: &mut Vec<f64>) {
    let taken = driver.ask(|_, driver| {
        let all: Option<Vec<_>> = (0..producers * batch).map(|_| DriverPool::take_on(driver.stream(), BYTES)).collect();
        (all.expect("little memory"), Portable(driver.stream()), Portable(driver.context))
    });
    let (addresses, stream, context) = taken;
    let start = Barrier::new(producers);
    let free = |addresses: &[sys::CUdeviceptr]| {
        let (Portable(stream), Portable(context)) = (&stream, &context);
        // SAFETY: the context belongs to the pool, which lives.
        check(unsafe { sys::cuCtxSetCurrent(*context) });
        start.wait();
        let clock = Instant::now();
        addresses.iter().for_each(|&address| DriverPool::give_on(*stream, address));
        clock.elapsed().as_secs_f64() * 1e9 / addresses.len() as f64
    };
    thread::scope(|scope| {
        let free = &free;
        let threads: Vec<_> = addresses.chunks(batch).map(|part| scope.spawn(move || free(part))).collect();
        samples.extend(threads.into_iter().map(|thread| thread.join().expect("a free does not panic")));
    });
}
