//! The streams of a device besides its main stream.
//!
//! The worker owns a [`Streams`]. Programs take streams from it ([`Device::stream`](crate::Device::stream)), and so do
//! collectives that overlap copies.
//!
//! Invariant: a stream is never destroyed while its pool lives. Memory and events that name a stream do not hold it,
//! since its operations are numbered on without end.

use crate::{
    driver::{DriverResult, RawStream},
    error::{Error, Result},
    memory::{DeviceHandle, StreamCore},
};
use once_cell::unsync::OnceCell;
use std::{
    cell::{Ref, RefCell},
    rc::Rc,
    sync::Arc,
};

/// If a device has this many streams, a stream is handed out again even if it still has work.
const MANY_STREAMS: usize = 32;

/// A stream of the pool. It is free when only the pool has `held`.
#[derive(Clone)]
pub(crate) struct PooledStream {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) held: Rc<()>,
    priority: i32,
}

#[derive(Default)]
pub(crate) struct Streams {
    all: RefCell<Vec<PooledStream>>,
    engines: OnceCell<[PooledStream; 2]>,
}

impl Streams {
    /// A free stream, if one is idle or if there are many; else a new one.
    pub(super) fn take(&self, handle: &Arc<DeviceHandle>, priority: i32) -> Result<PooledStream> {
        let mut streams = self.all.borrow_mut();
        // If operations run one at a time, nothing may depend on which streams happen to be idle. What goes first, the
        // collectives beside other work, is in order anyway.
        let any = handle.stepped || priority < 0 || streams.len() >= MANY_STREAMS;
        let is_idle = |core: &StreamCore| core.is_over(core.submitted());
        let spare = |pooled: &&PooledStream| {
            !pooled.core.adopted
                && pooled.priority == priority
                && Rc::strong_count(&pooled.held) == 1
                && (any || is_idle(&pooled.core))
        };
        if let Some(spare) = streams.iter().find(spare) {
            return Ok(spare.clone());
        }
        let core = StreamCore::with_priority(handle, "stream", priority)?;
        let pooled = PooledStream { core, held: Rc::new(()), priority };
        streams.push(pooled.clone());
        Ok(pooled)
    }

    /// The stream of other code with this handle. The device has it from then on.
    ///
    /// # Safety
    /// The stream is live until the pool has ended, and nothing names its operations any more.
    pub(super) unsafe fn adopt(&self, handle: &Arc<DeviceHandle>, raw: RawStream) -> DriverResult<PooledStream> {
        let mut streams = self.all.borrow_mut();
        if let Some(known) = streams.iter().find(|pooled| pooled.core.raw == raw) {
            return Ok(known.clone());
        }
        // SAFETY: the caller's promise.
        let core = unsafe { StreamCore::adopt(handle, raw)? };
        let pooled = PooledStream { core, held: Rc::new(()), priority: 0 };
        streams.push(pooled.clone());
        Ok(pooled)
    }

    /// Two streams for copies that overlap with each other and with the rest of a collective. Programs do not get them.
    pub(super) fn engines(&self, handle: &Arc<DeviceHandle>) -> Result<[Arc<StreamCore>; 2]> {
        let make = || Ok::<_, Error>([self.take(handle, 0)?, self.take(handle, 0)?]);
        let [a, b] = self.engines.get_or_try_init(make)?;
        Ok([a.core.clone(), b.core.clone()])
    }

    pub(super) fn all(&self) -> Ref<'_, [PooledStream]> {
        Ref::map(self.all.borrow(), Vec::as_slice)
    }
}
