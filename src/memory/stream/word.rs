//! Words in page-locked memory: each stream writes its progress into a word of its own.
//!
//! The stream writes a sequence number by a stream memory operation, behind the work that the number covers. A poll is
//! then a load instead of a `cudaEventQuery`, which takes a microsecond
//! ([cuda_event_benchmark](https://github.com/harrism/cuda_event_benchmark)).
//!
//! Invariant: a word outlives its stream, and its value only grows. The next stream counts from the previous one's last
//! value, and gets the word only when that value has arrived.

use crate::{driver::Address, memory::DeviceHandle};
use parking_lot::Mutex;

/// Bytes between two words. Each has a cache line, since different streams write them and different threads read them.
const STRIDE: usize = 64;
/// Words per device. Further streams use events.
const WORDS: usize = 64;

#[derive(Clone, Copy, Debug)]
pub(super) struct Word {
    pub(super) address: Address,
    base: u64,
}

impl Word {
    pub(super) fn value(self, sequence: u64) -> u64 {
        self.base.wrapping_add(sequence)
    }

    pub(super) fn sequence(self, value: u64) -> u64 {
        let past = value.wrapping_sub(self.base);
        // The last write of the previous stream may still be on its way. The difference is negative then.
        if past.cast_signed() < 0 { 0 } else { past }
    }
}

#[derive(Default)]
pub(crate) struct Words(Mutex<Option<Page>>);

struct Page {
    address: Address,
    used: usize,
    /// Words that came back. Each has the last written value as its base.
    spare: Vec<Word>,
}

impl Words {
    /// A word for a new stream. Best effort: None if the device cannot write it or memory is short.
    pub(super) fn take(&self, handle: &DeviceHandle) -> Option<Word> {
        if !handle.driver.info().stream_values {
            return None;
        }
        let mut page = self.0.lock();
        if page.is_none() {
            let memory = handle.driver.host_alloc(STRIDE * WORDS).ok()?;
            *page = Some(Page { address: memory.expose_provenance() as Address, used: 0, spare: Vec::new() });
        }
        let page = page.as_mut()?;
        if let Some(at) = page.spare.iter().position(|word| word.has_last_write_arrived(handle)) {
            return Some(page.spare.swap_remove(at));
        }
        if page.used == WORDS {
            return None;
        }
        page.used += 1;
        Some(Word { address: page.address + (STRIDE * (page.used - 1)) as u64, base: 0 })
    }

    /// Takes the word of a stream that is gone, whose writes end with the one behind operation `published`.
    pub(super) fn give(&self, word: Word, published: u64) {
        if let Some(page) = self.0.lock().as_mut() {
            page.spare.push(Word { base: word.value(published), ..word });
        }
    }

    /// Gives the page back; all streams are gone. If the last write of one of them has not arrived, the page is leaked:
    /// memory must not be freed under a write.
    pub(crate) fn end(&mut self, handle: &DeviceHandle) {
        let Some(page) = self.0.get_mut().take() else { return };
        let at_rest =
            page.spare.len() == page.used && page.spare.iter().all(|word| word.has_last_write_arrived(handle));
        if !at_rest {
            event!(debug, "completion_words_leaked", device = handle.device, "a page of completion words was leaked");
            return;
        }
        let memory = std::ptr::with_exposed_provenance_mut(page.address as usize);
        // SAFETY: the memory is from `host_alloc` of this device, and the last write of each used word has arrived.
        if let Err(fault) = unsafe { handle.driver.host_free(memory) } {
            event!(
                debug, "completion_words_leaked", device = handle.device, %fault,
                "a page of completion words could not be given back"
            );
        }
    }
}

impl Word {
    /// Whether the last write of the previous stream has arrived: to a checker, the next stream comes after it.
    fn has_last_write_arrived(self, handle: &DeviceHandle) -> bool {
        // SAFETY: an aligned word of a page that lives as long as the handle.
        unsafe { handle.driver.poll_value(self.address) == self.base }
    }
}
