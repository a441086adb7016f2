//! Words by which running kernels wait for each other: a datum that is its own flag, and a credit.
//!
//! Such kernels wait for each other in both directions, so a clock per submitted operation is too coarse. The host
//! kernels tell each access when they make it (`collective/kernels/stepped`), and every block of a kernel has a clock:
//!
//! * **The arrival of a datum** is an edge from its writer to its reader: for the word itself at once, and for all that
//!   was before the writer's kernel, from the end of the reader's kernel on. A relaxed store and load carry no more.
//! * **A credit** is an edge from all that its writer has done and knows, at once: a release and an acquire.
//! * A kernel's begin comes after the ends of all earlier kernels of its device.
//!
//! An access that conflicts with the last one and that nothing orders after it is a race, even if it came late enough.
//! So is a datum that is written over another, and one that is taken twice.
//!
//! Invariant: a word's last access knows all accesses before it, so only the last one is kept.

use super::{
    Deed, Kind, Report,
    clock::{Clock, Component},
};
use gpu_pool::{
    extend::driver::Address,
    extend::lab::{self, Block, KernelWords, Touch},
};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::Arc,
};

fn component(block: Block) -> Component {
    (block.device as u64) << 32 | u64::from(block.number)
}

#[derive(Default)]
pub(super) struct Words {
    devices: HashMap<usize, Device>,
    data: BTreeMap<Address, Access>,
    credits: BTreeMap<Address, Arc<Clock>>,
    /// The latest gang in which a kernel has given up.
    failed: u64,
}

/// What a device's kernels know.
#[derive(Default)]
struct Device {
    /// What the running kernel knew when it began.
    begin: Arc<Clock>,
    /// What its data have told it; known when it has ended.
    told: Clock,
    blocks: Vec<Known>,
}

/// What a block knows, and the number of its accesses in all kernels.
#[derive(Clone)]
struct Known {
    clock: Arc<Clock>,
    count: u64,
}

struct Access {
    by: Block,
    count: u64,
    touch: Touch,
    /// What its kernel knew at its begin.
    begin: Arc<Clock>,
}

impl Words {
    fn known(&mut self, by: Block) -> &mut Known {
        let device = self.devices.entry(by.device).or_default();
        let number = by.number as usize;
        if device.blocks.len() <= number {
            device.blocks.resize(number + 1, Known { clock: device.begin.clone(), count: 0 });
        }
        &mut device.blocks[number]
    }

    /// A block touches a datum; a [`Touch::Read`] of one that it has not waited for.
    pub fn access(&mut self, by: Block, at: Address, touch: Touch) -> Result<(), Box<Report>> {
        let known = self.known(by);
        known.count += 1;
        let (count, clock) = (known.count, known.clock.clone());
        if let Some(last) = self.data.get(&at) {
            let reads = (touch, last.touch) == (Touch::Read, Touch::Read);
            if !reads && last.by != by && !clock.covers(component(last.by), last.count) {
                return Err(report(by, touch, last, at, UNORDERED));
            }
            if touch == Touch::Put && last.touch != Touch::Wipe {
                return Err(report(by, touch, last, at, NOT_WIPED));
            }
        }
        let begin = self.devices[&by.device].begin.clone();
        self.data.insert(at, Access { by, count, touch, begin });
        Ok(())
    }

    /// A block has seen that a datum has arrived, and reads it.
    pub fn arrived(&mut self, by: Block, at: Address) -> Result<(), Box<Report>> {
        let known = self.known(by);
        known.count += 1;
        let count = known.count;
        if let Some(last) = self.data.get(&at) {
            if last.touch != Touch::Put {
                return Err(report(by, Touch::Read, last, at, TAKEN));
            }
            self.devices.entry(by.device).or_default().told.join(&last.begin);
        }
        let begin = self.devices[&by.device].begin.clone();
        self.data.insert(at, Access { by, count, touch: Touch::Read, begin });
        Ok(())
    }

