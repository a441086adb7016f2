//! A member's work in every collective of several processes: it works inside its process, stages, and meets.
//!
//! The shapes' files use a [`HierarchicalCall`]. It uses this process's members as a group, and all processes' scope.

use super::{cut::Cut, rail_map::RailMap};
use crate::internals::*;
use crate::link::{WorldLink, link_of};
use crate::runtime::{
    Access, Across, Address, Area, Call, Descriptor, GRAIN, Op, Payload, Request, Shape, StreamCore, area,
};
use crate::traits::{Arrival, Commit, CommonMemory, DeviceTransport, HostTransport, MOST_NOTE, Transport, WorldScope};
use crate::wire::shortened;
use gpu_pool::{AsView, DType, Device, Error, Group, OnStream, PinnedBuffer, ReduceOp, Result};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::{
    cell::{Cell, RefCell},
    fmt::Write as _,
    ops::Range,
    rc::Rc,
    sync::Arc,
};

/// The longest text of a call that is told as it is.
pub(super) const MOST_TEXT: usize = 160;

pub(super) type LocalDescriptors = SmallVec<[Arc<Descriptor>; 8]>;

pub(super) struct HierarchicalCall<'g, 'd> {
    pub group: &'g Group<'d>,
    pub across: &'g Across,
    pub here: Group<'d>,
    pub rail_map: RailMap,
    pub call: &'g Call,
    /// The steps inside leave most of the device to other work.
    overlapped: Cell<bool>,
    pub link: &'d WorldLink,
    pub scope: Arc<dyn WorldScope>,
    /// Where in [registered](super::registered) memory the call works, if it does.
    pub registered: Cell<Option<u64>>,
    /// Staging is ordered by the library even where the program orders its own work.
    dev: OnStream<'d>,
}

/// A [`Transport`] that is there.
pub(super) enum Carrier {
    Host(Arc<dyn HostTransport>),
    Device(Arc<dyn DeviceTransport>),
}

impl<'g, 'd> HierarchicalCall<'g, 'd> {
    pub fn new(group: &'g Group<'d>, call: &'g Call, overlapped: bool) -> Result<Self> {
        let (dev, across) = (group.device(), group.across().expect("only groups that span processes call it"));
        dev.refuse_capture(call, "a graph holds no collectives of several processes")?;
        dev.check()?;
        let link = link_of(dev);
        link.world.check()?;
        let scope = link.join(dev.own_gang())?.clone();
        let rail_map = match link.world.transport() {
            Transport::Device(_) => RailMap::by_ordinal(&across.hosts, &across.places, link.world.devices()),
            _ => RailMap::by_index(&across.hosts),
        };
        let (overlapped, registered) = (Cell::new(overlapped), Cell::new(None));
        let (here, dev) = (group.here(), dev.in_order());
        Ok(HierarchicalCall { group, across, here, rail_map, call, overlapped, link, scope, registered, dev })
    }

    pub fn carrier(&self) -> Result<Carrier> {
        match self.link.world.transport() {
            Transport::None(error) => Err(error.clone()),
            Transport::Host(transport) => Ok(Carrier::Host(transport.clone())),
            Transport::Device(transport) => Ok(Carrier::Device(transport.clone())),
        }
    }

    pub fn members(&self) -> usize {
        self.across.places.len()
    }

