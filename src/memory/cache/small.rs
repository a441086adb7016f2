//! Small blocks: slabs, and free lists by size class and by the stream that used a block last.
//!
//! The cache calls it for blocks of at most 128 KiB. Per class and stream the block freed last is handed out first: it
//! is warm, and its stream needs no wait. A steal from another stream's list takes the block freed first, whose uses
//! are the likeliest to be over (DALI's `async_pool`).

use super::{
    GRAIN,
    classes::{self, CLASSES},
};
use crate::{
    driver::Address,
    memory::{Block, History, Origin, Payload, Region, StreamCore, hazard::Tenants, heap::Piece},
};
use smallvec::SmallVec;
use std::{collections::VecDeque, sync::Arc};

const LOOKS: usize = 64;

pub(super) struct Slab {
    pub piece: Piece,
    pub region: Arc<Region>,
    pub address: Address,
    pub bytes: usize,
    class: usize,
    /// Blocks that exist; further blocks are cut when they are needed.
    cut: usize,
    rest: History,
}

/// Free blocks that streams may still use; the block freed last is at the back.
struct List {
    tenants: Tenants,
    blocks: VecDeque<Box<Block>>,
}

#[derive(Default)]
#[allow(clippy::vec_box, reason = "a header is a node of `Returns`, and stays where it is")]
struct Class {
    free: Vec<Box<Block>>,
    lists: SmallVec<[List; 2]>,
    current: Option<u32>,
    slabs: usize,
}

pub(super) struct Small {
    classes: Box<[Class]>,
    slabs: Vec<Option<Slab>>,
    /// Blocks in use, by slab. A separate array, since every allocation and every free counts in it.
    live: Vec<u32>,
    vacant: Vec<u32>,
    empty: usize,
}

impl Small {
    pub fn new() -> Self {
        let classes = (0..CLASSES).map(|_| Class::default()).collect();
        Small { classes, slabs: Vec::new(), live: Vec::new(), vacant: Vec::new(), empty: 0 }
    }

    #[inline(always)]
    pub fn pop(&mut self, class: usize, stream: Option<u64>) -> Option<Box<Block>> {
        let Class { free, lists, .. } = &mut self.classes[class];
        let own = stream.map_or(Tenants::Nobody, Tenants::Stream);
        let own = lists.iter_mut().find(|list| list.tenants == own);
        let block = own.and_then(|own| own.blocks.pop_back()).or_else(|| free.pop())?;
        Self::wake(&mut self.live, &mut self.empty, &block);
        Some(block)
    }

    /// Takes a block of another stream that `stream` need not wait for.
    pub fn pop_free(&mut self, class: usize, stream: Option<&StreamCore>) -> Option<Box<Block>> {
        // The uses of one stream complete in order; the uses of several do not (pytorch#71616).
        let looks = |tenants| if tenants == Tenants::Many { LOOKS } else { 1 };
        self.take_first(class, looks, |past| past.is_free_for(stream))
    }

    /// Takes any block that no lost peer uses. The stream will wait for its last users.
    pub fn steal(&mut self, class: usize, own: usize) -> Option<Box<Block>> {
        self.take_first(class, |_| usize::MAX, |past| !past.names_lost_peer(own))
    }

    /// The first block whose past fits, among the first `looks` of each list.
    fn take_first(
        &mut self,
        class: usize,
        looks: impl Fn(Tenants) -> usize,
        fits: impl Fn(&mut History) -> bool,
    ) -> Option<Box<Block>> {
        let block = self.classes[class].lists.iter_mut().find_map(|list| {
            let mut first = list.blocks.iter_mut().take(looks(list.tenants));
            let at = first.position(|block| fits(block.hazards.history()))?;
            list.blocks.remove(at)
        })?;
        Self::wake(&mut self.live, &mut self.empty, &block);
        Some(block)
    }

    pub fn next_slab(&self, class: usize) -> usize {
        let most = classes::slab_bytes(class);
        let first = (classes::bytes(class) * 4).next_multiple_of(GRAIN).max(64 << 10);
        (first << self.classes[class].slabs.min(8)).min(most)
    }

    /// If there is room. Returns the block's address and its past.
    pub fn cut(&mut self, class: usize) -> Option<(u32, Address, &Arc<Region>, History)> {
        let index = self.classes[class].current?;
        let slab = self.slabs[index as usize].as_mut().expect("the current slab exists");
        let bytes = classes::bytes(class);
        if (slab.cut + 1) * bytes > slab.bytes {
            self.classes[class].current = None;
            return None;
        }
        let later = slab.rest.split_off(bytes);
        let history = std::mem::replace(&mut slab.rest, later);
        let address = slab.address + (slab.cut * bytes) as u64;
        slab.cut += 1;
        let live = &mut self.live[index as usize];
        self.empty -= usize::from(*live == 0);
        *live += 1;
        Some((index, address, &slab.region, history))
    }

