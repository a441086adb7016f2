//! One device's part of the random program.

use super::{
    model::Model,
    tally::{Rules, Tally},
};
use crate::rig::{MIB, Rng, aligned, check_books};
use crate::support::{all_are, slow_add};
use gpu_pool::{Device, DeviceBuffer, Error, Stream};
use parking_lot::Mutex;
use std::{
    ops::Range,
    sync::{Arc, mpsc},
    thread,
};

/// What each device may take.
pub const LIMIT: usize = 96 * MIB;
/// Blocks are up to two to the power of this many bytes large.
const LARGEST: u32 = 26;
/// Elements at the beginning, in the middle and at the end of a block that hold its number; smaller ones hold it all
/// over.
const STAMP: usize = 256;
/// Blocks that one device holds, and that lie between the devices.
const HELD: usize = 300;
const PASSED: usize = 60;

/// A block, and what is in it, if that is known.
struct Piece {
    buffer: DeviceBuffer<u32>,
    number: Option<u32>,
    model: Arc<Mutex<Model>>,
}

impl Drop for Piece {
    fn drop(&mut self) {
        // Before the buffer itself.
        self.model.lock().freed(self.buffer.address());
    }
}

impl Piece {
    fn stamps(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.buffer.len();
        let parts = if len <= 4 * STAMP {
            [0..len, 0..0, 0..0]
        } else {
            [0..STAMP, len / 2..len / 2 + STAMP, len - STAMP..len]
        };
        parts.into_iter().filter(|part| !part.is_empty())
    }

    fn write(&mut self, dev: &Device, number: u32) -> Result<(), Error> {
        self.number = None;
        for part in self.stamps() {
            dev.fill(&mut self.buffer.slice_mut(part), number)?;
        }
        self.number = Some(number);
        Ok(())
    }

    /// On a stream of its own device it is looked at; on another's it is copied first.
    fn check(&self, dev: &Device) -> Result<(), Error> {
        let Some(number) = self.number else { return Ok(()) };
        for part in self.stamps() {
            let len = part.len();
            let found = if dev.index() == self.buffer.device() {
                dev.download(&self.buffer.slice(part))?
            } else {
                let mut here = dev.zeros::<u32>(len)?;
                dev.copy(&self.buffer.peer().slice(part), &mut here)?;
                dev.download(&here)?
            };
            assert!(all_are(&found, number), "block {number} at {:#x} was written to", self.buffer.address());
        }
        Ok(())
    }
}

