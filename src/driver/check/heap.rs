//! Live memory: chunks from the driver, the blocks that a pool has cut from them, and which bytes have been written.
//!
//! A chunk without blocks is one buffer by itself. Once a block was handed out of a chunk, the blocks are the buffers,
//! and what lies in none of them is nobody's.

use super::{place::Place, ranges::Ranges};
use crate::driver::Address;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

/// Freed buffers that are remembered.
const REMEMBERED: usize = 10_000;
/// Freed buffers that a search looks at: they may overlap, and the right one is mostly among the nearest.
const NEAREST: usize = 64;

/// A buffer, as reports need it. One that is handed out anew at the same address is another one.
pub(super) struct Owned {
    pub range: Range<Address>,
    /// None for page-locked and managed memory.
    pub device: Option<usize>,
    pub by: Option<Place>,
    freed: Mutex<Option<Option<Place>>>,
}

impl Owned {
    fn new(range: Range<Address>, device: Option<usize>) -> Arc<Owned> {
        Arc::new(Owned { range, device, by: Place::current(), freed: Mutex::new(None) })
    }

    /// Whether it was freed, and where if that is known.
    pub fn freed(&self) -> Option<Option<Place>> {
        *self.freed.lock()
    }

    fn end(&self) {
        *self.freed.lock() = Some(Place::current());
    }
}

/// Which call memory came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Device(usize),
    Pinned,
    Managed,
}

struct Buffer {
    owned: Arc<Owned>,
    written: Ranges,
}

impl Buffer {
    fn new(owned: Arc<Owned>, zeroed: bool) -> Self {
        let written = if zeroed { Ranges::full(owned.range.clone()) } else { Ranges::default() };
        Buffer { owned, written }
    }
}

/// Memory from the driver.
pub(super) struct Chunk {
    source: Option<Source>,
    whole: Buffer,
    blocks: Option<BTreeMap<Address, Buffer>>,
}

/// What is at a range of addresses.
pub(super) enum Found {
    /// A live buffer holds it all.
    Live(Arc<Owned>),
    /// It was freed.
    Freed(Arc<Owned>),
    /// It is memory of the driver, but no live buffer holds all of it; the one that it starts in, if any.
    Stray(Arc<Owned>),
    /// The checker has not seen such memory.
    Unknown,
}

/// All memory.
#[derive(Default)]
pub(super) struct Heap {
    chunks: BTreeMap<Address, Chunk>,
    freed: BTreeMap<Address, Arc<Owned>>,
    order: VecDeque<Address>,
}

fn holding<T>(map: &BTreeMap<Address, T>, at: Address, end: impl Fn(&T) -> Address) -> Option<&T> {
    map.range(..=at).next_back().map(|(_, value)| value).filter(|value| end(value) > at)
}

impl Heap {
    /// Memory came from the driver.
    pub fn add(&mut self, range: Range<Address>, source: Source) {
        let device = if let Source::Device(device) = source { Some(device) } else { None };
        let whole = Buffer::new(Owned::new(range.clone(), device), device.is_none());
        self.chunks.insert(range.start, Chunk { source: Some(source), whole, blocks: None });
    }

    /// A block was handed out. Blocks at rest that overlap it are forgotten.
    pub fn hand_out(&mut self, range: Range<Address>, device: Option<usize>, zeroed: bool) {
        let owned = Owned::new(range.clone(), device);
        let known = holding(&self.chunks, range.start, |chunk| chunk.whole.owned.range.end);
        let start = known.map_or(range.start, |chunk| chunk.whole.owned.range.start);
        let chunk = self.chunks.entry(start).or_insert_with(|| Chunk {
            source: None,
            whole: Buffer::new(owned.clone(), zeroed),
            blocks: None,
        });
        let blocks = chunk.blocks.get_or_insert_default();
        while let Some((&start, last)) = blocks.range(..range.end).next_back()
            && last.owned.range.end > range.start
        {
            blocks.remove(&start);
        }
        blocks.insert(range.start, Buffer::new(owned, zeroed));
    }

    /// A block came back.
    pub fn take_back(&mut self, address: Address) {
        let chunk = self.chunks.range(..=address).next_back().map(|(_, chunk)| chunk);
        let block = chunk.and_then(|chunk| chunk.blocks.as_ref()?.get(&address));
        if let Some(block) = block {
            block.owned.end();
        }
    }

    /// Who holds a range.
    pub fn find(&self, range: &Range<Address>) -> Found {
        let Some(chunk) = holding(&self.chunks, range.start, |chunk| chunk.whole.owned.range.end) else {
            let near = self.freed.range(..=range.start).rev().take(NEAREST).map(|(_, owned)| owned);
            let mut near = near.filter(|owned| owned.range.end > range.start);
            return near.next().map_or(Found::Unknown, |owned| Found::Freed(owned.clone()));
        };
        let buffer = match &chunk.blocks {
            None => Some(&chunk.whole),
            Some(blocks) => holding(blocks, range.start, |block| block.owned.range.end),
        };
        match buffer.map(|buffer| &buffer.owned) {
            None => Found::Stray(chunk.whole.owned.clone()),
            Some(owned) if owned.freed().is_some() => Found::Freed(owned.clone()),
            Some(owned) if owned.range.end < range.end => Found::Stray(owned.clone()),
            Some(owned) => Found::Live(owned.clone()),
        }
    }

