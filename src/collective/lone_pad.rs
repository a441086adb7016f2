//! The signal pad of a process with one GPU whose peers are GPUs of other processes of the host: sums of one trip among
//! them, by the kernels of [`inbox`], also with a norm of the rows ([`norm`](super::algorithm::norm)); and kernels of
//! crates above, in memory that the members lend each other ([`above`](super::algorithm::above)).
//!
//! `gpu-pool-cluster` makes a [`LonePad`] when the processes connect, passes the descriptors of their memory on, and
//! calls [`launch`](LonePad::launch) in the order of the cluster's commits. The pad's ordinals are process numbers.
//!
//! Invariants:
//!
//! * The kernels of a pad, and the calls of the transport between devices, which wait for other processes as well, run
//!   one after another on the device, in one order on all: [`in_turn`](LonePad::in_turn).
//! * A kernel that gives up leaves its inbox as it is, so nothing goes by the pads any more.

use super::{
    Arguments, Part,
    algorithm::{dims, inbox, ll::Push},
    kernels::value,
};
use crate::collective::algorithm::{NormKernel, Rows};
use crate::driver::{Address, DriverRef, DriverResult, Launch, LaunchDims, RawFunction, RawModule, RawStream};
use crate::fabric::{
    DType, DeviceBarrier, EMPTY, Limits, MOST, PadLayout, ReduceOp, Shape, layout::reported, signal_pad::REPORT,
    types::Algorithm,
};
use crate::sync::{load_word, raise_word};
use crate::{error::Result, kernel::builtin, memory::StreamCore};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};

/// The types that the kernels add up.
const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
/// In the page-locked memory, behind the abort word and the report word: room for the set-up.
const ROOM: usize = 256;
/// Elements of a sum of the [`probe`](LonePad::probe), more than a block takes; and words behind each pad, which the
/// others read then.
const PROBED: usize = 4096;

/// Why the set-up has failed.
pub type SetUp<T> = std::result::Result<T, String>;

fn told<T>(what: &'static str, done: DriverResult<T>) -> SetUp<T> {
    done.map_err(|fault| format!("{what}: {fault}"))
}

/// The signal pad of this process, with the mappings of the others'.
pub struct LonePad {
    layout: PadLayout,
    me: usize,
    memory: Arc<Memory>,
    limits: Limits,
    /// The stream of the last call that waits for other processes, and the number of that call.
    last: Mutex<Option<(Weak<StreamCore>, u64)>>,
    /// How long kernels wait for a peer.
    patience: Mutex<Duration>,
}

/// The kernels need it while they run.
struct Memory {
    driver: DriverRef,
    /// By the number of the process: where its pad is mapped; 0: nowhere.
    pads: Vec<Address>,
    bytes: usize,
    windows: Vec<Address>,
    /// Page-locked memory: the abort word, the report word at [`REPORT`], and [`ROOM`].
    words: *mut u8,
    module: Option<RawModule>,
    /// By [`FLOATS`].
    functions: SmallVec<[RawFunction; FLOATS.len()]>,
}

// SAFETY: the pointer is to page-locked memory of this object, and its users say which thread touches what.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps the pad of a process; `map` gets the address.
    fn map(&mut self, process: usize, map: impl FnOnce(Address) -> DriverResult) -> SetUp<()> {
        let at = told("addresses", self.driver.vm_reserve(self.bytes as u64))?;
        self.windows.push(at);
        told("memory", map(at))?;
        self.pads[process] = at;
        Ok(())
    }

    fn word(&self, offset: usize) -> *mut u64 {
        self.words.wrapping_add(offset).cast()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: all is this object's own; kernels that knew it have ended, or there were none (`LonePad::drop`).
        unsafe {
            self.pads.iter().filter(|at| **at != 0).for_each(|at| drop(self.driver.vm_unmap(*at, self.bytes)));
            self.windows.iter().for_each(|at| drop(self.driver.vm_release(*at, self.bytes as u64)));
            let _ = self.module.map(|module| self.driver.module_unload(module));
            if !self.words.is_null() {
                let _ = self.driver.host_free(self.words);
            }
        }
    }
}

/// The launch of a kernel, without the barrier: that takes the place of the first argument.
pub struct OwnKernel {
    pub(super) name: &'static str,
    pub(super) function: RawFunction,
    pub(super) dims: LaunchDims,
    pub(super) args: Arguments,
}

