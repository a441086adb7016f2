//! From drivers to a pool: makes the shared state, starts the device threads, probes the links, sets collectives up.

use super::{Builder, Weights, share, signal_pad};
use crate::driver::{DriverRef, host};
use crate::error::{Error, Result, op_site::OpSite};
use crate::fabric::{Codecs, Endpoint, Limits, limits::multiprocessors};
use crate::gang::{EnteringScopes, GpuOrder, Queue, Quiescence};
use crate::memory::{DeviceHandle, PinnedPool, cache::Settings};
use crate::pool::{GpuPool, trace};
use crate::sync::{Gate, unique_id};
use crate::thread::{wait, worker};
use crate::{collective::transfer, panics, timeline::Timeline};
use once_cell::sync::OnceCell;
use std::{
    panic::Location,
    sync::{Arc, mpsc},
    time::Duration,
};

/// A wait fails after this time without progress of the gang.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(120);
/// If operations run one at a time, the buffers and streams for staged copies of a pool of at most this many software
/// GPUs are made when the pool is built. Else the streams' numbers would depend on which thread copies first.
const STAGED_AT_BUILD: usize = 16;

impl Builder {
    #[track_caller]
    pub(crate) fn with_drivers(mut self, drivers: Vec<DriverRef>) -> Result<GpuPool> {
        let count = drivers.len();
        // The pool that measures is of this process alone: a cluster can be joined once.
        let joins_later = self.cluster.take_if(|_| matches!(self.weights, Weights::Measured));
        let weights = match &self.weights {
            Weights::Given(weights) => Some(valid_weights(weights, count)?),
            Weights::Even | Weights::Measured => None,
        };
        panics::note_places();
        let deadline = self.timeout.unwrap_or(DEFAULT_DEADLINE);
        let id = unique_id();
        let audit = self.memory.audit || self.observer.as_ref().is_some_and(|observer| observer.audits_memory());
        let memory = Settings { deadline, devices: count, audit, ..self.memory.clone() };
        let seats = share::seats(drivers.iter().map(|driver| driver.info().uuid));
        let gpu_order: Vec<_> =
            drivers.iter().zip(&seats).map(|(driver, seat)| GpuOrder::of(driver.info().uuid, seat.place)).collect();
        let handle = |(i, driver): (usize, DriverRef)| {
            let progress = gpu_order[i].progress.clone();
            Arc::new(DeviceHandle::new(id, i, driver, progress, seats[i].sharers, self.observer.clone()))
        };
        let handles: Vec<_> = drivers.iter().cloned().enumerate().map(handle).collect();
        self.check_memory(&handles)?;
        // After all that this process alone can get wrong: the others would lose it.
        let world = self.cluster.as_ref().map(|cluster| cluster.connect(&drivers)).transpose()?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let computed = host::is_stepped(&*handles[0].driver) || host::virtual_now(&*handles[0].driver).is_some();
        let queues: Vec<_> = (0..count).map(|_| Queue::new()).collect();
        let quiescence = queues
            .iter()
            .zip(&gpu_order)
            .map(|(queue, gpu_order)| Quiescence::new(queue.waker().clone(), gpu_order.clone()));
        let quiescence: Vec<_> = quiescence.collect();
        let entering = Arc::<EnteringScopes>::default();
        for (handle, quiescence) in handles.iter().zip(&quiescence) {
            host::attend(&*handle.driver, &(quiescence.clone() as Arc<dyn host::Attendee>));
        }
        host::attend(&*handles[0].driver, &(entering.clone() as Arc<dyn host::Attendee>));
        let shared = Arc::new(worker::Shared {
            pid: std::process::id(),
            wakers: queues.iter().map(|queue| queue.waker().clone()).collect(),
            queues,
            gpu_order,
            quiescence,
            entering,
            owners: (0..count).map(|_| OnceCell::new()).collect(),
            pinned: PinnedPool::new(&handles, &memory)?,
            weights,
            modules: crate::kernel::builtin::MODULES.into_iter().chain(self.modules.iter().copied()).collect(),
            memory,
            deadline,
            algorithm: self.algorithm.unwrap_or_default(),
            reduce_order: self.reduce_order,
            register_buckets: self.register_buckets.unwrap_or(false),
            numa_affinity: !self.roams,
            staged: self.staged,
            polls: polls(cores, count, computed),
            linger: wait::linger(cores, count, computed),
            recorder: self.recorder(&handles, world.as_ref())?,
            copy_threads: copy_threads(cores, count, host::is_stepped(&*handles[0].driver)),
            gate: Gate::new(),
            limits: Limits::new(multiprocessors(&handles)),
            peers: OnceCell::new(),
            signals: OnceCell::new(),
            cleaner: Default::default(),
            codecs: match &world {
                Some(_) => transfer::known().with(&self.codecs),
                None => Codecs::default(),
            },
            world,
            timeline: Timeline::default(),
            stages: Default::default(),
            proxy_streams: Default::default(),
            threads: Default::default(),
            handles,
        });
        let (opened, openings) = mpsc::channel();
        let pool = GpuPool { shared: shared.clone() };
        for (device, endpoint) in Endpoint::all(count).into_iter().enumerate() {
            let thread = worker::start(&shared, device, endpoint, opened.clone(), Location::caller())?;
            shared.threads.lock().push(thread);
        }
        drop(opened);
        // If one device fails, the pool is dropped here, which stops the others.
        let opened = openings.iter().collect::<Result<Vec<()>>>()?;
        if opened.len() < count {
            // A thread has panicked before its first message: `close` returns the panic.
            pool.close()?;
            return Err(Error::Closed);
        }
        let peers = crate::builder::probe::peers(&pool, self.staged)?;
        shared.peers.set(peers).map_err(|_| Error::Closed)?;
        if let Some(pad) = signal_pad::set_up(&pool)? {
            shared.signals.set(pad).map_err(|_| Error::Closed)?;
        }
        if host::is_stepped(&*shared.handles[0].driver) && count <= STAGED_AT_BUILD {
            let pairs = (0..count * count).map(|pair| (pair / count, pair % count));
            pairs
                .filter(|&(from, to)| !shared.is_direct(from, to))
                .try_for_each(|(from, to)| shared.peer_staging(from, to).map(drop))?;
        }
        if !matches!(self.weights, Weights::Measured) {
            if let Some(path) = &self.trace {
                trace::start_for_life(&shared, path, OpSite::place())?;
            }
            return Ok(pool);
        }
        let here = OpSite::here("build");
        let weights = crate::builder::probe::speeds(&pool)?;
        drop(here);
        let drivers = shared.handles.iter().map(|handle| handle.driver.clone()).collect();
        pool.close()?;
        Builder { weights: Weights::Given(weights), cluster: joins_later, ..self }.with_drivers(drivers)
    }
}

/// How often a member polls for a message before it waits. Many times only if there are two cores per device thread.
/// Never with virtual time or with one operation at a time, so that members get messages in one order.
fn polls(cores: usize, devices: usize, computed: bool) -> usize {
    match computed {
        true => 0,
        false if cores < 2 * devices => 1,
        false => 2000,
    }
}

/// The number of threads that copy a large slice. One if operations run one at a time: otherwise the order of
/// operations would depend on the threads' speeds and on the number of cores.
fn copy_threads(cores: usize, devices: usize, stepped: bool) -> usize {
    if stepped { 1 } else { (cores / devices / 2).clamp(1, 4) }
}

#[track_caller]
fn valid_weights(weights: &[f64], devices: usize) -> Result<Arc<[f64]>> {
    invalid_if!(weights.len() != devices, "weights", "{} weights for {devices} devices", weights.len());
    match weights.iter().find(|w| !(w.is_finite() && **w > 0.0)) {
        Some(w) => Err(Error::invalid("weights", format_args!("{w} is not a positive number"))),
        None => Ok(weights.into()),
    }
}

#[cfg(test)]
#[path = "../../tests/unit/builder/open_tests.rs"]
mod tests;