    /// A block gives a credit: it writes a word for another.
    pub fn gives(&mut self, by: Block, at: Address) {
        let known = self.known(by);
        known.count += 1;
        let mut all = Clock::clone(&known.clock);
        all.set(component(by), known.count);
        self.credits.insert(at, Arc::new(all));
    }

    /// A block has seen the credit that it waited for.
    pub fn has_credit(&mut self, by: Block, at: Address) {
        if let Some(credit) = self.credits.get(&at).cloned() {
            Arc::make_mut(&mut self.known(by).clock).join(&credit);
        }
    }

    /// A device's kernel has ended.
    pub fn ended(&mut self, device: usize) {
        let Some(state) = self.devices.get_mut(&device) else { return };
        let mut all = std::mem::take(&mut state.told);
        all.join(&state.begin);
        for (number, block) in state.blocks.iter().enumerate() {
            all.join(&block.clock);
            all.set(component(Block { device, number: number as u32 }), block.count);
        }
        state.begin = Arc::new(all);
        state.blocks.iter_mut().for_each(|block| block.clock = state.begin.clone());
    }

    /// A kernel of the gang at this place has given up. What the gang's other kernels do is worth nothing: they find
    /// what this one has left.
    pub fn gave_up(&mut self, place: u64) {
        self.failed = self.failed.max(place);
    }

    /// Whether a kernel of the gang at this place, or of a later one, has given up.
    pub fn has_failed(&self, place: u64) -> bool {
        self.failed >= place
    }

    /// An ordinary operation has written this memory, ordered after all kernels that know it; or it is new.
    pub fn forget(&mut self, range: &Range<Address>) {
        let within: Vec<Address> = self.data.range(range.clone()).map(|(at, _)| *at).collect();
        within.iter().for_each(|at| drop(self.data.remove(at)));
        let within: Vec<Address> = self.credits.range(range.clone()).map(|(at, _)| *at).collect();
        within.iter().for_each(|at| drop(self.credits.remove(at)));
    }
}

/// [`Words`] as the pool knows them.
#[derive(Default)]
pub(super) struct Accounts(pub Mutex<Words>);

impl KernelWords for Accounts {
    fn access(&self, by: Block, at: Address, touch: Touch) -> Result<(), Box<Report>> {
        self.0.lock().access(by, at, touch)
    }

    fn arrived(&self, by: Block, at: Address) -> Result<(), Box<Report>> {
        self.0.lock().arrived(by, at)
    }

    fn gives(&self, by: Block, at: Address) {
        self.0.lock().gives(by, at);
    }

    fn has_credit(&self, by: Block, at: Address) {
        self.0.lock().has_credit(by, at);
    }

    fn ended(&self, device: usize) {
        self.0.lock().ended(device);
    }

    fn gave_up(&self, gang: u64) {
        self.0.lock().gave_up(gang);
    }

    fn has_failed(&self, gang: u64) -> bool {
        self.0.lock().has_failed(gang)
    }

    fn forget(&self, range: &Range<Address>) {
        self.0.lock().forget(range);
    }
}

const UNORDERED: &str = "the later one never waited for the other: a datum that has arrived, or a credit, orders them";
const NOT_WIPED: &str = "the datum before is still there: it must be taken and wiped before the next one comes";
const TAKEN: &str = "this datum was taken before: it must be wiped then";

fn report(by: Block, touch: Touch, last: &Access, at: Address, missing: &str) -> Box<Report> {
    let deed = |block: Block, touch: Touch| {
        let what = match touch {
            Touch::Put => "sends a datum to an inbox",
            Touch::Read => "takes a datum of its inbox",
            Touch::Wipe => "wipes a datum of its inbox",
        };
        let detail = format!("block {} {what}", block.number);
        let (device, write) = (Some(block.device), touch != Touch::Read);
        Deed { op: "kernel", detail, site: None, device, stream: None, write }
    };
    let bytes = at as usize..at as usize + 16;
    let before = Some(deed(last.by, last.touch));
    Box::new(lab::report(Kind::Race, deed(by, touch), before, bytes, None, missing.to_owned()))
}

#[cfg(test)]
#[path = "../../tests/unit/check/words_tests.rs"]
mod tests;
