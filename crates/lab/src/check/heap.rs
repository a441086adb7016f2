//! Live memory: chunks from the driver, the blocks that a pool has cut from them, and which bytes have been written.
//!
//! A chunk (an allocation or a mapping) without blocks is one buffer, as are adjacent mappings. Once a pool has cut a
//! block from a chunk, the blocks are the buffers. A block may span several adjacent chunks.

use super::{OpSite, ranges::Ranges};
use gpu_pool::extend::driver::Address;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque, btree_map::Entry},
    ops::Range,
    sync::Arc,
};

const REMEMBERED: usize = 10_000;
/// Most freed buffers that a search looks at. They may overlap, and the right one is mostly among the nearest.
const NEAREST: usize = 64;

/// The properties of a buffer that reports need. A block that is handed out again at the same address is a new buffer.
pub(super) struct Owned {
    pub range: Range<Address>,
    pub device: Option<usize>,
    pub by: Option<OpSite>,
    freed: Mutex<Option<Option<OpSite>>>,
}

impl Owned {
    fn new(range: Range<Address>, device: Option<usize>) -> Arc<Owned> {
        Arc::new(Owned { range, device, by: OpSite::current(), freed: Mutex::new(None) })
    }

    /// The user's call that freed the buffer (if known); `None` while the buffer is live.
    pub fn freed(&self) -> Option<Option<OpSite>> {
        *self.freed.lock()
    }

    fn end(&self) {
        *self.freed.lock() = Some(OpSite::current());
    }
}

/// The driver call that has allocated memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Device(usize),
    Mapped(usize),
    Adopted(usize),
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

pub(super) struct Chunk {
    source: Option<Source>,
    whole: Buffer,
    cut: bool,
    /// The blocks that lie only in this chunk. Empty while the chunk is in the account: then [`Heap::blocks`] has them.
    inside: Vec<Buffer>,
}

impl Chunk {
    fn new(source: Option<Source>, whole: Buffer) -> Self {
        Chunk { source, whole, cut: false, inside: Vec::new() }
    }

    fn range(&self) -> &Range<Address> {
        &self.whole.owned.range
    }
}

pub(super) enum Found {
    Live(Arc<Owned>),
    Freed(Arc<Owned>),
    /// The range is driver memory, but no live buffer contains all of it. With the buffer that it starts in.
    Stray(Arc<Owned>),
    Unknown,
}

#[derive(Default)]
pub(super) struct Heap {
    chunks: BTreeMap<Address, Chunk>,
    /// By first address. Live blocks do not overlap each other; neither do free blocks.
    blocks: BTreeMap<Address, Buffer>,
    /// By first address: buffers inside of live blocks. Other code has given back memory of this process, or a part.
    guests: BTreeMap<Address, usize>,
    freed: BTreeMap<Address, Arc<Owned>>,
    order: VecDeque<Address>,
}

fn holding<T>(map: &BTreeMap<Address, T>, at: Address, end: impl Fn(&T) -> Address) -> Option<&T> {
    map.range(..=at).next_back().map(|(_, value)| value).filter(|value| end(value) > at)
}

impl Heap {
    pub fn add(&mut self, range: Range<Address>, source: Source) {
        let device = match source {
            Source::Device(device) | Source::Mapped(device) | Source::Adopted(device) => Some(device),
            Source::Pinned | Source::Managed => None,
        };
        // Blocks of earlier memory at these addresses, some of which reached beyond it.
        self.forget_blocks(&range);
        let whole = Buffer::new(Owned::new(range.clone(), device), device.is_none());
        self.chunks.insert(range.start, Chunk::new(Some(source), whole));
    }

    /// Records that a pool hands out a block. Free blocks that overlap it are forgotten. Inside of a live block it is a
    /// guest, which ends before that block does.
    pub fn hand_out(&mut self, range: Range<Address>, device: Option<usize>, zeroed: bool) {
        let around = holding(&self.blocks, range.start, |block| block.owned.range.end);
        if around.is_some_and(|block| block.owned.freed().is_none() && block.owned.range.end >= range.end) {
            *self.guests.entry(range.start).or_default() += 1;
            return;
        }
        let owned = Owned::new(range.clone(), device);
        self.forget_blocks(&range);
        let first = self.chunk_at(range.start).map(|chunk| chunk.range().start);
        let first = first.unwrap_or_else(|| {
            // Memory whose allocation the checker has not seen.
            let next = self.chunks.range(range.start..range.end).next().map_or(range.end, |(start, _)| *start);
            let whole = Buffer::new(Owned::new(range.start..next, device), zeroed);
            self.chunks.insert(range.start, Chunk::new(None, whole));
            range.start
        });
        self.chunks.range_mut(first..range.end).for_each(|(_, chunk)| chunk.cut = true);
        self.blocks.insert(range.start, Buffer::new(owned, zeroed));
    }

    fn forget_blocks(&mut self, range: &Range<Address>) {
        while let Some((&start, last)) = self.blocks.range(..range.end).next_back()
            && last.owned.range.end > range.start
        {
            self.blocks.remove(&start);
        }
    }

