//! Streams of a device besides its main stream, and waiting for a stream on the host.

use crate::{
    Device, Stream,
    error::{Error, Result, op_site::OpSite},
    thread::streams::PooledStream,
};

/// Streams.
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
}
