//! The accesses of a host kernel to inboxes, credits and epochs: what `kernels/{meet,inbox}.cuh` have of them. Each is
//! told to the race checker, if there is one: a store before it is made, a load after it.

use super::{Told, ordinal};
use crate::{
    driver::{
        Address,
        observe::{self, Block, FailPoint, HappensBefore, Touch},
    },
    error::Report,
    fabric::{
        layout::{BLOCKS, DeviceBarrier, FLAGS, HEADER, INBOX_SLOTS, MOST},
        signal_pad::{PLACE, REPORT},
    },
    sync::{load_word, store_word},
};
use once_cell::sync::Lazy;
use smallvec::SmallVec;
use std::{sync::Arc, time::Instant};

/// 16 bytes, which are polled whole.
pub(super) type Unit = [u64; 2];

const EMPTY: u32 = u32::MAX;
/// From the begin of a pad to the credits: `step[DONE]` of `Signals`.
const CREDITS: usize = HEADER + FLAGS - 2 * BLOCKS as usize * MOST * 8;

fn is_empty(word: u64) -> bool {
    word as u32 == EMPTY
}

/// The unit without the reserved word: another NaN is in its place.
pub(super) fn guarded<T>(unit: Unit) -> Unit {
    let other = if size_of::<T>() == 2 { 0x7fff_7fff } else { 0x7fff_ffff };
    let guard = |word: u64| if is_empty(word) { other } else { word };
    unit.map(|two| {
        let low = two & u64::from(u32::MAX);
        guard(two >> 32) << 32 | if size_of::<T>() == 8 { low } else { guard(low) }
    })
}

fn has_arrived<T>(unit: Unit) -> bool {
    unit.iter().all(|&two| !is_empty(two >> 32) && (size_of::<T>() == 8 || !is_empty(two)))
}

pub(super) struct Inboxes {
    pub meet: DeviceBarrier,
    pub told: Told,
    /// What the checker has found.
    found: Option<Box<Report>>,
    /// The host's words.
    words: *mut u8,
    /// The members' signal pads, by rank: where they are, and their addresses.
    pads: SmallVec<[*mut u8; MOST]>,
    addresses: SmallVec<[Address; MOST]>,
    /// The pairs' epochs of this meeting, by rank.
    epochs: SmallVec<[u32; MOST]>,
    checker: Option<Arc<dyn HappensBefore>>,
}

impl Inboxes {
    /// # Safety
    /// The host's words, and the members' pads by rank without their registers: valid while this lives, and accessed by
    /// others by atomic accesses of 8 bytes only.
    pub(super) unsafe fn new(
        meet: DeviceBarrier,
        told: Told,
        words: *mut u8,
        pads: SmallVec<[*mut u8; MOST]>,
    ) -> Inboxes {
        let checker = (told.checker > 0).then(|| observe::find(told.checker)).flatten();
        let (addresses, epochs) = (SmallVec::new(), SmallVec::new());
        let mut new = Inboxes { meet, told, found: None, words, pads, addresses, epochs, checker };
        new.addresses = (0..new.count()).map(|rank| new.load(new.own(), 8 * ordinal(meet, rank))).collect();
        new.epochs = (0..new.count()).map(|rank| following(new.epoch_at(rank).2)).collect();
        new
    }

    pub(super) fn count(&self) -> usize {
        self.meet.count as usize
    }

    pub(super) fn me(&self) -> usize {
        self.meet.me as usize
    }

