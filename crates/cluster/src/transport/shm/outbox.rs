//! Messages that wait for room in the ring to one process, in their order.

use super::{BUDGET, Call, Header, failure};
use crate::runtime::sync::byte_ring::{Corrupt, Mapped, Writer};
use gpu_pool::Error;
use std::{collections::VecDeque, slice, sync::Arc};

pub(super) struct Outbox {
    /// None to this process itself.
    ring: Option<Writer<Mapped>>,
    waiting: VecDeque<Outgoing>,
    failed: Option<Error>,
}

struct Outgoing {
    header: Header,
    at: *const u8,
    /// Bytes of the header and of the message that are in the ring.
    written: usize,
    call: Arc<Call>,
}

// SAFETY: the bytes are the message's own until it is done (`Outbox::post`), so any thread may read them.
unsafe impl Send for Outgoing {}

impl Outbox {
    pub(super) fn new(ring: Option<Writer<Mapped>>) -> Self {
        Outbox { ring, waiting: VecDeque::new(), failed: None }
    }

    /// Adds a message.
    ///
    /// # Safety
    /// The bytes live, and no thread writes them, until the call has one message more that is done.
    pub(super) unsafe fn post(&mut self, header: Header, at: *const u8, call: &Arc<Call>) {
        if let Some(error) = &self.failed {
            return call.finish(Err(error.clone()));
        }
        self.waiting.push_back(Outgoing { header, at, written: 0, call: call.clone() });
    }

    /// Writes what there is room for, up to some [`BUDGET`]. Whether that was anything.
    pub(super) fn carry(&mut self) -> bool {
        let Some(ring) = &mut self.ring else { return false };
        let mut carried = 0;
        while let Some(first) = self.waiting.front_mut().filter(|_| carried < BUDGET) {
            match first.write(ring) {
                Ok(n) => carried += n,
                Err(Corrupt) => {
                    let error = failure("send", "the peer has broken the ring");
                    self.waiting.drain(..).for_each(|each| each.call.finish(Err(error.clone())));
                    self.failed = Some(error);
                    return true;
                }
            }
            if first.written < Header::BYTES + first.header.len() {
                break;
            }
            let done = self.waiting.pop_front();
            done.into_iter().for_each(|done| done.call.finish(Ok(())));
        }
        carried > 0
    }
}

impl Outgoing {
    fn write(&mut self, ring: &mut Writer<Mapped>) -> Result<usize, Corrupt> {
        let before = self.written;
        if before < Header::BYTES {
            self.written += ring.write(&bytemuck::bytes_of(&self.header)[before..])?;
        }
        if self.written >= Header::BYTES && self.header.len() > 0 {
            // SAFETY: the promise of `Outbox::post`.
            let bytes = unsafe { slice::from_raw_parts(self.at, self.header.len()) };
            let rest = &bytes[self.written - Header::BYTES..];
            self.written += ring.write(&rest[..rest.len().min(BUDGET)])?;
        }
        Ok(self.written - before)
    }
}
