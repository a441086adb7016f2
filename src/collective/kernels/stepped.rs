//! The host kernels of `kernels/inbox.cu`, for software GPUs that were asked for inboxes: sums of floats by data that
//! are their own flags. `kernels/inbox.cuh` has the protocol and its argument; nothing of it is said again here.
//!
//! A member launches them with [`args`]. They wait for each other, and a software GPU's kernel must not block. So a
//! kernel is many small [`Step`]s of its blocks: [`Frame::run`] makes some, and asks to be called again if there are
//! more. Where operations run one at a time, an attempt is a few steps only: a seed then gives one order of all
//! members' steps. What a block has done is kept in the pad's registers. [`Inboxes`] makes the accesses to the inboxes,
//! and tells the race checker of them. [`trip`] and [`trade`] are the two kernels, unit by unit.
//!
//! Invariant: a block waits only where `kernels/inbox.cu` waits, and a kernel that gives up counts its meeting all the
//! same.

mod inboxes;
mod trade;
mod trip;

use super::{
    Arguments, Entry, Part, builtin,
    host_kernels::{self, AVG, SCALED},
    lane::Lane,
    value,
};
use crate::{
    driver::{
        Address, HostArg, KernelArg, LaunchDims, host,
        observe::{self, FailPoint},
    },
    fabric::{
        layout::{DeviceBarrier, MOST, REGISTERS, SOFTWARE_BLOCKS},
        signal_pad::SignalPad,
    },
    memory::handle::DeviceHandle,
};
use inboxes::{Inboxes, Unit, guarded};
use smallvec::SmallVec;

/// Steps of an attempt, where operations run one at a time, and where they do not.
const FEW_STEPS: u64 = 4;
const MANY_STEPS: u64 = 2048;

/// The bugs that tests inject into these kernels.
const BUGS: [FailPoint; 6] = [
    FailPoint::DatumTakenEarly,
    FailPoint::SlotWithoutCredit,
    FailPoint::OneRoom,
    FailPoint::SlotsLeftFull,
    FailPoint::DatumKept,
    FailPoint::OwnNanKept,
];

/// The member that launches.
pub(crate) struct Launcher<'a> {
    pub handle: &'a DeviceHandle,
    pub pad: &'a SignalPad,
    pub meet: DeviceBarrier,
}

/// What a kernel is told beside what it is told on a GPU.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Told {
    /// The race checker, and the device's number in it; 0: there is none.
    checker: u64,
    device: u64,
    /// Most steps of an attempt.
    steps: u64,
    /// 1 + the place in [`BUGS`].
    bug: u64,
    /// Addresses of the member's own memory.
    memory: [Address; 2],
}

impl Told {
    fn has(&self, bug: FailPoint) -> bool {
        self.bug > 0 && BUGS[self.bug as usize - 1] == bug
    }
}

/// How far the blocks of the running kernel are; zeros between kernels.
#[derive(bytemuck::Pod, bytemuck::Zeroable, Clone, Copy)]
#[repr(C)]
struct Registers {
    /// The block whose turn it is.
    turn: u64,
    ended: u64,
    blocks: [At; SOFTWARE_BLOCKS as usize],
}
const _: () = assert!(size_of::<Registers>() <= REGISTERS);

/// How far a block is.
#[derive(bytemuck::Pod, bytemuck::Zeroable, Clone, Copy)]
#[repr(C)]
struct At {
    stage: u64,
    /// Units of the stage that are done.
    unit: u64,
    /// When it began to wait, in nanoseconds; 0: it does not wait.
    since: u64,
    ended: u64,
}

impl At {
    fn next_stage(&mut self) -> Step {
        (self.stage, self.unit) = (self.stage + 1, 0);
        Step::Went
    }

    fn next_unit(&mut self) -> Step {
        self.unit += 1;
        Step::Went
    }
}

/// What a block has done.
enum Step {
    Went,
    /// Nothing: this member is missing.
    Waits(usize),
    Ended,
}

/// What the blocks of a kernel do.
trait Program {
    /// A small piece of a block's work.
    fn step(&self, inboxes: &mut Inboxes, block: u32, at: &mut At) -> Step;
}

/// The arguments of a launch, from those of the launch on a GPU. `memory` is the member's own: what it reads, and what
/// it writes.
pub(crate) fn args(launcher: &Launcher<'_>, memory: [Option<Part>; 2], of_gpu: &[KernelArg]) -> Arguments {
    args_among(launcher, |_| true, memory, of_gpu)
}

/// The arguments of [`counting`], which touches no peer's pad: the peer may be emptying it.
pub(crate) fn counting_args(launcher: &Launcher<'_>) -> Arguments {
    args_among(launcher, |rank| rank == launcher.meet.me as usize, [None; 2], &[])
}

