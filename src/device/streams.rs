//! Streams of a device besides its main stream, host waits for a stream, events, and the user's own driver calls.

use crate::{
    Device, Event, Stream,
    error::{Error, Result, op_site::OpSite},
    thread::streams::PooledStream,
};

impl Device {
    /// A stream besides the main one. Drop it to give it back. The scope waits for its work in any case.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn stream(&self) -> Result<Stream> {
        let _here = OpSite::here("stream");
        self.stream_with_priority(0)
    }

    /// [`stream`](Self::stream) with a priority: if work of several streams waits for the device's processors, streams
    /// with lower numbers go first. Other streams have priority 0. A priority that the GPU does not support is replaced
    /// by the nearest one that it does (an H200 supports -5 to 0).
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    #[track_caller]
    pub fn stream_with_priority(&self, priority: i32) -> Result<Stream> {
        let _here = OpSite::here("stream_with_priority");
        self.not_in_graph("stream_with_priority")?;
        self.check()?;
        let PooledStream { core, held, .. } = self.worker.stream(priority)?;
        Ok(Stream { core, _held: held })
    }

    /// The host waits for all work of the current stream. After `Ok` the results of all its collectives are complete.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the work does not complete within the pool's deadline, [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let op = self.op("synchronize")?;
        let gang = &self.session.gang;
        let idle = self.stream.wait_idle(op.name, self.worker.shared.deadline, || gang.is_aborted());
        // If a peer has failed, that is the cause, not the deadline.
        idle.map_err(|e| if matches!(e, Error::Timeout { .. }) { self.check().err().unwrap_or(e) } else { e })?;
        self.check()
    }

    /// Records an event: it marks this point in the current stream's work.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn record(&self) -> Result<Event> {
        self.recorded("record", false)
    }

    /// [`record`](Self::record) with the time at which the device reaches the event.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn record_timed(&self) -> Result<Event> {
        self.recorded("record_timed", true)
    }

    /// All later work of the current stream waits on the device for the event. It may belong to any device of the pool.
    ///
    /// # Errors
    /// [`Error::WrongPool`] for an event of another pool, [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn wait(&self, event: &Event) -> Result<()> {
        let op = self.op("wait")?;
        fail_if!(event.0.stream.handle.pool != self.worker.handle.pool, Error::wrong_pool("wait", self.index()));
        self.stream.wait_event("wait", event.0.raw, &event.0.stream, event.0.covered)?;
        op.submitted();
        Ok(())
    }

    /// Waits **on the host** for the event, and not for work of its stream that comes later.
    ///
    /// # Errors
    /// [`Error::WrongPool`] for an event of another pool, [`Error::Timeout`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn wait_on_host(&self, event: &Event) -> Result<()> {
        let op = self.op("wait_on_host")?;
        fail_if!(event.0.stream.handle.pool != self.worker.handle.pool, Error::wrong_pool(op.name, self.index()));
        let gang = &self.session.gang;
        event.wait_host(op.name, self.worker.shared.deadline, &|| gang.is_aborted())?;
        self.check()
    }

    #[track_caller]
    fn recorded(&self, op: &'static str, timed: bool) -> Result<Event> {
        let _here = OpSite::here(op);
        self.not_in_graph(op)?;
        self.check()?;
        Event::record(&self.stream, op, timed)
    }

    /// Runs `f`, which may make driver calls that wait for running kernels: calls that allocate, free, map or register
    /// memory, load modules, instantiate graphs, set up cuBLAS or cuDNN, or call a function of theirs the first time.
    ///
    /// CUDA makes such calls under a lock that launches need, too, and kernels of collectives wait for each other on
    /// the devices. So the call and the kernels could wait for each other for ever (nccl#744). Within `blocking` such
    /// calls and collectives take turns. The crate's own driver calls take turns without it.
    ///
    /// `dev.blocking(|| context.load_module(ptx))`, for example.
    ///
    /// A collective within `f` is [`Error::InvalidArgument`] if its kernels would wait for each other.
    pub fn blocking<R>(&self, f: impl FnOnce() -> R) -> R {
        #[cfg(feature = "cuda")]
        let _guard = (!self.worker.is_software()).then(crate::driver::gate::blocking);
        let _blocked = self.worker.barrier_state.block();
        f()
    }
}
