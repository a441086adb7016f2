//! The signal pad of a process with one GPU whose peers are GPUs of other processes of the host: sums of one trip among
//! them, by the kernels of [`inbox`].
//!
//! `gpu-pool-cluster` makes a [`LonePad`] when the processes connect, passes the descriptors of the pads' memory on, and
//! calls [`sum`](LonePad::sum) in the order in which the cluster commits. The ordinals of the pad are the numbers of
//! the processes.
//!
//! Invariants:
//!
//! * The kernels of a pad, and the calls of the transport between devices, which wait for other processes as well, run
//!   one after another on the device, in one order on all: [`in_turn`](LonePad::in_turn).
//! * A kernel that gives up leaves its inbox as it is, so nothing goes by the pads any more.

use super::{
    algorithm::{dims, inbox, ll::Push},
    kernels::Part,
};
use crate::{
    driver::{Address, DriverRef, DriverResult, Launch, RawFunction, RawModule, RawStream},
    error::Result,
    fabric::{
        layout::{DeviceBarrier, EMPTY, MOST, PadLayout, reported},
        limits::Limits,
        plan::Shape,
        signal_pad::REPORT,
        types::{DType, ReduceOp},
    },
    kernel::builtin,
    memory::stream::StreamCore,
    sync::{load_word, raise_word},
};
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
/// Elements of a sum of the [`probe`](LonePad::probe): more than a block takes.
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
    driver: DriverRef,
}

/// What the kernels need while they run.
struct Memory {
    /// By the number of the process.
    pads: Vec<Option<Window>>,
    words: Words,
    kernels: Kernels,
}

/// Addresses, and the memory that is mapped there.
struct Window {
    driver: DriverRef,
    at: Address,
    bytes: usize,
    mapped: bool,
}

impl Window {
    /// Maps a pad; `map` gets address and size.
    fn new(driver: &DriverRef, bytes: usize, map: impl FnOnce(Address, usize) -> DriverResult) -> SetUp<Window> {
        let unit = driver.vm_granularity().ok_or("the GPU has no virtual memory management")?;
        let bytes = bytes.next_multiple_of(unit);
        let at = told("addresses", driver.vm_reserve(bytes as u64))?;
        let mut window = Window { driver: driver.clone(), at, bytes, mapped: false };
        told("memory", map(at, bytes))?;
        window.mapped = true;
        Ok(window)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: made by `new`; kernels that knew the addresses have ended, or there were none (`LonePad::drop`).
        unsafe {
            let unmapped = if self.mapped { self.driver.vm_unmap(self.at, self.bytes) } else { Ok(()) };
            let _ = unmapped.and_then(|()| self.driver.vm_release(self.at, self.bytes as u64));
        }
    }
}

/// Page-locked memory: the abort word, the report word at [`REPORT`], and [`ROOM`].
struct Words(DriverRef, usize);

impl Words {
    fn at(&self, offset: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.1 + offset)
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: from `host_alloc`; kernels that knew the words have ended.
        let _ = unsafe { self.0.host_free(self.at(0)) };
    }
}

/// The kernels by [`FLOATS`].
struct Kernels(DriverRef, RawModule, [RawFunction; FLOATS.len()]);

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded by `LonePad::new`; none of its kernels is in flight or used again.
        let _ = unsafe { self.0.module_unload(self.1) };
    }
}

/// One member's part in a sum.
pub struct Trip<'a> {
    /// The members' processes, by rank.
    pub members: &'a [usize],
    /// The own rank.
    pub me: usize,
    /// What is added up how.
    pub of: (DType, ReduceOp),
    /// Elements, not 0.
    pub n: usize,
    /// By rank where the operation is `Scaled`, else none.
    pub factors: &'a [f64],
    /// Memory of this device; both may be the same.
    pub source: Address,
    /// Where the sum goes.
    pub destination: Address,
    /// The place of the gang.
    pub place: u64,
    /// The kernel gives up when it has waited for a peer for so long.
    pub deadline: Duration,
}

impl LonePad {
    /// The pad of process `me` of `count`, and the descriptor of its memory, for [`import`](Self::import) by the others.
    ///
    /// # Errors
    /// Why this device can have none.
    #[cfg(target_os = "linux")]
    pub fn new(driver: &DriverRef, me: usize, count: usize) -> SetUp<(LonePad, std::os::fd::OwnedFd)> {
        if driver.watch().is_some() {
            return Err("a checker watches the device, and knows no flags of kernels".into());
        }
        let layout = PadLayout::one_trip(count);
        // SAFETY: fresh addresses, which no other code has.
        let own = Window::new(driver, layout.bytes(count), |at, bytes| unsafe { driver.vm_map(at, bytes) })?;
        // SAFETY: mapped just now; no other code knows of it.
        let memory = told("the descriptor", unsafe { driver.vm_export(own.at, own.bytes) })?;
        let words = told("page-locked memory", driver.host_alloc(ROOM + PROBED * 4))?.expose_provenance();
        let words = Words(driver.clone(), words);
        let module = told("kernels", driver.module_load(&builtin::INBOX.image))?;
        let mut kernels = Kernels(driver.clone(), module, [RawFunction(0); FLOATS.len()]);
        for (function, dtype) in kernels.2.iter_mut().zip(FLOATS) {
            let name = inbox::entry(dtype).expect("a kernel of floats").name;
            *function = told("kernels", driver.function(module, name))?;
        }
        let mut pads: Vec<_> = (0..count).map(|_| None).collect();
        pads[me] = Some(own);
        let (limits, last, patience) = (Limits::new(1), Mutex::default(), Mutex::default());
        let pad = Arc::new(Memory { pads, words, kernels });
        Ok((LonePad { layout, me, memory: pad, limits, last, patience, driver: driver.clone() }, memory))
    }

