//! Traces: which bytes are allocated and freed, in which order. A trace is made once from a seed, and every side
//! replays it, since random numbers of different libraries differ.

use std::{fs, io, ops::Range, path::Path};

const MIB: u64 = 1 << 20;

/// One step: allocates bytes into a slot, or, with none, frees the slot.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub slot: u32,
    pub bytes: u64,
}

/// First steps, and steps that leave the slots as they found them, so that they can be repeated.
#[derive(Default)]
pub struct Trace {
    pub slots: usize,
    pub first: Vec<Step>,
    pub again: Vec<Step>,
    /// Maximum of live bytes.
    pub peak: u64,
    /// A replacement (a free and an allocation) counts as one operation, not two.
    replaces: bool,
}

impl Trace {
    /// `live` blocks. One after the other (or a random one) is replaced by a block of a size from `sizes` (or of its
    /// own size).
    pub fn small_ring(live: usize, steps: usize, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        // Usually a few KiB, like launch parameters, sums and biases; all sizes that come from slabs.
        let size = |dice: &mut Dice| 1 << dice.below(8..16) | dice.below(0..256);
        let mut trace = Trace { replaces: true, ..Trace::default() };
        (0..live).for_each(|slot| trace.take_first(slot, size(&mut dice)));
        for step in 0..steps {
            trace.free(step % live);
            trace.take(step % live, size(&mut dice));
        }
        trace.finish()
    }

    /// `live` blocks. A random one is replaced by one of the same size, again and again.
    pub fn churn(live: usize, mib: Range<u64>, steps: usize, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let sizes: Vec<u64> = (0..live).map(|_| dice.below(mib.start * MIB..mib.end * MIB)).collect();
        let mut trace = Trace { replaces: true, ..Trace::default() };
        (0..live).for_each(|slot| trace.take_first(slot, sizes[slot]));
        for _ in 0..steps {
            let slot = dice.below(0..live as u64) as usize;
            trace.free(slot);
            trace.take(slot, sizes[slot]);
        }
        trace.finish()
    }

    /// RMM's [`random_allocations`](https://github.com/rapidsai/rmm/blob/main/cpp/benchmarks/random_allocations): 2 n
    /// steps. 73 % of them allocate, while there are fewer than n blocks and at most 16,000 MiB would be live; the
    /// others free a random block. Sizes are uniform from 1 byte to `most_mib`. The blocks that are left are freed at
    /// the end.
    pub fn rmm_random(allocations: usize, most_mib: u64, seed: u64) -> Self {
        const USAGE: u64 = 16_000 * MIB;
        let mut dice = Dice::new(seed);
        let mut trace = Trace::default();
        let (mut live, mut spare): (Vec<(usize, u64)>, Vec<usize>) = (Vec::new(), Vec::new());
        let (mut count, mut used) = (0, 0);
        for _ in 0..2 * allocations {
            let bytes = dice.below(1..most_mib * MIB + 1);
            let fits = count < allocations && used + bytes < USAGE;
            if live.is_empty() && count < allocations || fits && dice.below(0..100) < 73 {
                let slot = spare.pop().unwrap_or(live.len());
                trace.take(slot, bytes);
                live.push((slot, bytes));
                count += 1;
                used += bytes;
            } else if !live.is_empty() {
                let (slot, bytes) = live.swap_remove(dice.below(0..live.len() as u64) as usize);
                trace.free(slot);
                spare.push(slot);
                used -= bytes;
            }
        }
        live.into_iter().for_each(|(slot, _)| trace.free(slot));
        trace.finish()
    }

    /// `live` blocks of uniform sizes.
    pub fn uniform(live: usize, bytes: Range<u64>, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let mut trace = Trace::default();
        (0..live).for_each(|slot| trace.take_first(slot, dice.below(bytes.clone())));
        trace.finish()
    }

    pub fn take_first(&mut self, slot: usize, bytes: u64) {
        self.first.push(Step { slot: slot as u32, bytes });
    }

    pub fn free_first(&mut self, slot: usize) {
        self.take_first(slot, 0);
    }

    fn take(&mut self, slot: usize, bytes: u64) {
        self.again.push(Step { slot: slot as u32, bytes });
    }

    fn free(&mut self, slot: usize) {
        self.take(slot, 0);
    }

    /// Counts slots and bytes.
    pub fn finish(mut self) -> Self {
        let mut held: Vec<u64> = Vec::new();
        let mut live = 0;
        for step in self.first.iter().chain(&self.again) {
            let slot = step.slot as usize;
            held.resize(held.len().max(slot + 1), 0);
            assert!((held[slot] == 0) != (step.bytes == 0), "slots are taken when free, and freed when taken");
            live = live - held[slot] + step.bytes;
            held[slot] = step.bytes;
            self.peak = self.peak.max(live);
        }
        self.slots = held.len();
        self
    }

    /// Operations of the second part.
    pub fn operations(&self) -> usize {
        if self.replaces { self.again.len() / 2 } else { self.again.len() }
    }

    /// Writes the trace for other programs, as numbers of 64 bits in this machine's byte order: slots, operations,
    /// steps of the first part, steps of the second; then slot and bytes of each step.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let head = [self.slots, self.operations(), self.first.len(), self.again.len()].map(|n| n as u64);
        let steps = self.first.iter().chain(&self.again).flat_map(|step| [step.slot.into(), step.bytes]);
        let bytes: Vec<u8> = head.into_iter().chain(steps).flat_map(u64::to_ne_bytes).collect();
        fs::write(path, bytes)
    }
}

/// Random numbers: xorshift64*.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, range: Range<u64>) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        range.start + ((u128::from(number) * u128::from(range.end - range.start)) >> 64) as u64
    }
}