/// Arguments that name the pads of these ranks.
fn args_among(
    launcher: &Launcher<'_>,
    names: impl Fn(usize) -> bool,
    memory: [Option<Part>; 2],
    of_gpu: &[KernelArg],
) -> Arguments {
    let Launcher { handle, pad, meet } = *launcher;
    let (checker, device) = handle.watch().map_or((0, 0), |watch| {
        observe::enter(watch);
        (watch.number(), watch.device)
    });
    // A range may appear only once in a launch.
    let memory = match memory {
        [Some(a), Some(b)] if a.address < b.address + b.bytes as u64 && b.address < a.address + a.bytes as u64 => {
            let end = (a.address + a.bytes as u64).max(b.address + b.bytes as u64);
            let address = a.address.min(b.address);
            [None, Some(Part { address, bytes: (end - address) as usize })]
        }
        memory => memory,
    };
    let bug = BUGS.iter().position(|&bug| handle.injected(bug)).map_or(0, |at| at as u64 + 1);
    let steps = if host::is_stepped(&*handle.driver) { FEW_STEPS } else { MANY_STEPS };
    let addresses = memory.map(|part| part.map_or(0, |part| part.address));
    let words = |(address, bytes): (Address, usize)| KernelArg::Words { address, bytes };
    let (registers, bytes) = pad.registers(handle.device);
    let mut args = Arguments::new();
    args.push(value(meet));
    args.push(value(Told { checker, device: device as u64, steps, bug, memory: addresses }));
    args.push(KernelArg::Slice { address: registers, bytes, write: true });
    args.push(words(pad.words(handle.device)));
    args.extend((0..meet.count as usize).map(|rank| {
        let first = pad.address(ordinal(meet, rank));
        let (inbox, bytes) = pad.inbox(ordinal(meet, rank));
        words((first, if names(rank) { (inbox - first) as usize + bytes } else { 0 }))
    }));
    let slice = |(part, write): (Option<Part>, bool)| part.unwrap_or(Part::NONE).slice(write);
    args.extend(memory.into_iter().zip([false, true]).map(slice));
    args.extend(of_gpu.iter().skip(1).map(|arg| match *arg {
        KernelArg::Slice { address, .. } | KernelArg::Words { address, .. } => value(address),
        KernelArg::Value(_) => *arg,
    }));
    args
}

/// The kernel that counts a meeting which its gang's failure has ended. Launched with [`counting_args`].
pub(crate) fn counting() -> Entry {
    Entry { module: &builtin::COMBINE, name: "combine_u8", host: Some(count) }
}

fn ordinal(meet: DeviceBarrier, rank: usize) -> usize {
    (meet.members >> (4 * rank)) as usize & (MOST - 1)
}

/// # Safety
/// `args` are those of [`args`], with the memory behind them.
unsafe fn count(dims: LaunchDims, args: &[HostArg]) {
    // SAFETY: the promise of the caller.
    unsafe { Frame::new(dims, args) }.inboxes.note_epochs();
}

/// The host kernel of `inbox_*`.
///
/// # Safety
/// `args` are those of [`args`] for those of `Push` and this type, with the memory behind them.
pub(in super::super) unsafe fn inbox<T: Lane>(dims: LaunchDims, args: &[HostArg]) {
    // SAFETY: the promise of the caller.
    let frame = unsafe { Frame::new(dims, args) };
    let program = trip::Trip::<T>::new(&frame);
    frame.run(&program);
}

/// The host kernel of `slots_*`.
///
/// # Safety
/// `args` are those of [`args`] for those of `Parcels` and this type, with the memory behind them.
pub(in super::super) unsafe fn slots<T: Lane>(dims: LaunchDims, args: &[HostArg]) {
    // SAFETY: the promise of the caller.
    let frame = unsafe { Frame::new(dims, args) };
    let program = trade::Trade::<T>::new(&frame);
    frame.run(&program);
}

/// A kernel's arguments, unpacked.
struct Frame<'a> {
    blocks: u32,
    registers: &'a mut Registers,
    inboxes: Inboxes,
    memory: Memory,
    /// The arguments of the kernel on a GPU, but for the first.
    args: &'a [HostArg],
}

impl<'a> Frame<'a> {
    /// # Safety
    /// `args` are those of [`args`], with the memory behind them, which is this kernel's while the frame lives.
    unsafe fn new(dims: LaunchDims, args: &'a [HostArg]) -> Self {
        let (meet, told): (DeviceBarrier, Told) = (host_kernels::value(&args[0]), host_kernels::value(&args[1]));
        let HostArg::Slice { ptr: registers, .. } = args[2] else { unreachable!("packed above") };
        let pointer = |arg: &HostArg| match *arg {
            HostArg::Words { ptr, .. } | HostArg::Slice { ptr, .. } => ptr,
            HostArg::Value(_) => unreachable!("packed above"),
        };
        let (pads, rest) = args[4..].split_at(meet.count as usize);
        let pads: SmallVec<[*mut u8; MOST]> = pads.iter().map(pointer).collect();
        let part = |k: usize| match rest[k] {
            HostArg::Slice { ptr, bytes, .. } => (told.memory[k], ptr, bytes),
            _ => unreachable!("packed above"),
        };
        Frame {
            blocks: dims.grid.0,
            // SAFETY: the launch holds the registers exclusively; zeroed with the pad, aligned, large enough.
            registers: unsafe { &mut *registers.cast() },
            // SAFETY: the promise of the caller.
            inboxes: unsafe { Inboxes::new(meet, told, pointer(&args[3]), pads) },
            memory: Memory([part(0), part(1)]),
            args: &rest[2..],
        }
    }