    /// Maps the pad of another process. It must not be laid out by [`lay_out`](Self::lay_out) before all are there.
    ///
    /// # Errors
    /// Why this device has no access to that memory.
    #[cfg(target_os = "linux")]
    pub fn import(&mut self, process: usize, memory: std::os::fd::BorrowedFd<'_>) -> SetUp<()> {
        let (driver, bytes) = (&self.driver, self.layout.bytes(self.memory.pads.len()));
        // SAFETY: fresh addresses, which no other code has.
        let window = Window::new(driver, bytes, |at, bytes| unsafe { driver.vm_import(at, bytes, memory) })?;
        Arc::get_mut(&mut self.memory).expect("shared by no other code").pads[process] = Some(window);
        Ok(())
    }

    /// Empties the own pad, and writes the addresses of all pads into it. Nothing is sent to it before. The least
    /// multiprocessors of any device bound the kernels' blocks.
    ///
    /// # Errors
    /// The driver's.
    pub fn lay_out(&mut self, multiprocessors: u32) -> SetUp<()> {
        self.limits = Limits::new(multiprocessors);
        let Memory { pads, words, .. } = &*self.memory;
        let peers: SmallVec<[Address; MOST]> = pads.iter().map(|pad| pad.as_ref().map_or(0, |pad| pad.at)).collect();
        let (abort, own) = (words.1 as u64, peers[self.me]);
        let header = self.layout.header(&peers, abort, abort + REPORT as u64);
        let (inbox, room, bytes) = (self.layout.inbox(peers.len()), words.at(ROOM), header.len() * 8);
        // SAFETY: the room has more bytes, and no other code uses it.
        unsafe { room.copy_from_nonoverlapping(header.as_ptr().cast(), bytes) };
        self.with_stream(Duration::from_secs(30), |stream| {
            // SAFETY: the own pad has these parts, and no kernel knows it yet; the page-locked memory lives.
            unsafe {
                self.driver.fill_u8(own, 0, inbox.start, stream)?;
                self.driver.fill_u8(own + inbox.start as u64, EMPTY, inbox.bytes(), stream)?;
                self.driver.copy_to_device(own, room, bytes, stream)
            }
        })
    }

    /// Sums of all processes, which all begin at about the same time: whether the memory of each is written by all.
    ///
    /// # Errors
    /// What is wrong.
    pub fn probe(&self, limit: Duration) -> SetUp<()> {
        let bytes = PROBED * 4;
        let at = told("memory", self.driver.mem_alloc(bytes))?;
        // More than once: a room is used again in the third.
        let probed = (0..4).try_for_each(|round| self.probe_once(round, at, limit));
        // SAFETY: from `mem_alloc`; `with_stream` has waited for the kernels, or aborted them.
        let freed = told("memory", unsafe { self.driver.mem_free(at) });
        probed.and(freed)
    }

    fn probe_once(&self, round: u32, at: Address, limit: Duration) -> SetUp<()> {
        let Memory { pads, words, .. } = &*self.memory;
        let (count, room, bytes) = (pads.len(), words.at(ROOM).cast::<f32>(), PROBED * 4);
        let value = |process: usize, i: usize| ((process + 1) * (1 + (i + round as usize) % 13)) as f32;
        // SAFETY: aligned page-locked memory of so many bytes, which the host alone uses while no copy runs.
        let x = unsafe { std::slice::from_raw_parts_mut(room, PROBED) };
        x.iter_mut().enumerate().for_each(|(i, x)| *x = value(self.me, i));
        let members: SmallVec<[usize; MOST]> = (0..count).collect();
        let trip = Trip {
            members: &members,
            me: self.me,
            of: (DType::F32, ReduceOp::Sum),
            n: PROBED,
            factors: &[],
            source: at,
            destination: at,
            place: 1,
            deadline: limit,
        };
        self.with_stream(limit * 2, |stream| {
            // SAFETY: both have so many bytes, and live until `with_stream` has waited.
            unsafe {
                self.driver.copy_to_device(at, room.cast(), bytes, stream)?;
                self.sum(stream, &trip)?;
                self.driver.copy_to_host(room.cast(), at, bytes, stream)
            }
        })?;
        if let Some((_, missing, limit)) = self.given_up() {
            return Err(format!("a kernel has waited for process {missing} for {limit:?}"));
        }
        let expected = |i: usize| (0..count).map(|process| value(process, i)).sum::<f32>();
        match x.iter().enumerate().find(|(i, x)| **x != expected(*i)) {
            Some((i, x)) => Err(format!("a sum over the GPUs' memory is wrong: {x}, not {}", expected(i))),
            None => Ok(()),
        }
    }