/// What the devices have together.
pub struct Shared {
    pub models: Vec<Arc<Mutex<Model>>>,
    /// On its way from one to another.
    passed: Mutex<Vec<Piece>>,
    /// To threads that only free.
    bins: Mutex<Option<Vec<mpsc::Sender<Vec<Piece>>>>>,
    emptied: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Shared {
    pub fn new(devices: usize) -> Self {
        let shared = Shared {
            models: (0..devices).map(|_| Arc::default()).collect(),
            passed: Mutex::default(),
            bins: Mutex::default(),
            emptied: Mutex::default(),
        };
        shared.hire();
        shared
    }

    fn hire(&self) {
        let mut bins = Vec::new();
        for _ in 0..2 {
            let (bin, bins_out) = mpsc::channel::<Vec<Piece>>();
            self.emptied.lock().push(thread::spawn(move || bins_out.into_iter().for_each(drop)));
            bins.push(bin);
        }
        *self.bins.lock() = Some(bins);
    }

    /// Waits until what was thrown away is gone.
    pub fn settle(&self) {
        drop(self.bins.lock().take());
        self.emptied.lock().drain(..).for_each(|thread| thread.join().expect("a free does not panic"));
        self.hire();
    }

    pub fn forget_contents(&self) {
        self.passed.lock().iter_mut().for_each(|piece| piece.number = None);
    }

    fn throw_away(&self, pieces: Vec<Piece>, rng: &mut Rng) {
        if let Some(bins) = &*self.bins.lock() {
            bins[rng.below(bins.len())].send(pieces).expect("the bins are emptied until `settle`");
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        drop(self.bins.get_mut().take());
        self.emptied.get_mut().drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// One device's own.
pub struct Player {
    device: usize,
    rng: Rng,
    rules: Rules,
    held: Vec<Piece>,
    next: u32,
    tally: Tally,
}

impl Player {
    pub fn new(device: usize, seed: u64, rules: Rules) -> Self {
        let rng = Rng(seed.wrapping_mul(1_000_003).wrapping_add(device as u64));
        Player { device, rng, rules, held: Vec::new(), next: device as u32, tally: Tally::default() }
    }

    /// A scope begins: its streams. What a failed one has left unknown is written anew.
    pub fn begin(&mut self, dev: &Device) -> Result<Vec<Stream>, Error> {
        let mut held = std::mem::take(&mut self.held);
        for piece in held.iter_mut().filter(|piece| piece.number.is_none()) {
            self.next += 64;
            let written = piece.write(dev, self.next);
            self.planned(written)?;
        }
        self.held = held;
        let mut streams = Vec::new();
        while streams.len() < 3 {
            match dev.stream() {
                Ok(stream) => streams.push(stream),
                Err(error) => self.planned(Err(error))?,
            }
        }
        Ok(streams)
    }

    /// A scope has failed: what it has written may not have been.
    pub fn forget_contents(&mut self) {
        self.held.iter_mut().for_each(|piece| piece.number = None);
    }

    /// How many it has made.
    pub fn steps(&self) -> usize {
        self.tally.steps
    }

    pub fn end(self) -> Tally {
        self.tally
    }

    pub fn step(&mut self, dev: &Device, streams: &mut [Stream], shared: &Shared) -> Result<(), Error> {
        self.tally.steps += 1;
        let current = self.rng.below(streams.len() + 1);
        if self.rng.chance(100) {
            return self.renew(streams.get_mut(current), dev);
        }
        let on = streams.get(current).map(|stream| dev.on(stream));
        let dev = on.as_deref().unwrap_or(dev);
        let done = match self.rng.below(1000) {
            0..400 => self.allocate(dev, shared),
            400..600 => self.free(dev),
            600..680 => self.rewrite(dev),
            680..800 => self.pass_on(shared),
            800..900 => self.take_over(dev, shared),
            900..960 => self.throw_away(shared),
            960..975 => self.hog(dev),
            975..982 => dev.synchronize(),
            982..985 => self.trim(dev),
            985..988 => {
                check_books(dev);
                Ok(())
            }
            988..992 => self.free_most(),
            _ => Ok(()),
        };
        self.planned(done)
    }

    /// Faults that were planned, and refusals, are part of the program.
    fn planned(&mut self, done: Result<(), Error>) -> Result<(), Error> {
        match done {
            Err(Error::Driver { code: 999, .. }) if self.rules.faults => self.tally.faults += 1,
            Err(Error::OutOfMemory { .. }) => self.tally.refused += 1,
            done => return done,
        }
        Ok(())
    }

    fn size(&mut self) -> usize {
        let held: usize = self.held.iter().map(|piece| 4 * piece.buffer.len()).sum();
        // Large ones until it is nearly full; then mostly small ones, and now and then one that is too much.
        let most = if held > LIMIT * 5 / 8 && !self.rng.chance(12) { 16 } else { LARGEST };
        self.rng.size(most)
    }

    fn allocate(&mut self, dev: &Device, shared: &Shared) -> Result<(), Error> {
        if self.held.len() >= HELD {
            return self.free(dev);
        }
        let bytes = self.size();
        let align = if self.rng.chance(8) { 1 << self.rng.below(22) } else { 4 };
        match self.new_piece(dev, shared, bytes, align) {
            Err(Error::OutOfMemory { .. }) if !self.held.is_empty() && !self.rules.faults => {
                self.tally.refused += 1;
                // The memory of one that goes serves the next of its size, whatever was tried in vain before.
                let largest = (0..self.held.len()).max_by_key(|&i| self.held[i].buffer.len()).expect("there are some");
                let gone = if self.rng.chance(2) { largest } else { self.rng.below(self.held.len()) };
                let piece = self.held.swap_remove(gone);
                let bytes = 4 * piece.buffer.len();
                drop(piece);
                self.tally.served_after_refusal += 1;
                match self.new_piece(dev, shared, bytes, 4) {
                    Err(Error::OutOfMemory { report, .. }) => {
                        panic!("{bytes} bytes were freed, and then there was no room for as many:\n{report}")
                    }
                    done => done,
                }
            }
            done => done,
        }
    }

    fn new_piece(&mut self, dev: &Device, shared: &Shared, bytes: usize, align: usize) -> Result<(), Error> {
        let before = dev_counters(dev, &mut self.rng);
        let buffer = match aligned::<u32>(dev, bytes / 4, align) {
            Ok(buffer) => buffer,
            Err(error) => {
                // What is refused leaves no trace. (Others may have freed something meanwhile.)
                if let Some(before) = before {
                    assert!(dev.stats().allocations == before, "a refused request was counted");
                }
                return Err(error);
            }
        };
        assert!(buffer.address().is_multiple_of(align as u64) && buffer.address().is_multiple_of(256));
        self.next += 64;
        let model = shared.models[self.device].clone();
        model.lock().allocated(buffer.address(), 4 * buffer.len(), self.next);
        let mut piece = Piece { buffer, number: None, model };
        self.tally.allocated += 1;
        let written = piece.write(dev, self.next);
        self.held.push(piece);
        written
    }

    fn pick(&mut self) -> Option<Piece> {
        if self.held.is_empty() {
            return None;
        }
        let at = self.rng.below(self.held.len());
        Some(self.held.swap_remove(at))
    }

    fn free(&mut self, dev: &Device) -> Result<(), Error> {
        let Some(piece) = self.pick() else { return Ok(()) };
        self.tally.checked += 1;
        piece.check(dev)
    }

    /// Without a look at it: its last work is under way while it is freed.
    fn rewrite(&mut self, dev: &Device) -> Result<(), Error> {
        let Some(mut piece) = self.pick() else { return Ok(()) };
        self.next += 64;
        let written = piece.write(dev, self.next);
        if self.rng.chance(2) {
            self.held.push(piece);
        }
        written
    }

    fn pass_on(&mut self, shared: &Shared) -> Result<(), Error> {
        if self.rules.alone {
            return Ok(());
        }
        let Some(piece) = self.pick() else { return Ok(()) };
        let mut passed = shared.passed.lock();
        passed.push(piece);
        if passed.len() > PASSED {
            let at = self.rng.below(PASSED);
            let gone = passed.swap_remove(at);
            drop(passed);
            drop(gone);
        }
        Ok(())
    }

    /// Whoever's it is: looked at, or copied from and freed while the copy is queued.
    fn take_over(&mut self, dev: &Device, shared: &Shared) -> Result<(), Error> {
        let piece = {
            let mut passed = shared.passed.lock();
            if passed.is_empty() {
                return Ok(());
            }
            let at = self.rng.below(passed.len());
            passed.swap_remove(at)
        };
        self.tally.from_peers += 1;
        if self.rng.chance(2) {
            self.tally.checked += 1;
            return piece.check(dev);
        }
        let (Some(number), Some(part)) = (piece.number, piece.stamps().last()) else { return Ok(()) };
        let mut here = dev.zeros::<u32>(part.len())?;
        dev.copy(&piece.buffer.peer().slice(part), &mut here)?;
        drop(piece);
        // By now its owner may have given it to somebody else.
        let found = dev.download(&here)?;
        assert!(all_are(&found, number), "block {number} was written to while a peer read it");
        Ok(())
    }

    fn throw_away(&mut self, shared: &Shared) -> Result<(), Error> {
        if self.rules.alone {
            return Ok(());
        }
        let some = 1 + self.rng.below(4);
        let pieces: Vec<_> = (0..some).filter_map(|_| self.pick()).collect();
        self.tally.thrown_away += pieces.len();
        shared.throw_away(pieces, &mut self.rng);
        Ok(())
    }

    /// The stream is late for a while.
    fn hog(&mut self, dev: &Device) -> Result<(), Error> {
        let micros = self.rng.below(400) as u32;
        let mut x = dev.zeros::<u32>(1)?;
        slow_add(dev, &mut x, 1, micros)
    }

    fn trim(&mut self, dev: &Device) -> Result<(), Error> {
        self.tally.trimmed += 1;
        dev.trim().map(drop)
    }

    fn free_most(&mut self) -> Result<(), Error> {
        let keep = self.held.len() / 4;
        while self.held.len() > keep {
            drop(self.pick());
        }
        Ok(())
    }

    /// A stream goes, with blocks at rest in its lists and work under way, and another comes.
    fn renew(&mut self, stream: Option<&mut Stream>, dev: &Device) -> Result<(), Error> {
        let Some(stream) = stream else { return Ok(()) };
        match dev.stream() {
            Ok(new) => *stream = new,
            Err(error) => return self.planned(Err(error)),
        }
        Ok(())
    }
}

/// Now and then: how many allocations were served.
fn dev_counters(dev: &Device, rng: &mut Rng) -> Option<u64> {
    rng.chance(16).then(|| dev.stats().allocations)
}