    pub fn add(&mut self, class: usize, piece: Piece, region: Arc<Region>, at: (Address, usize), rest: History) {
        let slab = Slab { piece, region, address: at.0, bytes: at.1, class, cut: 0, rest };
        let index = match self.vacant.pop() {
            Some(index) => index,
            None => {
                self.slabs.push(None);
                self.live.push(0);
                u32::try_from(self.slabs.len() - 1).expect("fewer than 2^32 slabs")
            }
        };
        self.slabs[index as usize] = Some(slab);
        self.empty += 1;
        self.classes[class].slabs += 1;
        self.classes[class].current = Some(index);
    }

    #[inline(always)]
    pub fn put(&mut self, mut block: Box<Block>) {
        let (slab, class) = Self::origin(&block);
        let live = &mut self.live[slab];
        *live -= 1;
        self.empty += usize::from(*live == 0);
        let Class { free, lists, .. } = &mut self.classes[class];
        let tenants = match block.hazards.history().settle() {
            Tenants::Nobody => return free.push(block),
            tenants => tenants,
        };
        match lists.iter_mut().find(|list| list.tenants == tenants) {
            Some(list) => list.blocks.push_back(block),
            None => {
                // Empty lists belong to streams that may be gone.
                lists.retain(|list| !list.blocks.is_empty());
                lists.push(List { tenants, blocks: VecDeque::from([block]) });
            }
        }
    }

    #[inline(always)]
    fn wake(live: &mut [u32], empty: &mut usize, block: &Block) {
        let live = &mut live[Self::origin(block).0];
        *empty -= usize::from(*live == 0);
        *live += 1;
    }

    #[inline(always)]
    fn origin(block: &Block) -> (usize, usize) {
        let Origin::Slab { slab, class } = block.origin else { unreachable!("small blocks lie in slabs") };
        (slab as usize, usize::from(class))
    }

    /// Gives up the uncut part of each current slab: its piece, the bytes that it keeps, and the past of the rest.
    pub fn give_up_uncut(&mut self) -> Vec<(Piece, usize, History)> {
        let mut given = Vec::new();
        for class in &mut self.classes {
            let Some(index) = class.current.take() else { continue };
            let slab = self.slabs[index as usize].as_mut().expect("the current slab exists");
            let keep = slab.uncut().next_multiple_of(GRAIN);
            if slab.cut == 0 || keep >= slab.bytes {
                class.current = Some(index).filter(|_| slab.cut == 0);
                continue;
            }
            let rest = slab.rest.split_off(keep - slab.uncut());
            slab.bytes = keep;
            given.push((slab.piece, keep, rest));
        }
        given
    }

    pub fn has_empty_slabs(&self) -> bool {
        self.empty > 0
    }

    /// Each with its past.
    pub fn dissolve(&mut self) -> Vec<(Slab, History)> {
        if self.empty == 0 {
            return Vec::new();
        }
        let mut gone: Vec<Option<(Slab, History)>> = Vec::with_capacity(self.slabs.len());
        for (index, entry) in self.slabs.iter_mut().enumerate() {
            let slab = entry.take_if(|_| self.live[index] == 0);
            gone.push(slab.map(|mut slab| {
                let class = &mut self.classes[slab.class];
                class.slabs -= 1;
                class.current.take_if(|current| *current as usize == index);
                self.vacant.push(index as u32);
                let (rest, mut past) = (std::mem::take(&mut slab.rest), History::default());
                past.join(slab.cut * classes::bytes(slab.class), rest);
                (slab, past)
            }));
        }
        for class in &mut self.classes {
            let mut stays = |block: &mut Box<Block>| {
                let Some((slab, past)) = &mut gone[Self::origin(block).0] else { return true };
                past.join((block.address - slab.address) as usize, block.hazards.history().hand_on());
                false
            };
            class.free.retain_mut(&mut stays);
            class.lists.iter_mut().for_each(|list| list.blocks.retain_mut(&mut stays));
        }
        self.empty = 0;
        gone.into_iter().flatten().collect()
    }

    pub fn free_blocks(&mut self) -> impl Iterator<Item = &mut Box<Block>> {
        self.classes.iter_mut().flat_map(|Class { free, lists, .. }| {
            free.iter_mut().chain(lists.iter_mut().flat_map(|list| &mut list.blocks))
        })
    }

    pub fn take(&mut self) -> impl Iterator<Item = Box<Block>> {
        let classes = std::mem::take(&mut self.classes).into_vec();
        let of = |class: Class| class.free.into_iter().chain(class.lists.into_iter().flat_map(|list| list.blocks));
        classes.into_iter().flat_map(of)
    }

    pub fn slabs(&self) -> impl Iterator<Item = &Slab> {
        self.slabs.iter().flatten()
    }
}

impl Slab {
    pub fn block_bytes(&self) -> usize {
        classes::bytes(self.class)
    }

    pub fn rest(&self) -> &History {
        &self.rest
    }

    pub fn uncut(&self) -> usize {
        self.cut * classes::bytes(self.class)
    }
}