    /// Makes steps of all blocks in turn, until all have ended, nothing goes on, or these are enough for an attempt.
    fn run(mut self, program: &impl Program) {
        let (blocks, mut left, mut idle, mut advanced) = (u64::from(self.blocks), self.inboxes.told.steps, 0, false);
        let (mut over, mut found) = (false, None);
        while self.registers.ended < blocks && idle < blocks && left > 0 && !over {
            let block = self.registers.turn % blocks;
            self.registers.turn = block + 1;
            let at = &mut self.registers.blocks[block as usize];
            idle += 1;
            if at.ended == 1 {
                continue;
            }
            match program.step(&mut self.inboxes, block as u32, at) {
                Step::Waits(missing) => over = self.inboxes.are_over(&mut at.since, missing),
                step => {
                    (idle, left, advanced, at.since) = (0, left - 1, true, 0);
                    if matches!(step, Step::Ended) {
                        at.ended = 1;
                        self.registers.ended += 1;
                    }
                }
            }
            found = self.inboxes.take_found();
            over |= found.is_some();
        }
        if !over && self.registers.ended < blocks {
            return host::again_after(advanced);
        }
        *self.registers = bytemuck::Zeroable::zeroed();
        self.inboxes.note_epochs();
        if let Some(report) = found {
            host::misused(report);
        }
    }
}

/// The member's own memory: addresses, and where that is.
#[derive(Clone, Copy)]
struct Memory([(Address, *mut u8, usize); 2]);

impl Memory {
    fn at(&self, address: Address, bytes: usize) -> *mut u8 {
        let within = |(start, _, len): &&(Address, *mut u8, usize)| {
            *start <= address && address + bytes as u64 <= *start + *len as u64
        };
        let (start, first, _) = self.0.iter().find(within).expect("a member's kernel works on the member's memory");
        first.wrapping_add((address - start) as usize)
    }

    /// Unit `i` of the `n` elements at an address; behind the last element are zeros.
    fn load<T: Lane>(&self, address: Address, n: u64, i: u64) -> Unit {
        let mut unit = Unit::default();
        let (start, bytes) = extent::<T>(n, i);
        // SAFETY: the launch holds this memory while the kernel runs; `at` finds so many bytes. A unit has 16.
        unsafe { self.at(address + start, bytes).copy_to_nonoverlapping(unit.as_mut_ptr().cast(), bytes) };
        unit
    }

    fn store<T: Lane>(&self, address: Address, n: u64, i: u64, unit: Unit) {
        let (start, bytes) = extent::<T>(n, i);
        // SAFETY: as above, and what is stored to is written by this kernel alone.
        unsafe { self.at(address + start, bytes).copy_from_nonoverlapping(unit.as_ptr().cast(), bytes) };
    }
}

/// Where a unit of `n` elements begins, and its bytes.
fn extent<T: Lane>(n: u64, i: u64) -> (u64, usize) {
    let all = n * size_of::<T>() as u64;
    (i * 16, (all - i * 16).min(16) as usize)
}

/// Units of `n` elements.
fn units<T: Lane>(n: u64) -> u64 {
    (n * size_of::<T>() as u64).div_ceil(16)
}

/// An operation, and the factors of the members.
struct Fold<T: Lane> {
    op: u32,
    factors: SmallVec<[T::Acc; MOST]>,
}

impl<T: Lane> Fold<T> {
    fn new(op: &HostArg, low: &HostArg, high: &HostArg) -> Self {
        let eights: [[f64; 8]; 2] = [low, high].map(host_kernels::value);
        Fold { op: host_kernels::value(op), factors: eights.into_iter().flatten().map(T::factor).collect() }
    }

    /// The fold of one unit of all members in rank order, as it may be sent.
    fn of(&self, units: &[Unit]) -> Unit {
        let (mut acc, mut result) = ([T::Acc::default(); 8], Unit::default());
        let acc = &mut acc[..16 / size_of::<T>()];
        let of = |k: usize| bytemuck::cast_slice::<u64, T>(&units[k]);
        let begun = if self.op == SCALED {
            host_kernels::first(acc, of(0), self.factors[0]);
            1
        } else {
            host_kernels::two(self.op, acc, of(0), of(1));
            2
        };
        (begun..units.len()).for_each(|k| host_kernels::next(self.op, acc, of(k), || self.factors[k]));
        let average = (self.op == AVG).then_some(units.len());
        host_kernels::last(bytemuck::cast_slice_mut::<u64, T>(&mut result), acc, average);
        guarded::<T>(result)
    }
}
