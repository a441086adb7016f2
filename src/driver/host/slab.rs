//! A table for streams, events and other handles. Invariant: a stale key, or a key of another machine, finds nothing.

use super::fault;
use crate::driver::DriverResult;

/// `tag` (16 bits), generation (24), index (24).
pub(super) type Key = u64;

const BITS: u32 = 24;
const MASK: u64 = (1 << BITS) - 1;

pub(super) struct Slab<T> {
    tag: u64,
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
    live: usize,
    most: usize,
}

struct Slot<T> {
    key: Key,
    value: Option<T>,
}

impl<T> Slab<T> {
    /// Keys differ from those of tables with another `tag` (modulo 2^16).
    pub fn new(tag: u64) -> Self {
        Slab { tag: tag << (2 * BITS), slots: Vec::new(), free: Vec::new(), live: 0, most: 1 << BITS }
    }

    pub fn insert(&mut self, value: T) -> DriverResult<Key> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() >= self.most => {
                return Err(fault::exhausted(format!("there are {} handles of this kind", self.live)));
            }
            None => {
                self.slots.push(Slot { key: self.tag | self.slots.len() as u64, value: None });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[index];
        slot.key += 1 << BITS;
        slot.value = Some(value);
        self.live += 1;
        Ok(slot.key)
    }

    fn slot(&self, key: Key) -> Option<usize> {
        let index = (key & MASK) as usize;
        (self.slots.get(index)?.key == key).then_some(index)
    }

    pub fn get(&self, key: Key) -> Option<&T> {
        self.slots[self.slot(key)?].value.as_ref()
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let index = self.slot(key)?;
        self.slots[index].value.as_mut()
    }

    pub fn remove(&mut self, key: Key) -> Option<T> {
        let index = self.slot(key)?;
        let value = self.slots[index].value.take()?;
        self.live -= 1;
        // After the last generation the slot is not used again: its first keys would be valid again.
        if key >> BITS & MASK < MASK {
            self.free.push(index);
        }
        Some(value)
    }

    pub fn len(&self) -> usize {
        self.live
    }

    pub fn keys(&self) -> Vec<Key> {
        self.slots.iter().filter(|slot| slot.value.is_some()).map(|slot| slot.key).collect()
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/host/slab_tests.rs"]
mod tests;
