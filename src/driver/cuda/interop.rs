//! The low-level part of the cudarc interop: this device's primary context and its streams as cudarc's types.

use std::{collections::HashMap, sync::Arc};

use cudarc::driver::{CudaContext, CudaStream, DriverError};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::{CudaGpu, stream::stream};
use crate::driver::{DriverResult, Fault, RawStream};

#[derive(Default)]
pub(super) struct Interop {
    context: OnceCell<Arc<CudaContext>>,
    /// A stream that cudarc has made, and that no code uses. cudarc orders its slices between streams only while it has
    /// made a stream itself; borrowed streams, like ours, do not count.
    second: OnceCell<Arc<CudaStream>>,
    streams: Mutex<HashMap<RawStream, Arc<CudaStream>>>,
}

impl Interop {
    /// True if safe code still holds cudarc's object for the stream: then the stream must stay.
    pub(super) fn forget(&self, s: RawStream) -> bool {
        let made = self.streams.lock().remove(&s);
        made.is_some_and(|stream| Arc::strong_count(&stream) > 1)
    }

    /// Streams first.
    pub(super) fn clear(&mut self) {
        self.streams.get_mut().clear();
        self.second.take();
        self.context.take();
    }
}

impl CudaGpu {
    /// cudarc's object for the same primary context, made at the first call; it retains the context by itself. Event
    /// tracking stays on. Without it, safe code that makes streams and slices with this context could race, so only an
    /// `unsafe` block of the caller may turn it off.
    pub fn cudarc_context(&self) -> DriverResult<Arc<CudaContext>> {
        self.enter()?;
        let make = || CudaContext::new(self.info.ordinal);
        let context = self.interop.context.get_or_try_init(make).map_err(|e| self.cudarc_fault(e))?;
        self.interop.second.get_or_try_init(|| context.new_stream()).map_err(|e| self.cudarc_fault(e))?;
        Ok(context.clone())
    }

    /// Uses only the code: cudarc's error would ask the library for a text.
    fn cudarc_fault(&self, e: DriverError) -> Fault {
        self.check(e.0).err().unwrap_or_else(|| super::fault::fault(999, ""))
    }

    /// cudarc's object for a stream of this device, one per stream. Dropping it does not destroy the stream.
    ///
    /// # Safety
    /// `s` is a live stream of this device. It is not destroyed while a clone of the result exists.
    pub unsafe fn cudarc_stream(&self, s: RawStream) -> DriverResult<Arc<CudaStream>> {
        let context = self.cudarc_context()?;
        let mut streams = self.interop.streams.lock();
        let made = streams.entry(s).or_insert_with(|| {
            // SAFETY: the caller's promise; the context is the same primary context.
            unsafe { context.wrap_borrowed_stream(stream(s)) }
        });
        Ok(made.clone())
    }
}