    pub fn cut(&self, len: usize, dtype: DType) -> Cut<'_> {
        Cut { start: 0, len, rail_map: &self.rail_map, host: self.across.me, grain: GRAIN / dtype.size() }
    }

    pub fn overlap(&self, overlapped: bool) {
        self.overlapped.set(self.overlapped.get() || overlapped);
    }

    pub fn inside(&self, dtype: DType, reduce: Option<ReduceOp>, shape: Shape, [from, to]: [&Area; 2]) -> Result<()> {
        let op = match &shape {
            Shape::ReduceScatter { .. } => "reduce_scatter_v",
            Shape::AllGather { .. } => "all_gather_v",
            _ => "all_to_all_v",
        };
        let mut call = Call::at(op, self.call.site).elements(dtype, shape.len(self.here.count()));
        call.reduce = reduce;
        let request = Request {
            call: call.from(self.call.origin),
            dtype,
            reduce: reduce.unwrap_or(ReduceOp::Sum),
            shape: Some(shape),
            source: Some(from.clone()),
            destination: Some(to.clone()),
            counts: None,
            extra: Vec::new(),
            rank_order: false,
            own: None,
        };
        if self.overlapped.get() { self.here.beside(&self.dev).run(request) } else { self.here.run(request) }
    }

    pub fn scratch(&self, bytes: usize) -> Result<Area> {
        Ok(area(self.dev.allocate::<u8>(self.call.op, bytes)?.view()))
    }

    pub fn zeros(&self, bytes: usize) -> Result<Area> {
        Ok(area(self.dev.zeros::<u8>(bytes)?.view()))
    }

    /// The memory that software GPUs of all processes have in common.
    pub fn common_memory(&self, transport: &Arc<dyn HostTransport>) -> Option<Arc<dyn CommonMemory>> {
        if self.group.device().is_software() { transport.clone().common_memory() } else { None }
    }

    /// Memory of the host as memory of this software GPU.
    ///
    /// # Safety
    /// As of [`Device::adopt`].
    pub unsafe fn adopt(&self, at: *mut u8, bytes: usize, keep: impl Send + 'static) -> Result<Area> {
        // SAFETY: the caller's promise.
        Ok(area(unsafe { self.dev.adopt::<u8>(at.expose_provenance() as u64, bytes, keep)? }.view()))
    }

    pub fn op(&self) -> Result<Op<'_>> {
        self.dev.op(self.call.op)
    }

    /// Page-locked memory, before the member arrives.
    pub fn pinned(&self, bytes: usize) -> Result<PinnedBuffer<u8>> {
        let dev: &Device = &self.dev;
        dev.pinned_scratch(self.call.op, bytes)
    }

    /// A copy of this device's memory in page-locked memory. It is complete.
    pub fn stage(&self, from: &Area) -> Result<Arc<PinnedBuffer<u8>>> {
        let to = self.start_to_stage(from)?;
        to.as_slice()?;
        Ok(Arc::new(to))
    }

    /// The same, asynchronous: a reader of the page-locked memory waits.
    pub fn start_to_stage(&self, from: &Area) -> Result<PinnedBuffer<u8>> {
        let to = self.pinned(from.bytes.len())?;
        self.copy_down(from, &to)?;
        Ok(to)
    }

    pub fn copy_down(&self, from: &Area, to: &PinnedBuffer<u8>) -> Result<()> {
        debug_assert!(from.bytes.len() <= to.len());
        if from.bytes.is_empty() {
            return Ok(());
        }
        let mut op = self.dev.op(self.call.op)?;
        op.touch(&from.block, from.bytes.clone(), Access::Read, false)?;
        op.touch(to.block(), to.start()..to.start() + from.bytes.len(), Access::Write, true)?;
        // SAFETY: both ranges have so many bytes, and `op` orders and records the copy; the host waits for it before it
        // reads the page-locked memory.
        op.submit(|driver, stream| unsafe { driver.copy_to_host(to.ptr(), from.address, from.bytes.len(), stream) })
    }

    /// Copies a range of page-locked memory to this device. Asynchronous.
    pub fn upload(&self, from: &PinnedBuffer<u8>, range: Range<usize>, to: &Area) -> Result<()> {
        debug_assert!(range.len() == to.bytes.len() && range.end <= from.len());
        if range.is_empty() {
            return Ok(());
        }
        let mut op = self.dev.op(self.call.op)?;
        op.touch(&to.block, to.bytes.clone(), Access::Write, false)?;
        let used = from.start() + range.start..from.start() + range.end;
        op.touch(from.block(), used, Access::Read, true)?;
        // SAFETY: both ranges have so many bytes, and `op` orders and records the copy. The host waits for it before it
        // writes the page-locked memory again.
        op.submit(|driver, stream| unsafe {
            driver.copy_to_device(to.address, from.ptr().wrapping_add(range.start), range.len(), stream)
        })
    }

    pub fn copy(&self, from: &Area, to: &Area) -> Result<()> {
        debug_assert_eq!(from.bytes.len(), to.bytes.len());
        if from.bytes.is_empty() {
            return Ok(());
        }
        let mut op = self.op()?;
        op.touch(&from.block, from.bytes.clone(), Access::Read, false)?;
        op.touch(&to.block, to.bytes.clone(), Access::Write, false)?;
        // SAFETY: both ranges are this device's and have so many bytes; `op` orders and records the copy.
        op.submit(|driver, stream| unsafe { driver.copy_within(to.address, from.address, from.bytes.len(), stream) })
    }

    /// All members of all processes meet: first those of this process, then the processes. The data to send is staged.
    /// Returns the descriptors of this process's members, and the commit. `note` is for all processes.
    pub fn meet(
        &self,
        payload: Payload,
        note: impl FnOnce(&LocalDescriptors) -> Vec<u8>,
    ) -> Result<(LocalDescriptors, Commit)> {
        let across = self.across;
        let told = self.here.meet(self.call, payload)?;
        let note = if across.here == 0 { note(&told) } else { Vec::new() };
        debug_assert!(note.len() <= MOST_NOTE);
        let number = self.next_number();
        // Flight records show the wait for other processes.
        let _waits = self.group.device().note_call(self.call);
        let met = self.scope.meet(Arrival {
            members: &across.places,
            number,
            place: across.places[self.group.rank()],
            call: &headline(self.call, self.registered.get()),
            site: self.call.site,
            leads: across.here == 0,
            proxied: false,
            note,
        });
        match met {
            Ok(commit) => Ok((told, commit)),
            // Every process hears of it, and no buffer was touched.
            Err(error @ Error::WorldMismatch { .. }) => Err(error),
            Err(error) => self.done(Err(error)),
        }
    }

    /// The number of the group's next meeting. All members count alike.
    pub fn next_number(&self) -> u64 {
        let number = self.across.calls.get() + 1;
        self.across.calls.set(number);
        number
    }

    /// The end of a transport's work after a commit. After an error it may still use the memory.
    pub fn finish(&self, access: Op<'_>, submitted: Result<()>) -> Result<()> {
        if submitted.is_err() {
            access.keep();
        }
        access.submitted();
        self.done(submitted)
    }

    /// The end of what follows a commit: the other processes count on it, so a failure fails the gang.
    pub fn done<R>(&self, done: Result<R>) -> Result<R> {
        done.inspect_err(|error| self.fail(error))
    }

    pub fn fail(&self, error: &Error) {
        let dev = self.group.device();
        dev.own_gang().poison(dev.index(), error.clone());
    }
}