/// One member's part in a sum.
pub struct Trip<'a> {
    /// The members' processes, by rank.
    pub members: &'a [usize],
    /// The own rank.
    pub me: usize,
    /// The element type and the operation of a sum.
    pub of: (DType, ReduceOp),
    /// The members' factors, by rank, of `Scaled`; else none.
    pub factors: &'a [f64],
    /// The kernel that does more than the sum, or another one than the pad's.
    pub own: Option<&'a OwnKernel>,
    /// Elements, not 0.
    pub n: usize,
    /// Memory of this device: source, and destination, which may be the same.
    pub at: [Address; 2],
    /// The place of the gang.
    pub place: u64,
    /// The kernel gives up when it has waited for a peer for so long.
    pub deadline: Duration,
}

impl LonePad {
    /// The pad of process `me` of `count`, and the descriptor of its memory: the others [`import`](Self::import) it.
    /// Errors: why this device can have none.
    #[cfg(target_os = "linux")]
    pub fn new(driver: &DriverRef, me: usize, count: usize) -> SetUp<(LonePad, std::os::fd::OwnedFd)> {
        fail_if!(driver.watch().is_some(), "a checker watches the device, and knows no flags of kernels".into());
        let unit = driver.vm_granularity().ok_or("the GPU has no virtual memory management")?;
        let layout = PadLayout::one_trip(count);
        let bytes = (layout.bytes(count) + PROBED * 4).next_multiple_of(unit);
        let (pads, windows, words) = (vec![0; count], Vec::new(), std::ptr::null_mut());
        let (module, functions) = (None, SmallVec::new());
        let mut memory = Memory { driver: driver.clone(), pads, bytes, windows, words, module, functions };
        // SAFETY: fresh addresses, which no other code has.
        memory.map(me, |at| unsafe { driver.vm_map(at, bytes) })?;
        // SAFETY: mapped just now; no other code knows of it.
        let descriptor = told("the descriptor", unsafe { driver.vm_export(memory.pads[me], bytes) })?;
        memory.words = told("page-locked memory", driver.host_alloc(2 * ROOM + PROBED * 4))?;
        let module = told("kernels", driver.module_load(&builtin::INBOX.image))?;
        memory.module = Some(module);
        for dtype in FLOATS {
            let name = inbox::entry(dtype).expect("a kernel of floats").name;
            memory.functions.push(told("kernels", driver.function(module, name))?);
        }
        let (memory, limits, last, patience) = (Arc::new(memory), Limits::new(1), Mutex::default(), Mutex::default());
        Ok((LonePad { layout, me, memory, limits, last, patience }, descriptor))
    }

    /// Maps the pad of another process. Errors: why this device has no access to that memory.
    #[cfg(target_os = "linux")]
    pub fn import(&mut self, process: usize, descriptor: std::os::fd::BorrowedFd<'_>) -> SetUp<()> {
        let memory = Arc::get_mut(&mut self.memory).expect("shared by no other code");
        let (driver, bytes) = (memory.driver.clone(), memory.bytes);
        // SAFETY: fresh addresses, which no other code has.
        memory.map(process, |at| unsafe { driver.vm_import(at, bytes, descriptor) })
    }

    /// Empties the own pad, and writes the addresses of all pads into it. Nothing is sent to it before. The least
    /// multiprocessors of any device bound the kernels' blocks. Errors: the driver's.
    pub fn lay_out(&mut self, multiprocessors: u32) -> SetUp<()> {
        self.limits = Limits::new(multiprocessors);
        let Memory { driver, pads, .. } = &*self.memory;
        let (abort, own, inbox) = (self.memory.words.addr() as u64, pads[self.me], self.layout.inbox(pads.len()));
        let header = self.layout.header(pads, abort, abort + REPORT as u64);
        let (room, words) = (self.memory.word(ROOM), self.memory.word(2 * ROOM).cast::<u32>());
        // SAFETY: the room is larger, and no other code uses it; the own pad has these parts, and no kernel knows it.
        self.with_stream(Duration::from_secs(30), |stream| unsafe {
            room.copy_from_nonoverlapping(header.as_ptr(), header.len());
            (0..PROBED).for_each(|i| words.add(i).write(builtin::pattern(i as u64, self.me as u32)));
            driver.copy_to_device(self.behind(self.me), words.cast(), PROBED * 4, stream)?;
            driver.fill_u8(own, 0, inbox.start, stream)?;
            driver.fill_u8(own + inbox.start as u64, EMPTY, inbox.bytes(), stream)?;
            driver.copy_to_device(own, room.cast(), header.len() * 8, stream)
        })
    }

    /// Where a process's pad ends.
    fn behind(&self, process: usize) -> Address {
        self.memory.pads[process] + self.layout.bytes(self.memory.pads.len()) as u64
    }