    /// Runs work of the set-up, and waits for it.
    fn with_stream(&self, limit: Duration, work: impl FnOnce(RawStream) -> DriverResult) -> SetUp<()> {
        let stream = told("a stream", self.driver.stream_create(0))?;
        let submitted = told("set-up", work(stream));
        let mut idle = told("set-up", self.driver.stream_wait_idle(stream, limit));
        if idle == Ok(false) {
            self.abort();
            idle = told("set-up", self.driver.stream_wait_idle(stream, limit));
        }
        // SAFETY: made above, and used here alone.
        let destroyed = told("a stream", unsafe { self.driver.stream_destroy(stream) });
        submitted.and(idle).and_then(|idle| if idle { destroyed } else { Err("the GPU does not get ready".into()) })
    }

    /// The most bytes of a sum of so many members.
    pub fn most(&self, members: usize) -> usize {
        most(members, self.layout)
    }

    /// Whether there is a kernel for these elements.
    pub fn sums(dtype: DType) -> bool {
        FLOATS.contains(&dtype)
    }

    /// Launches this member's kernel: a sum in the order of ranks.
    ///
    /// # Safety
    /// Source and destination are memory of this device; they live, and nothing else touches them, until the stream has
    /// passed the kernel. All members launch theirs, in the same order with all other kernels of the pads; `n` elements
    /// are at most [`most`](Self::most) bytes.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn sum(&self, stream: RawStream, trip: &Trip<'_>) -> DriverResult {
        let &Trip { members, me, of: (dtype, op), n, factors, source, destination, place, deadline } = trip;
        let (count, bytes) = (members.len(), n * dtype.size());
        debug_assert!(n > 0 && bytes <= self.most(count) && members[me] == self.me);
        let meet = DeviceBarrier {
            signals: self.memory.pads[self.me].as_ref().map_or(0, |own| own.at),
            members: DeviceBarrier::members(members.iter().copied()),
            place,
            deadline: u64::try_from(deadline.as_nanos()).unwrap_or(0),
            count: count as u32,
            me: me as u32,
            spare: 0,
        };
        let packets = Shape::AllReduce { len: n }.packets(count, me).expect("few enough members");
        let [source, destination] = [source, destination].map(|address| Part { address, bytes });
        let args = Push { n, op, route: packets.route, factors, source, destination, meet }.args();
        let at = FLOATS.iter().position(|float| *float == dtype).expect("chosen for floats");
        let (dims, function) = (dims(inbox::blocks(bytes, &self.limits)), self.memory.kernels.2[at]);
        let name = inbox::entry(dtype).expect("chosen for floats").name;
        let launch = Launch { name, function, host: None, dims, args: &args, early: false };
        *self.patience.lock() = deadline;
        // SAFETY: the caller's promise.
        unsafe { self.driver.launch(&launch, stream) }
    }

    /// Submits a call that waits for other processes to a stream, behind the one before. The commits of the cluster
    /// order the callers.
    ///
    /// # Errors
    /// Those of `submit`, and the driver's.
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
        unsafe { raise_word(self.memory.words.at(0).cast(), u64::MAX) };
    }

    /// The place of the gang whose kernel has given up, the process that it has waited for, and how long a kernel waits.
    pub fn given_up(&self) -> Option<(u64, usize, Duration)> {
        // SAFETY: a word of live memory; kernels write it whole.
        let report = unsafe { load_word(self.memory.words.at(REPORT).cast()) };
        reported(report).map(|(place, missing)| (place, missing, *self.patience.lock()))
    }
}

/// The most bytes of a sum of so many members by pads of this layout.
fn most(members: usize, layout: PadLayout) -> usize {
    inbox::most_whole(members).min(layout.inbox)
}

impl Drop for LonePad {
    fn drop(&mut self) {
        let last = self.last.get_mut().take().and_then(|(stream, _)| stream.upgrade());
        let idle = |stream: Arc<StreamCore>| self.driver.stream_wait_idle(stream.raw, Duration::from_secs(5));
        if last.is_some_and(|stream| idle(stream) != Ok(true)) {
            event!(warn, "the signal pad of a process is leaked: a kernel may still use it");
            std::mem::forget(self.memory.clone());
        }
    }
}

impl std::fmt::Debug for LonePad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LonePad")
            .field("me", &self.me)
            .field("processes", &self.memory.pads.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "../../tests/unit/collective/lone_pad_tests.rs"]
mod tests;
