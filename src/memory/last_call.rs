//! The last call that a device's thread has made in the program, for reports of hangs.
//!
//! The device's thread notes each call; a thread that waits for the device reads it.
//!
//! Invariant: each [`Mirror`] here has one writer, so a reader gets the words of one call, never of two.

use crate::{
    error::{Site, op_site::OpSite},
    sync::Mirror,
};
use std::{marker::PhantomData, panic::Location, ptr, slice, str, sync::Arc};

/// Address and length of the operation's name, and the address of its place. All zero before the first call.
type Words = Mirror<3>;

/// The device thread's side. There is one per [`LastCall`], and it stays on its thread, so there is one writer.
pub(crate) struct CallLog {
    words: Arc<Words>,
    stays: PhantomData<*const ()>,
}

#[derive(Debug)]
pub(crate) struct LastCall(Arc<Words>);

pub(crate) fn new() -> (CallLog, LastCall) {
    let words = Arc::new(Words::new());
    (CallLog { words: words.clone(), stays: PhantomData }, LastCall(words))
}

impl CallLog {
    /// Notes a call. Within another call of the program that is known, it notes that one. It costs plain stores.
    #[inline]
    pub fn note(&self, op: &'static str, site: Site) {
        let OpSite { op, site } = OpSite::current().unwrap_or(OpSite { op, site });
        let word = |address: usize| address as u64;
        let place = word(ptr::from_ref(site).expose_provenance());
        self.words.write([word(op.as_ptr().expose_provenance()), op.len() as u64, place]);
    }
}

impl LastCall {
    pub fn get(&self) -> Option<(&'static str, Site)> {
        let [op, len, site] = self.0.read().map(|word| word as usize);
        if site == 0 {
            return None;
        }
        // SAFETY: the words are those of one `note` (one writer), so they are the parts of these references, which are
        // `'static` and whose provenance was exposed.
        unsafe {
            let op = slice::from_raw_parts(ptr::with_exposed_provenance(op), len);
            let site: *const Location<'static> = ptr::with_exposed_provenance(site);
            Some((str::from_utf8_unchecked(op), &*site))
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/memory/last_call_tests.rs"]
mod tests;