    /// Whether this GPU reads the words that the others have written behind their pads. `at`: memory of a word.
    fn probe_loads(&self, at: Address, limit: Duration) -> SetUp<()> {
        const NAME: &str = "probe_check";
        let (driver, wrong) = (&self.memory.driver, self.memory.word(ROOM).cast::<u32>());
        let module = told("kernels", driver.module_load(&builtin::PROBE.image))?;
        let function = told("kernels", driver.function(module, NAME))?;
        for process in (0..self.memory.pads.len()).filter(|process| *process != self.me) {
            let words = Part { address: self.behind(process), bytes: PROBED * 4 }.slice(false);
            let found = Part { address: at, bytes: 4 }.slice(true);
            let args = [words, value(PROBED as u64), value(process as u32), found];
            let launch = Launch { name: NAME, function, host: None, dims: dims(8), args: &args, early: false };
            // SAFETY: all memory is there until `with_stream` has waited; no other code uses the page-locked word.
            self.with_stream(limit, |stream| unsafe {
                driver.fill_u8(at, 0, 4, stream)?;
                driver.launch(&launch, stream)?;
                driver.copy_to_host(wrong.cast(), at, 4, stream)
            })?;
            // SAFETY: the copy is over.
            match unsafe { wrong.read() } {
                0 => {}
                wrong => return Err(format!("of {PROBED} words of process {process} {wrong} are read wrong")),
            }
        }
        // SAFETY: its kernels are over. After an error one may run, so the module stays.
        told("kernels", unsafe { driver.module_unload(module) })
    }

    /// Loads, and sums of all processes, which all begin at about the same time: whether each GPU's memory is read and
    /// written by all. Errors: the reason, as text.
    pub fn probe(&self, limit: Duration) -> SetUp<()> {
        let (driver, count, bytes) = (&self.memory.driver, self.memory.pads.len(), PROBED * 4);
        let (members, of) = ((0..count).collect::<SmallVec<[usize; MOST]>>(), (DType::F32, ReduceOp::Sum));
        let (me, factors, own, at) = (self.me, &[], None, told("memory", driver.mem_alloc(bytes))?);
        let trip = Trip { members: &members, me, of, factors, own, n: PROBED, at: [at; 2], place: 1, deadline: limit };
        // SAFETY: aligned page-locked memory of so many bytes, which the host alone uses while no copy runs.
        let x = unsafe { std::slice::from_raw_parts_mut(self.memory.word(ROOM).cast::<f32>(), PROBED) };
        // A room is used again in the third.
        let probed = self.probe_loads(at, limit).and_then(|()| {
            (0..3).try_for_each(|round| {
                let value = |process: usize, i: usize| ((process + 1) * (1 + (i + round) % 13)) as f32;
                x.iter_mut().enumerate().for_each(|(i, x)| *x = value(self.me, i));
                // SAFETY: both have so many bytes, and live until `with_stream` has waited, or `mem_free` does.
                self.with_stream(limit * 2, |stream| unsafe {
                    driver.copy_to_device(at, x.as_ptr().cast(), bytes, stream)?;
                    self.launch(stream, &trip)?;
                    driver.copy_to_host(x.as_mut_ptr().cast(), at, bytes, stream)
                })?;
                let expected = |i: usize| (0..count).map(|process| value(process, i)).sum::<f32>();
                match (self.given_up(), x.iter().enumerate().find(|(i, x)| **x != expected(*i))) {
                    (Some((_, missing, limit)), _) => {
                        Err(format!("a kernel has waited for process {missing} for {limit:?}"))
                    }
                    (None, Some((i, x))) => Err(format!("a sum is wrong: {x}, not {}", expected(i))),
                    (None, None) => Ok(()),
                }
            })
        });
        // SAFETY: from `mem_alloc`; kernels that still run end by the abort.
        probed.and(told("memory", unsafe { driver.mem_free(at) }))
    }

    fn with_stream(&self, limit: Duration, work: impl FnOnce(RawStream) -> DriverResult) -> SetUp<()> {
        let driver = &self.memory.driver;
        let stream = told("a stream", driver.stream_create(0))?;
        let done = work(stream).and_then(|()| driver.stream_wait_idle(stream, limit));
        // SAFETY: made above, and used here alone.
        let destroyed = unsafe { driver.stream_destroy(stream) };
        if done != Ok(true) {
            self.abort();
        }
        let done = told("set-up", done.and_then(|done| destroyed.map(|()| done)))?;
        if done { Ok(()) } else { Err("the GPU does not get ready".into()) }
    }

