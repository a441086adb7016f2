//! Messages from one process: those that are awaited, and those that came first.

use super::{BUDGET, Call, Header, failure};
use crate::runtime::sync::byte_ring::{Corrupt, Mapped, Reader};
use crate::traits::Tag;
use gpu_pool::{Error, Result};
use std::{
    collections::{HashMap, VecDeque},
    mem, slice,
    sync::Arc,
    time::{Duration, Instant},
};

/// Messages with one tag come and are received in the same order: a tag has either messages or receivers, never both.
#[derive(Default)]
pub(super) struct Inbox {
    peer: usize,
    /// None from this process itself.
    ring: Option<Reader<Mapped>>,
    header: Header,
    /// Bytes of the header that are read.
    read: usize,
    /// Since when the header's message waits in the ring for its receiver.
    since: Option<Instant>,
    /// The message whose bytes come now.
    coming: Option<Coming>,
    awaited: HashMap<Tag, VecDeque<Receiver>>,
    early: HashMap<Tag, VecDeque<Vec<u8>>>,
    failed: Option<Error>,
}

struct Receiver {
    at: *mut u8,
    len: usize,
    call: Arc<Call>,
}

// SAFETY: the bytes are the message's own until it is done (`Inbox::post`), so any thread may write them.
unsafe impl Send for Receiver {}

struct Coming {
    header: Header,
    got: usize,
    to: Target,
}

enum Target {
    Receiver(Receiver),
    /// None has been posted. Grows to the header's length.
    Early(Vec<u8>),
}

/// Of an early message, bytes that are read at once.
const STEP: usize = 64 << 10;

/// A message of more than a [`STEP`] that is not awaited stays in the ring for so long: mostly its receiver is just a
/// bit late, and early bytes cost fresh memory and a copy more. Not longer, since other messages wait behind it.
const LATE: Duration = Duration::from_millis(1);

impl Inbox {
    pub(super) fn new(peer: usize, ring: Option<Reader<Mapped>>) -> Self {
        Inbox { peer, ring, ..Inbox::default() }
    }

    /// Awaits a message.
    ///
    /// # Safety
    /// The bytes live, and nothing else touches them, until the call has one message more that is done.
    pub(super) unsafe fn post(&mut self, tag: Tag, at: *mut u8, len: usize, call: &Arc<Call>) {
        let receiver = Receiver { at, len, call: call.clone() };
        if let Some(bytes) = take(&mut self.early, tag) {
            receiver.fill(&bytes);
        } else if let Some(error) = &self.failed {
            receiver.call.finish(Err(error.clone()));
        } else if let Some(to) = self.coming_early(tag, len) {
            if let Target::Early(bytes) = mem::replace(to, Target::Receiver(receiver)) {
                // SAFETY: the caller's promise; there are no more bytes than the message has.
                unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            }
        } else {
            self.awaited.entry(tag).or_default().push_back(receiver);
        }
    }

    /// Where the message that comes now goes, if that is to the heap, and it is the next one of this tag and length.
    fn coming_early(&mut self, tag: Tag, len: usize) -> Option<&mut Target> {
        let Coming { header, to, .. } = self.coming.as_mut()?;
        let next = *header == Header::new(tag, len) && !self.awaited.contains_key(&tag);
        (next && matches!(to, Target::Early(_))).then_some(to)
    }

    /// A message of this process to itself.
    ///
    /// # Safety
    /// There are `header.len()` bytes, which no thread writes during the call.
    pub(super) unsafe fn deliver(&mut self, header: Header, at: *const u8) -> Result<()> {
        // SAFETY: the caller's promise. The address of no bytes may be any but null, as a slice's is.
        let bytes = unsafe { slice::from_raw_parts(at, header.len()) };
        match take(&mut self.awaited, header.tag) {
            Some(receiver) => receiver.fill(bytes),
            None => {
                let mut early = room(bytes.len())?;
                early.extend_from_slice(bytes);
                self.early.entry(header.tag).or_default().push_back(early);
            }
        }
        Ok(())
    }

