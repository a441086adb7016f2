//! Further streams of a device, and waiting for a stream.

use crate::{
    Device, Stream,
    error::{Error, Result},
    thread::worker::PooledStream,
};

impl Device {
    /// A further stream. Give it back by dropping it; the scope waits for its work in any case.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn stream(&self) -> Result<Stream> {
        self.stream_with_priority(0)
    }

    /// [`stream`](Self::stream) whose work goes before that of streams with a higher number, where both wait for the
    /// device's processors; 0 is what other streams have. What a GPU does not distinguish (an H200: below -5, above 0)
    /// is the nearest that it does.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    #[track_caller]
    pub fn stream_with_priority(&self, priority: i32) -> Result<Stream> {
        self.not_in_graph("stream")?;
        self.check()?;
        let PooledStream { core, held, .. } = self.worker.stream(priority)?;
        Ok(Stream { core, _held: held })
    }

    /// The host waits for all work of the current stream. After `Ok` every collective of it has done what it should.
    ///
    /// # Errors
    /// [`Error::Timeout`] when it does not complete within the pool's deadline, [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let op = self.op("synchronize")?;
        let gang = &self.session.gang;
        let idle = self.stream.wait_idle(op.name, self.worker.shared.deadline, || gang.is_aborted());
        // A peer's failure is the reason, not the deadline.
        idle.map_err(|e| if matches!(e, Error::Timeout { .. }) { self.check().err().unwrap_or(e) } else { e })?;
        self.check()
    }
}
