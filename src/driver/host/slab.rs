//! A table whose keys are never mistaken: a stale key, or one of another machine, finds nothing.

/// `tag` (16 bits), generation (24), index (24).
pub(super) type Key = u64;

const BITS: u32 = 24;
const MASK: u64 = (1 << BITS) - 1;

pub(super) struct Slab<T> {
    tag: u64,
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

struct Slot<T> {
    key: Key,
    value: Option<T>,
}

impl<T> Slab<T> {
    /// A table whose keys differ from those of tables with another `tag` (modulo 2^16).
    pub fn new(tag: u64) -> Self {
        Slab { tag: tag << (2 * BITS), slots: Vec::new(), free: Vec::new() }
    }

    pub fn insert(&mut self, value: T) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { key: self.tag | self.slots.len() as u64, value: None });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        let generation = (slot.key >> BITS).wrapping_add(1) & MASK;
        slot.key = self.tag | generation << BITS | index as u64;
        slot.value = Some(value);
        slot.key
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
        self.free.push(index);
        Some(value)
    }

    /// The keys of all entries.
    pub fn keys(&self) -> Vec<Key> {
        self.slots.iter().filter(|slot| slot.value.is_some()).map(|slot| slot.key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_foreign_keys_find_nothing() {
        let (mut a, mut b) = (Slab::new(1), Slab::new(2));
        let old = a.insert('x');
        assert_eq!(a.remove(old), Some('x'));
        let new = a.insert('y');
        assert_eq!(a.remove(old), None);
        assert_eq!((a.get(old), a.get(new)), (None, Some(&'y')));
        assert_eq!(b.get(new), None);
        let foreign = b.insert('z');
        assert_eq!(a.get(foreign), None);
        assert_eq!(a.get(u64::MAX), None);
    }
}
