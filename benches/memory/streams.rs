//! RMM's
//! [`multi_stream_allocations`](https://github.com/rapidsai/rmm/blob/main/cpp/benchmarks/multi_stream_allocations):
//! four kernels, each with a buffer of 8 bytes of its own, on one stream after the other. The buffer is dropped as soon
//! as its kernel is launched; the host waits at the end.
//!
//! If a pool gives a stream memory that another one still uses, the streams run one after the other (rmm#850), unless
//! every stream has got memory of its own before ("prewarmed"). So the time should not depend on prewarming.

use std::{cell::OnceCell, time::Instant};

use gpu_pool::{Device, GpuPool, PerDevice, Result, Stream, extend::driver::RawStream};

use crate::{
    Machine,
    driver_pool::{self, DriverPool},
    spin::{self, RawSpin},
    support::{Bench, MICROSECONDS, Side},
};

const STREAMS: [usize; 3] = [1, 2, 4];
const KERNELS: usize = 4;
const CLOCKS: u64 = 1_000_000;

pub fn run(bench: &mut Bench, machine: &Machine) {
    for count in STREAMS {
        let case = format!("{}/rmm_streams/{count}", machine.kind);
        if !bench.wants(&case) {
            continue;
        }
        bench.set_turns(bench.size(2, 1), bench.size(21, 3));
        // Each has a pool of its own: they must not share memory.
        let (fresh, warm) = (Ours::new(machine, count, false), Ours::new(machine, count, true));
        let raw = OnceCell::new();
        let mut peers = vec![Side::new("prewarmed", || warm.turn())];
        if !machine.software {
            peers.push(Side::new(driver_pool::NAME, || {
                raw.get_or_init(|| Raw::new(&fresh.pool, count)).turn(&fresh.pool)
            }));
        }
        bench.compare(&case, MICROSECONDS, Side::new("gpu-pool", || fresh.turn()), peers);
    }
}

struct Ours {
    pool: GpuPool,
    streams: PerDevice<Vec<Stream>>,
}

impl Ours {
    fn new(machine: &Machine, count: usize, prewarmed: bool) -> Self {
        let pool = machine.builder(1).module(&spin::MODULE).build().expect("the device can be opened");
        let streams = pool.per_device(|dev, _| {
            let streams: Vec<Stream> = (0..count).map(|_| dev.stream()).collect::<Result<_>>()?;
            if prewarmed {
                // All live at the same time, used and dropped.
                let mut warm = Vec::new();
                for stream in &streams {
                    let dev = dev.on(stream);
                    warm.push(dev.zeros::<u64>(1)?);
                }
            }
            Ok(streams)
        });
        Ours { streams: streams.expect("a few streams"), pool }
    }

    /// Microseconds from the first allocation until all work is done.
    fn turn(&self) -> f64 {
        let times = self.pool.run(|dev, _| {
            let streams = &*self.streams.borrow(dev)?;
            let clock = Instant::now();
            for kernel in 0..KERNELS {
                step(&dev.on(&streams[kernel % streams.len()]))?;
            }
            streams.iter().try_for_each(|stream| dev.on(stream).synchronize())?;
            Ok(clock.elapsed().as_secs_f64() * 1e6)
        });
        times.expect("little memory")[0]
    }
}

fn step(dev: &Device) -> Result<()> {
    // SAFETY: nobody reads it.
    let mut buffer = unsafe { dev.uninit(1) }?;
    spin::spin(dev, &mut buffer, CLOCKS)
}

/// The same with the driver's allocator and the driver's calls.
struct Raw {
    spin: RawSpin,
    streams: Vec<RawStream>,
    /// Keeps the settings of the driver's pool.
    _pool: PerDevice<DriverPool>,
}

impl Raw {
    fn new(pool: &GpuPool, count: usize) -> Self {
        let spin = RawSpin::new(0);
        let streams = (0..count).map(|_| spin.gpu.stream_create(0).expect("a stream")).collect();
        let set = pool.per_device(|dev, _| Ok(DriverPool::new(dev))).expect("it is there");
        Raw { spin, streams, _pool: set }
    }

    fn turn(&self, pool: &GpuPool) -> f64 {
        let times = pool.run(|_, _| {
            let clock = Instant::now();
            for kernel in 0..KERNELS {
                let raw = self.streams[kernel % self.streams.len()];
                let stream = std::ptr::with_exposed_provenance_mut(raw.0 as usize);
                let address = DriverPool::take_on(stream, 8).expect("8 bytes");
                self.spin.launch(address, CLOCKS, raw);
                DriverPool::give_on(stream, address);
            }
            for &stream in &self.streams {
                let idle = self.spin.gpu.stream_wait_idle(stream, std::time::Duration::from_secs(10));
                assert!(idle.expect("the stream is healthy"), "a kernel is stuck");
            }
            Ok(clock.elapsed().as_secs_f64() * 1e6)
        });
        times.expect("the calls succeed")[0]
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        for &stream in &self.streams {
            // SAFETY: the streams belong to this value, and are idle.
            let _ = unsafe { self.spin.gpu.stream_destroy(stream) };
        }
    }
}