    /// The most bytes of a sum of so many members.
    pub fn most(&self, members: usize) -> usize {
        inbox::most_whole(members).min(self.layout.inbox)
    }

    /// Whether the kernels add up such elements.
    pub fn sums(dtype: DType) -> bool {
        FLOATS.contains(&dtype)
    }

    /// The limits of the blocks of a kernel that waits for other members.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The kernel that adds these rows up, and norms them; none where it does not fit. All members find the same: a
    /// pool's wish for an algorithm, which is of one process, does not count.
    pub(super) fn norm(&self, rows: Rows, members: usize) -> Option<NormKernel> {
        NormKernel::of(rows, members, self.layout, &self.limits, Algorithm::Auto)
    }

    /// Launches this member's kernel: a sum in the order of ranks.
    ///
    /// # Safety
    /// Source, destination and the norm's memory are memory of this device; they live, and nothing else touches them,
    /// until the stream has passed the kernel. All members launch theirs, in the same order with all other kernels of
    /// the pads; `n` elements are at most [`most`](Self::most) bytes, or as many as an own kernel takes. Its blocks are
    /// few enough for `limits`, and its arguments name memory like that. Errors: the driver's.
    pub unsafe fn launch(&self, stream: RawStream, trip: &Trip<'_>) -> DriverResult {
        let &Trip { members, me, of: (dtype, op), factors, own, n, at, place, deadline } = trip;
        let (count, bytes) = (members.len(), n * dtype.size());
        debug_assert!(n > 0 && (own.is_some() || bytes <= self.most(count)) && members[me] == self.me);
        let meet = DeviceBarrier {
            signals: self.memory.pads[self.me],
            members: DeviceBarrier::members(members.iter().copied()),
            place,
            deadline: u64::try_from(deadline.as_nanos()).unwrap_or(0),
            count: count as u32,
            me: me as u32,
            spare: 0,
        };
        let [source, destination] = at.map(|address| Part { address, bytes });
        let (name, function, dims, args) = match own {
            Some(own) => {
                let mut args = own.args.clone();
                args[0] = value(meet);
                (own.name, own.function, own.dims, args)
            }
            None => {
                let route = Shape::AllReduce { len: n }.packets(count, me).expect("few enough members").route;
                let float = FLOATS.iter().position(|float| *float == dtype).expect("chosen for floats");
                let (name, blocks) = (inbox::entry(dtype).expect("a float").name, inbox::blocks(bytes, &self.limits));
                let args = Push { n, op, route, factors, source, destination, meet }.args();
                (name, self.memory.functions[float], dims(blocks), args)
            }
        };
        let launch = Launch { name, function, host: None, dims, args: &args, early: false };
        *self.patience.lock() = deadline;
        // SAFETY: the caller's promise.
        unsafe { self.memory.driver.launch(&launch, stream) }
    }

    /// Submits a call that waits for other processes to a stream, behind the one before. The commits of the cluster
    /// order the callers. Errors: those of `submit`, and the driver's.
    pub fn in_turn<R>(&self, stream: &Arc<StreamCore>, submit: impl FnOnce() -> Result<R>) -> Result<R> {
        let last = self.last.lock().take();
        if let Some((other, number)) = last.and_then(|(other, number)| Some((other.upgrade()?, number))) {
            stream.wait_for("collective", &other, number)?;
        }
        let submitted = submit();
        *self.last.lock() = Some((Arc::downgrade(stream), stream.submit()));
        submitted
    }

    /// Ends the waits of all kernels, for good.
    pub fn abort(&self) {
        // SAFETY: a word of live memory, which the host writes here alone.
        unsafe { raise_word(self.memory.word(0), u64::MAX) };
    }

    /// The place of the gang whose kernel has given up, the process that it has waited for, and for how long at most.
    pub fn given_up(&self) -> Option<(u64, usize, Duration)> {
        // SAFETY: a word of live memory; kernels write it whole.
        let report = unsafe { load_word(self.memory.word(REPORT)) };
        reported(report).map(|(place, missing)| (place, missing, *self.patience.lock()))
    }
}

impl Drop for LonePad {
    fn drop(&mut self) {
        let last = self.last.get_mut().take().and_then(|(stream, _)| stream.upgrade());
        let idle = |stream: Arc<StreamCore>| self.memory.driver.stream_wait_idle(stream.raw, Duration::from_secs(5));
        if last.is_some_and(|stream| idle(stream) != Ok(true)) {
            event!(warn, "pad_leaked", "the signal pad of a process is leaked: a kernel may still use it");
            std::mem::forget(self.memory.clone());
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/collective/lone_pad_tests.rs"]
mod tests;
