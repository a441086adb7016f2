//! Collectives that use page-locked memory of the host and may not be over yet. A host thread may run far ahead of its
//! device, and each of its calls would take such memory. Invariant: at most [`AHEAD`] calls of a device hold it.

use crate::{
    error::{Error, Result},
    gang::Gang,
    memory::StreamCore,
};
use std::{cell::RefCell, collections::VecDeque, sync::Arc, time::Duration};

const AHEAD: usize = 4;

/// The streams of such calls, each with the number of its last operation.
#[derive(Default)]
pub(crate) struct InFlight(RefCell<VecDeque<(Arc<StreamCore>, u64)>>);

impl InFlight {
    /// Waits until there is room for one more call. Fails with the gang, or when nothing completes for `deadline`.
    pub(crate) fn room(&self, name: &'static str, deadline: Duration, gang: &Gang) -> Result<()> {
        while self.0.borrow().len() >= AHEAD {
            let (stream, last) = self.0.borrow_mut().pop_front().expect("there are some");
            let waited = stream.wait_host_unless(name, last, deadline, &|| gang.is_aborted());
            // A peer's failure is the reason, not the deadline.
            waited.map_err(|e| if matches!(e, Error::Timeout { .. }) { gang.aborted().unwrap_or(e) } else { e })?;
        }
        Ok(())
    }

    pub(crate) fn note(&self, stream: &Arc<StreamCore>) {
        self.0.borrow_mut().push_back((stream.clone(), stream.submitted()));
    }
}
