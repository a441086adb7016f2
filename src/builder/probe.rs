//! The probe: whether devices can access each other's memory, verified when the pool is built.
//!
//! Invariant: a route is direct only after the probe has found correct data by stores, by loads, and by copies in both
//! directions. Hardware has claimed peer access and delivered zeros or old data (open-gpu-kernel-modules#1257,
//! nccl-tests#117, FIDESlib#28). A pair that does not deliver loses the access right, and its copies are staged. The
//! buffers come from the pool: copies to mapped memory failed where copies to allocated memory did not (CUDA.jl#3112).
//!
//! All devices probe in parallel. In each round a device has another partner, and alone works on this partner's buffer.

use crate::{
    Device, DeviceBuffer, Event, GpuPool, LaunchDims,
    collective::{PeerReport, Route},
    driver::{HostKernel, KernelArg, Launch, ValueBytes},
    error::{Error, Result},
    kernel::builtin::{PROBE, PROBE_CHECK, PROBE_WRITE},
};
use std::{panic::Location, sync::Arc, time::Duration};

/// Number of words to check: one page of 16 KiB; fewer under Miri, which is a thousand times slower.
const CHECKED: usize = if cfg!(miri) { 64 } else { 4096 };
const TIMED: usize = 1 << 20;
/// Copies are timed only if the memory limit is at least this many bytes.
const ROOMY: u64 = 64 << 20;

/// Probes all pairs. The reports are in the order `from * devices + to`.
pub(crate) fn peers(pool: &GpuPool, staged: bool) -> Result<Vec<PeerReport>> {
    let count = pool.device_count();
    let rows = pool.run(|dev, _| {
        let me = dev.index();
        let mut row: Vec<PeerReport> = (0..count).map(|to| unprobed(me, to)).collect();
        if staged || count == 1 {
            return Ok(row);
        }
        // A pool with little memory does not spend it on timing.
        let poor = dev.worker.cache.borrow().limit().is_some_and(|limit| limit < ROOMY);
        let words = if dev.worker.is_software() || poor { CHECKED } else { TIMED };
        let near = dev.zeros::<u32>(words)?;
        let lent = Arc::new(dev.zeros::<u32>(words)?);
        dev.synchronize()?;
        let (own, lent) = (lent.clone(), dev.exchange(lent)?);
        for round in 1..count {
            let to = (me + round) % count;
            row[to] = Probe { dev, near: &near, far: &lent[to], to, seed: (me * count + to) as u32 }.run()?;
            dev.synchronize()?;
            dev.barrier()?;
        }
        // Each device drops its own buffer last, so that the same thread frees it in every run.
        drop(lent);
        dev.barrier()?;
        drop((own, near));
        if !dev.worker.is_software() && dev.worker.shared.memory.reserve.is_none() {
            // The program has not asked for these megabytes.
            dev.trim()?;
        }
        Ok(row)
    })?;
    Ok(rows.into_iter().flatten().collect())
}

fn unprobed(from: usize, to: usize) -> PeerReport {
    let own = from == to;
    PeerReport {
        from,
        to,
        claimed: own,
        verified: own,
        route: if own { Route::Direct } else { Route::Staged },
        latency: None,
        gigabytes_per_second: None,
        note: if own { String::new() } else { "peer access was switched off".to_owned() },
    }
}

/// The probe of one ordered pair. It calls the driver: `launch` and `copy` would refuse a pair that is not verified.
struct Probe<'d> {
    dev: &'d Device,
    near: &'d DeviceBuffer<u32>,
    far: &'d DeviceBuffer<u32>,
    to: usize,
    seed: u32,
}