    fn buffer_mut(&mut self, at: Address) -> Option<&mut Buffer> {
        let (_, chunk) = self.chunks.range_mut(..=at).next_back()?;
        match &mut chunk.blocks {
            None => Some(&mut chunk.whole),
            Some(blocks) => blocks.range_mut(..=at).next_back().map(|(_, block)| block),
        }
    }

    /// Bytes of a live buffer are written.
    pub fn write(&mut self, range: Range<Address>) {
        if let Some(buffer) = self.buffer_mut(range.start).filter(|buffer| buffer.owned.range.end >= range.end) {
            buffer.written.add(range);
        }
    }

    /// The first bytes of a range of a live buffer that nobody has written.
    pub fn unwritten(&self, range: &Range<Address>) -> Option<Range<Address>> {
        let (_, chunk) = self.chunks.range(..=range.start).next_back()?;
        let buffer = match &chunk.blocks {
            None => &chunk.whole,
            Some(blocks) => blocks.range(..=range.start).next_back()?.1,
        };
        if buffer.owned.range.end < range.end { None } else { buffer.written.first_gap(range) }
    }

    /// The chunk that starts here, if it came from this call.
    pub fn chunk(&self, address: Address, source: Source) -> Option<Range<Address>> {
        let chunk = self.chunks.get(&address).filter(|chunk| chunk.source == Some(source))?;
        Some(chunk.whole.owned.range.clone())
    }

    /// The chunk that starts here, as a buffer.
    pub fn whole(&self, address: Address) -> Option<Arc<Owned>> {
        self.chunks.get(&address).map(|chunk| chunk.whole.owned.clone())
    }

    /// The buffer freed last that started here, if there is nothing live.
    pub fn freed_before(&self, address: Address) -> Option<Arc<Owned>> {
        if holding(&self.chunks, address, |chunk| chunk.whole.owned.range.end).is_some() {
            return None;
        }
        self.freed.get(&address).cloned()
    }

    /// Forgets a chunk that goes back to the driver, and remembers that it was there.
    pub fn remove(&mut self, address: Address) -> Option<Chunk> {
        let chunk = self.chunks.remove(&address)?;
        chunk.whole.owned.end();
        self.remember(chunk.whole.owned.clone());
        for block in chunk.blocks.iter().flat_map(BTreeMap::values) {
            self.remember(block.owned.clone());
        }
        Some(chunk)
    }

    /// Takes a [`remove`](Self::remove) back.
    pub fn restore(&mut self, chunk: Chunk) {
        *chunk.whole.owned.freed.lock() = None;
        self.chunks.insert(chunk.whole.owned.range.start, chunk);
    }

    fn remember(&mut self, owned: Arc<Owned>) {
        let start = owned.range.start;
        if self.freed.insert(start, owned).is_none() {
            self.order.push_back(start);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.freed.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_a_buffer_until_it_is_cut() {
        let mut heap = Heap::default();
        heap.add(1000..2000, Source::Device(0));
        assert!(
            matches!(heap.find(&(1000..2000)), Found::Live(_)) && matches!(heap.find(&(1999..2001)), Found::Stray(_))
        );
        assert_eq!(heap.unwritten(&(1000..1100)), Some(1000..1100));
        heap.hand_out(1000..1100, Some(0), true);
        heap.hand_out(1100..1200, Some(0), false);
        assert!(
            matches!(heap.find(&(1050..1100)), Found::Live(_)) && matches!(heap.find(&(1050..1101)), Found::Stray(_))
        );
        assert!(matches!(heap.find(&(1500..1501)), Found::Stray(_)));
        assert_eq!((heap.unwritten(&(1000..1100)), heap.unwritten(&(1150..1200))), (None, Some(1150..1200)));
        heap.take_back(1000);
        heap.take_back(1100);
        assert!(matches!(heap.find(&(1000..1001)), Found::Freed(_)));
        heap.hand_out(1000..1200, Some(0), false);
        assert!(matches!(heap.find(&(1000..1200)), Found::Live(_)));
        assert!(heap.chunk(1000, Source::Pinned).is_none() && heap.chunk(1000, Source::Device(0)) == Some(1000..2000));
        let chunk = heap.remove(1000).unwrap();
        assert!(matches!(heap.find(&(1000..1200)), Found::Freed(_)) && heap.freed_before(1000).is_some());
        heap.restore(chunk);
        assert!(matches!(heap.find(&(1000..1200)), Found::Live(_)) && heap.freed_before(1000).is_none());
        assert!(matches!(heap.find(&(5..6)), Found::Unknown));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut heap = Heap::default();
        for i in 0..REMEMBERED as u64 + 100 {
            heap.add(i * 512..i * 512 + 256, Source::Pinned);
            heap.remove(i * 512);
        }
        assert_eq!((heap.freed.len(), heap.order.len()), (REMEMBERED, REMEMBERED));
        assert!(heap.freed_before(0).is_none() && heap.freed_before(100 * 512).is_some());
    }
}