    /// The other members, from the next on.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, count) = (self.me(), self.count());
        (1..count).map(move |k| (me + k) % count)
    }

    fn own(&self) -> *mut u8 {
        self.pads[self.me()]
    }

    fn load(&self, pad: *mut u8, offset: usize) -> u64 {
        // SAFETY: the promise of `new`; offsets are within a pad.
        unsafe { load_word(pad.wrapping_add(offset).cast()) }
    }

    fn store(&self, pad: *mut u8, offset: usize, word: u64) {
        // SAFETY: as above.
        unsafe { store_word(pad.wrapping_add(offset).cast(), word) }
    }

    // ---- places -----------------------------------------------------------------------------------------------------

    /// The lower and the upper half of a word of the header.
    fn header(&self, word: usize) -> (usize, usize) {
        let both = self.load(self.own(), 8 * word);
        (both as u32 as usize, (both >> 32) as usize)
    }

    /// What a sender's part of a receiver's inbox is counted by: it has none for itself.
    fn place(&self, sender: usize, receiver: usize) -> usize {
        let (from, to) = (ordinal(self.meet, sender), ordinal(self.meet, receiver));
        if from < to { from } else { from - 1 }
    }

    /// Where what `sender` sends to `receiver` in one trip begins, in the receiver's pad.
    pub(super) fn whole(&self, sender: usize, receiver: usize) -> usize {
        let (rooms, bytes) = self.header(MOST + 4 + MOST / 2);
        let other = if sender == self.me() { receiver } else { sender };
        let parity = if self.told.has(FailPoint::OneRoom) { 0 } else { self.epochs[other] as usize & 1 };
        HEADER + FLAGS + rooms + (2 * self.place(sender, receiver) + parity) * bytes
    }

    /// The same for a slot of a block.
    pub(super) fn slot(&self, sender: usize, receiver: usize, block: u32, slot: usize) -> usize {
        let (slots, bytes) = self.header(MOST + 5 + MOST / 2);
        let place = self.place(sender, receiver) * BLOCKS as usize + block as usize;
        HEADER + FLAGS + slots + (place * INBOX_SLOTS + slot) * bytes
    }

    // ---- data -------------------------------------------------------------------------------------------------------

    fn touch(&mut self, block: u32, at: Address, touch: Touch) {
        let by = Block { device: self.told.device as usize, number: block };
        if let Some(checker) = &self.checker
            && let Err(report) = checker.words().access(by, at, touch)
        {
            self.found.get_or_insert(report);
        }
    }

    fn write(&self, rank: usize, at: usize, unit: Unit) {
        (0..2).for_each(|k| self.store(self.pads[rank], at + 8 * k, unit[k]));
    }

    /// Sends a unit that is guarded into a member's inbox.
    pub(super) fn put(&mut self, block: u32, rank: usize, at: usize, unit: Unit) {
        self.touch(block, self.addresses[rank] + at as u64, Touch::Put);
        self.write(rank, at, unit);
    }

    /// The unit in the own inbox, if it has arrived.
    pub(super) fn look<T>(&self, at: usize) -> Option<Unit> {
        let unit = [0, 8].map(|k| self.load(self.own(), at + k));
        (has_arrived::<T>(unit) || self.told.has(FailPoint::DatumTakenEarly)).then_some(unit)
    }

    /// Takes a unit that [`look`](Self::look) has seen: empties its place.
    pub(super) fn take(&mut self, block: u32, at: usize) {
        let address = self.addresses[self.me()] + at as u64;
        if self.told.has(FailPoint::DatumTakenEarly) {
            self.touch(block, address, Touch::Read);
        } else if let Some(checker) = &self.checker {
            let by = Block { device: self.told.device as usize, number: block };
            let arrived = checker.words().arrived(by, address);
            self.found = self.found.take().or(arrived.err());
        }
        if !self.told.has(FailPoint::DatumKept) {
            self.touch(block, address, Touch::Wipe);
            self.write(self.me(), at, [u64::MAX; 2]);
        }
    }

    // ---- credits ----------------------------------------------------------------------------------------------------

    fn credit(&self, block: u32, of: usize) -> usize {
        CREDITS + 8 * (block as usize * MOST + ordinal(self.meet, of))
    }

    /// Tells all members that this block has taken all units of its first `count` steps.
    pub(super) fn tell_taken(&self, block: u32, count: u64) {
        let at = self.credit(block, self.me());
        for rank in self.others() {
            if let Some(checker) = &self.checker {
                let by = Block { device: self.told.device as usize, number: block };
                checker.words().gives(by, self.addresses[rank] + at as u64);
            }
            self.store(self.pads[rank], at, u64::from(self.epochs[rank]) << 32 | count);
        }
    }

    /// The first member that has not yet told `count` of this meeting, or anything of the next.
    pub(super) fn hear_taken(&self, block: u32, count: u64) -> Option<usize> {
        let has = |rank: usize| {
            let (seen, epoch) = (self.load(self.own(), self.credit(block, rank)), self.epochs[rank]);
            let (of, taken) = ((seen >> 32) as u32, seen & u64::from(u32::MAX));
            (of == epoch && taken >= count) || of == following(epoch)
        };
        let missing = self.others().find(|&rank| !has(rank));
        if let (None, Some(checker)) = (missing, &self.checker) {
            let by = Block { device: self.told.device as usize, number: block };
            let own = self.addresses[self.me()];
            self.others().for_each(|rank| checker.words().has_credit(by, own + self.credit(block, rank) as u64));
        }
        missing
    }

    // ---- epochs, deadline -------------------------------------------------------------------------------------------

    /// A member's epoch in the own header: the offset of its word, the bits before it there, and the number.
    fn epoch_at(&self, rank: usize) -> (usize, usize, u32) {
        let number = ordinal(self.meet, rank);
        let (offset, shift) = (8 * (MOST + 2 + number / 2), 32 * (number % 2));
        (offset, shift, (self.load(self.own(), offset) >> shift) as u32)
    }

    /// Writes the epochs for the next kernel: this one is over.
    pub(super) fn note_epochs(&self) {
        for rank in self.others() {
            let (offset, shift, _) = self.epoch_at(rank);
            let others = self.load(self.own(), offset) & !(u64::from(u32::MAX) << shift);
            self.store(self.own(), offset, others | u64::from(self.epochs[rank]) << shift);
        }
        if let Some(checker) = &self.checker {
            checker.words().ended(self.told.device as usize);
        }
    }

    /// Whether a block that waits since then gives up. Then the host can read the missing member.
    pub(super) fn are_over(&self, since: &mut u64, missing: usize) -> bool {
        static START: Lazy<Instant> = Lazy::new(Instant::now);
        let now = u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
        if *since == 0 {
            *since = now;
        }
        let (deadline, place) = (self.meet.deadline, self.gang());
        let late = deadline != 0 && now - *since > deadline;
        if !late && self.load(self.words, 0) < place {
            return false;
        }
        if let Some(checker) = &self.checker {
            checker.words().gave_up(place);
        }
        self.store(self.words, REPORT, place << 8 | 0x80 | ordinal(self.meet, missing) as u64);
        true
    }

    /// What the checker has found, unless the gang has failed: then kernels find what others have left.
    pub(super) fn take_found(&mut self) -> Option<Box<Report>> {
        let found = self.found.take()?;
        let failed = self.checker.as_ref().is_some_and(|checker| checker.words().has_failed(self.gang()));
        (!failed && self.load(self.words, 0) < self.gang()).then_some(found)
    }

    /// The place of the gang that the kernel runs in.
    fn gang(&self) -> u64 {
        match self.meet.place {
            0 => self.load(self.words, PLACE),
            place => place,
        }
    }
}

/// As in `kernels/meet.cuh`.
fn following(epoch: u32) -> u32 {
    if epoch == u32::MAX { 2 } else { epoch + 1 }
}