    /// Reads what is there, up to some [`BUDGET`]. Whether that was anything.
    pub(super) fn carry(&mut self) -> bool {
        if self.failed.is_some() {
            return false;
        }
        match self.read_all() {
            Ok(progress) => progress,
            Err(error) => {
                let coming = self.coming.take().and_then(|coming| match coming.to {
                    Target::Receiver(receiver) => Some(receiver),
                    Target::Early(_) => None,
                });
                let waiting = self.awaited.drain().flat_map(|(_, receivers)| receivers);
                waiting.chain(coming).for_each(|receiver| receiver.call.finish(Err(error.clone())));
                self.failed = Some(error);
                true
            }
        }
    }

    fn read_all(&mut self) -> Result<bool> {
        let Some(ring) = &mut self.ring else { return Ok(false) };
        let peer = self.peer;
        let broken = |Corrupt| failure("receive", format!("host {peer} has broken the ring"));
        let mut carried = 0;
        while carried < BUDGET {
            let Some(coming) = &mut self.coming else {
                let header = bytemuck::bytes_of_mut(&mut self.header);
                let n = ring.read(&mut header[self.read..]).map_err(broken)?;
                carried += n;
                self.read += n;
                if self.read < Header::BYTES {
                    return Ok(carried > 0);
                }
                let header = self.header;
                if !self.awaited.contains_key(&header.tag) {
                    let first = self.since.is_none();
                    let late = self.since.get_or_insert_with(Instant::now).elapsed() >= LATE;
                    // The caller may have had its last message.
                    if first || header.len() > STEP && !late {
                        return Ok(carried > 0);
                    }
                }
                (self.read, self.since) = (0, None);
                let to = match take(&mut self.awaited, header.tag) {
                    Some(receiver) if receiver.len == header.len() => Target::Receiver(receiver),
                    Some(receiver) => {
                        let error = receiver.mismatch(header.len());
                        receiver.call.finish(Err(error.clone()));
                        return Err(error);
                    }
                    None => Target::Early(room(header.len())?),
                };
                self.coming = Some(Coming { header, got: 0, to });
                continue;
            };
            while coming.got < coming.header.len() && carried < BUDGET {
                let left = (coming.header.len() - coming.got).min(BUDGET);
                let n = match &mut coming.to {
                    // SAFETY: the promise of `post`; the receiver's length is the header's.
                    Target::Receiver(receiver) => unsafe {
                        ring.read(slice::from_raw_parts_mut(receiver.at.add(coming.got), left)).map_err(broken)?
                    },
                    Target::Early(bytes) => {
                        let end = coming.got + left.min(STEP);
                        // Its room is reserved.
                        bytes.resize(end, 0);
                        ring.read(&mut bytes[coming.got..end]).map_err(broken)?
                    }
                };
                if n == 0 {
                    return Ok(carried > 0);
                }
                carried += n;
                coming.got += n;
            }
            if let Some(Coming { header, to, .. }) = self.coming.take_if(|coming| coming.got == coming.header.len()) {
                match to {
                    Target::Receiver(receiver) => receiver.call.finish(Ok(())),
                    Target::Early(bytes) => match take(&mut self.awaited, header.tag) {
                        // It was posted while the bytes came.
                        Some(receiver) => receiver.fill(&bytes),
                        None => self.early.entry(header.tag).or_default().push_back(bytes),
                    },
                }
            }
        }
        Ok(carried > 0)
    }
}

impl Receiver {
    /// Takes a whole message.
    fn fill(self, bytes: &[u8]) {
        if bytes.len() != self.len {
            return self.call.finish(Err(self.mismatch(bytes.len())));
        }
        // SAFETY: the promise of `Inbox::post`; the lengths are equal.
        unsafe { self.at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.call.finish(Ok(()));
    }

    fn mismatch(&self, len: usize) -> Error {
        failure("receive", format!("a message has {len} bytes where {} are expected", self.len))
    }
}

/// The first of a tag. A tag without any takes no room.
fn take<T>(map: &mut HashMap<Tag, VecDeque<T>>, tag: Tag) -> Option<T> {
    let all = map.get_mut(&tag)?;
    let first = all.pop_front();
    if all.is_empty() {
        map.remove(&tag);
    }
    first
}

/// Room for a message whose length another process has told.
fn room(len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| failure("receive", format!("no room for a message of {len} bytes")))?;
    Ok(bytes)
}
