//! Events: recorded on the current stream, and waited for by it.

use crate::{
    Device, Event,
    error::{Error, Result, op_site::OpSite},
};

/// Events: order and times.
impl Device {
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

    /// All later work of the current stream waits, on the device, for the event. The event may belong to any device of
    /// the pool.
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
    #[track_caller]
    fn recorded(&self, op: &'static str, timed: bool) -> Result<Event> {
        let _here = OpSite::here(op);
        self.not_in_graph(op)?;
        self.check()?;
        Event::record(&self.stream, op, timed)
    }
}