impl Probe<'_> {
    fn run(&self) -> Result<PeerReport> {
        let (from, to) = (self.dev.index(), self.to);
        let handle = &self.dev.worker.handle;
        let peer = &*self.far.block.handle.driver;
        let staged = |claimed, note| PeerReport { claimed, note, ..unprobed(from, to) };
        if !handle.check("probe", handle.driver.can_access_peer(peer))? {
            return Ok(staged(false, "the hardware offers no peer access".to_owned()));
        }
        if let Err(fault) = handle.driver.enable_peer(peer) {
            return Ok(staged(true, format!("peer access could not be enabled: {fault}")));
        }
        if let Some(lie) = self.verify()? {
            let _ = handle.driver.disable_peer(peer);
            event!(warn, "peer_access_lies", from, to, lie, "peer access does not deliver; copies will be staged");
            return Ok(staged(true, format!("claimed, but {lie}")));
        }
        let timed = if self.near.len().min(self.far.len()) < TIMED { None } else { Some(self.time()?) };
        Ok(PeerReport {
            claimed: true,
            verified: true,
            route: Route::Direct,
            latency: timed.map(|(latency, _)| latency),
            gigabytes_per_second: timed.map(|(_, rate)| rate),
            note: String::new(),
            ..unprobed(from, to)
        })
    }

    fn verify(&self) -> Result<Option<&'static str>> {
        let (near, far) = (self.near.address(), self.far.address());
        let [a, b, c] = [0u32, 1, 2].map(|way| self.seed.wrapping_mul(3).wrapping_add(way).wrapping_add(1));
        let mismatches = self.dev.zeros::<u32>(3)?;
        let counter = |way: u64| mismatches.address() + 4 * way;
        // Stores to the peer, and loads from it. Each way has its own pattern: old data cannot pass for new.
        self.write(far, a)?;
        self.check(far, a, counter(0))?;
        // Copies to the peer (checked by loads), and back.
        self.write(near, b)?;
        self.copy(true, CHECKED)?;
        self.check(far, b, counter(1))?;
        self.write(far, c)?;
        self.copy(false, CHECKED)?;
        self.check(near, c, counter(2))?;
        // Not by `download`: page-locking its pieces of megabytes takes longer than the probe.
        let mut found = self.dev.pinned(3)?;
        self.dev.download_pinned(&mismatches, &mut found)?;
        let ways = [
            "stores and loads over the link do not arrive",
            "copies to the peer do not arrive",
            "copies from the peer do not arrive",
        ];
        Ok(ways.into_iter().zip(found.as_slice()?).find_map(|(way, mismatches)| (*mismatches > 0).then_some(way)))
    }

    /// Latency of a small copy from the peer and GB/s of a large one: the best of three each.
    fn time(&self) -> Result<(Duration, f64)> {
        let best = |words: usize| -> Result<Duration> {
            let mut best = Duration::MAX;
            for _ in 0..3 {
                let start = Event::record(&self.dev.stream, "probe", true)?;
                self.copy(false, words)?;
                let end = Event::record(&self.dev.stream, "probe", true)?;
                self.dev.synchronize()?;
                best = best.min(end.elapsed_since(&start)?);
            }
            Ok(best)
        };
        let (small, large) = (best(256)?, best(TIMED)?);
        Ok((small, (TIMED * size_of::<u32>()) as f64 / large.as_secs_f64().max(1e-9) / 1e9))
    }

    fn write(&self, at: u64, seed: u32) -> Result<()> {
        self.launch(PROBE_WRITE.name(), PROBE_WRITE.host, &[words(at, true), value(CHECKED as u64), value(seed)])
    }

    fn check(&self, at: u64, seed: u32, counter: u64) -> Result<()> {
        let counter = KernelArg::Slice { address: counter, bytes: size_of::<u32>(), write: true };
        let args = [words(at, false), value(CHECKED as u64), value(seed), counter];
        self.launch(PROBE_CHECK.name(), PROBE_CHECK.host, &args)
    }

    fn launch(&self, name: &'static str, host: Option<HostKernel>, args: &[KernelArg]) -> Result<()> {
        let worker = &self.dev.worker;
        let function = worker.function(&PROBE, name)?;
        let launch = Launch { name, function, host, dims: LaunchDims::cover(CHECKED), args, early: false };
        // SAFETY: the arguments fit the two kernels, which touch `CHECKED` words of live buffers, and one counter. The
        // whole probe is on one stream, which is synchronised before the barrier returns the partner's buffer.
        worker.handle.check("probe", unsafe { worker.handle.driver.launch(&launch, self.dev.stream.raw) })?;
        self.dev.stream.submit();
        Ok(())
    }

    fn copy(&self, there: bool, words: usize) -> Result<()> {
        let (src, dst) = if there { (self.near, self.far) } else { (self.far, self.near) };
        let handle = &self.dev.worker.handle;
        let (to, from) = (&*dst.block.handle.driver, &*src.block.handle.driver);
        let (bytes, stream) = (words * size_of::<u32>(), self.dev.stream.raw);
        // SAFETY: as above. Both buffers have at least `words` words.
        let copied = unsafe { handle.driver.copy_peer(dst.address(), to, src.address(), from, bytes, stream) };
        handle.check("probe", copied)?;
        self.dev.stream.submit();
        Ok(())
    }
}

fn words(address: u64, write: bool) -> KernelArg {
    KernelArg::Slice { address, bytes: CHECKED * size_of::<u32>(), write }
}

fn value<T: crate::kernel::Scalar>(value: T) -> KernelArg {
    KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&value)))
}

/// Relative speeds of the devices: how fast each streams through its memory while all do. The best of five runs.
#[track_caller]
pub(crate) fn speeds(pool: &GpuPool) -> Result<Vec<f64>> {
    let site = Location::caller();
    pool.run(|dev, _| {
        let len = if dev.worker.is_software() { 1 << 18 } else { 1 << 24 };
        let (x, mut y) = (dev.zeros::<f32>(len)?, dev.zeros::<f32>(len)?);
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let start = dev.record_timed()?;
            dev.axpy(1.0, &x, &mut y)?;
            let end = dev.record_timed()?;
            dev.synchronize()?;
            best = best.min(end.elapsed_since(&start)?);
        }
        match best.as_secs_f64() {
            seconds if seconds > 0.0 => Ok(1.0 / seconds),
            _ => Err(Error::invalid_at(site, "weights_measured", "the device's clock did not advance")),
        }
    })
}