/// Copies memory of this device, which the caller has ordered on the stream.
pub(super) fn copy_within(
    hier: &HierarchicalCall<'_, '_>,
    stream: &StreamCore,
    to: Address,
    from: Address,
    bytes: usize,
) -> Result<()> {
    let handle = hier.group.device().handle();
    // SAFETY: both ranges are this device's and have so many bytes; the caller has ordered and notes their use.
    handle.check(hier.call.op, unsafe { handle.driver.copy_within(to, from, bytes, stream.raw) })
}

/// The content of a note: bytes, or the number of bytes that come by another way.
#[derive(Serialize, Deserialize)]
pub(super) enum Noted<'a> {
    Here(&'a [u8]),
    Later(usize),
}

impl Noted<'_> {
    pub fn of(bytes: &[u8]) -> Noted<'_> {
        // The kind and the length take four bytes at most.
        if bytes.len() + 4 <= MOST_NOTE { Noted::Here(bytes) } else { Noted::Later(bytes.len()) }
    }

    pub fn write(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("bytes can be written")
    }

    /// None: another process has sent nonsense.
    pub fn read(note: &[u8]) -> Option<Noted<'_>> {
        postcard::take_from_bytes(note).ok().filter(|(_, rest)| rest.is_empty()).map(|(noted, _)| noted)
    }
}

pub(super) fn part(of: &Area, range: Range<usize>) -> Area {
    debug_assert!(range.end <= of.bytes.len());
    let (start, end) = (of.bytes.start + range.start, of.bytes.start + range.end);
    Area { block: of.block.clone(), address: of.address + range.start as u64, bytes: start..end }
}

pub(super) fn bytes(range: &Range<usize>, size: usize) -> Range<usize> {
    range.start * size..range.end * size
}

type Headline = (Call, Option<u64>, Rc<str>);
thread_local!(static LAST: RefCell<Option<Headline>> = const { RefCell::new(None) });

/// The text that all processes must have alike. Members may give factors of their own.
pub(super) fn headline(call: &Call, registered: Option<u64>) -> Rc<str> {
    LAST.with_borrow_mut(|last| {
        // Most calls are like the thread's last one.
        let known = last.take().filter(|(known, at, _)| *at == registered && known.differs(call).is_none());
        let new = || (call.clone(), registered, headline_of(call, registered).into());
        last.insert(known.unwrap_or_else(new)).2.clone()
    })
}

fn headline_of(call: &Call, registered: Option<u64>) -> String {
    let mut text = String::with_capacity(MOST_TEXT);
    // A string takes all.
    let _ = match call.reduce {
        Some(ReduceOp::Scaled(_)) => write!(text, "{}", call.clone().reducing(ReduceOp::Scaled(1.0))),
        _ => write!(text, "{call}"),
    };
    if let Some(at) = registered {
        let _ = write!(text, " in registered memory, from byte {at}");
    }
    if text.len() <= MOST_TEXT { text } else { shortened(&text, MOST_TEXT) }
}