    pub fn take_back(&mut self, address: Address) {
        if let Entry::Occupied(mut guests) = self.guests.entry(address) {
            *guests.get_mut() -= 1;
            if *guests.get() == 0 {
                guests.remove();
            }
            return;
        }
        if let Some(block) = self.blocks.get(&address) {
            block.owned.end();
        }
    }

    pub fn block(&self, address: Address) -> Option<&Owned> {
        self.blocks.get(&address).map(|block| &*block.owned)
    }

    pub fn covers(&self, range: &Range<Address>) -> bool {
        self.chunk_at(range.start).is_some_and(|chunk| chunk.range().end >= range.end)
    }

    fn chunk_at(&self, address: Address) -> Option<&Chunk> {
        holding(&self.chunks, address, |chunk| chunk.range().end)
    }

    pub fn find(&self, range: &Range<Address>) -> Found {
        let Some(chunk) = self.chunk_at(range.start) else {
            let near = self.freed.range(..=range.start).rev().take(NEAREST).map(|(_, owned)| owned);
            let mut near = near.filter(|owned| owned.range.end > range.start);
            return near.next().map_or(Found::Unknown, |owned| Found::Freed(owned.clone()));
        };
        match self.buffer(chunk, range.start).map(|buffer| &buffer.owned) {
            None => Found::Stray(chunk.whole.owned.clone()),
            Some(owned) if owned.freed().is_some() => Found::Freed(owned.clone()),
            Some(owned) if owned.range.end < range.end && !self.is_mapped(range) => Found::Stray(owned.clone()),
            Some(owned) => Found::Live(owned.clone()),
        }
    }

    fn is_mapped(&self, range: &Range<Address>) -> bool {
        let mut at = range.start;
        while at < range.end {
            match self.chunk_at(at) {
                Some(chunk) if !chunk.cut && matches!(chunk.source, Some(Source::Mapped(_))) => at = chunk.range().end,
                _ => return false,
            }
        }
        true
    }

    fn buffer<'a>(&'a self, chunk: &'a Chunk, at: Address) -> Option<&'a Buffer> {
        if !chunk.cut {
            return Some(&chunk.whole);
        }
        holding(&self.blocks, at, |block| block.owned.range.end)
    }

    pub fn write(&mut self, range: Range<Address>) {
        let chunk = self.chunks.range_mut(..=range.start).next_back().map(|(_, chunk)| chunk);
        let buffer = match chunk {
            Some(chunk) if !chunk.cut => Some(&mut chunk.whole),
            Some(_) => self.blocks.range_mut(..=range.start).next_back().map(|(_, block)| block),
            None => None,
        };
        let Some(buffer) = buffer else { return };
        let end = buffer.owned.range.end;
        if end >= range.end {
            buffer.written.add(range);
        } else if self.is_mapped(&range) {
            self.write(range.start..end);
            self.write(end..range.end);
        }
    }

    pub fn unwritten(&self, range: &Range<Address>) -> Option<Range<Address>> {
        let buffer = self.buffer(self.chunk_at(range.start)?, range.start)?;
        let end = buffer.owned.range.end;
        if end >= range.end {
            buffer.written.first_gap(range)
        } else if self.is_mapped(range) {
            self.unwritten(&(range.start..end)).or_else(|| self.unwritten(&(end..range.end)))
        } else {
            None
        }
    }

    pub fn chunk(&self, address: Address, source: Source) -> Option<Range<Address>> {
        let chunk = self.chunks.get(&address).filter(|chunk| chunk.source == Some(source))?;
        Some(chunk.range().clone())
    }

    pub fn whole(&self, address: Address) -> Option<Arc<Owned>> {
        self.chunks.get(&address).map(|chunk| chunk.whole.owned.clone())
    }

    /// The last freed buffer that started here, if no live buffer does.
    pub fn freed_before(&self, address: Address) -> Option<Arc<Owned>> {
        if self.chunk_at(address).is_some() {
            return None;
        }
        self.freed.get(&address).cloned()
    }

    /// Removes a chunk, and remembers it as freed. A block that spans other chunks, too, stays in those.
    pub fn remove(&mut self, address: Address) -> Option<Chunk> {
        let mut chunk = self.chunks.remove(&address)?;
        let range = chunk.range().clone();
        chunk.whole.owned.end();
        self.remember(chunk.whole.owned.clone());
        let before = self.blocks.range(..range.start).next_back();
        let overlapping = before.into_iter().chain(self.blocks.range(range.clone()));
        let overlapping = overlapping.filter(|(_, block)| chunk.cut && block.owned.range.end > range.start);
        for owned in overlapping.map(|(_, block)| block.owned.clone()).collect::<Vec<_>>() {
            if owned.range.start >= range.start && owned.range.end <= range.end {
                chunk.inside.extend(self.blocks.remove(&owned.range.start));
            }
            self.remember(owned);
        }
        Some(chunk)
    }

    pub fn restore(&mut self, mut chunk: Chunk) {
        *chunk.whole.owned.freed.lock() = None;
        self.blocks.extend(chunk.inside.drain(..).map(|block| (block.owned.range.start, block)));
        self.chunks.insert(chunk.range().start, chunk);
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
#[path = "../../tests/unit/check/heap_tests.rs"]
mod tests;
