//! The way of a member's messages over rails between devices: its own device's rail, or that of another device of this
//! process, through page-locked memory.
//!
//! A rail joins devices with one ordinal, and each process has the same messages on it in the order of commits. A
//! member whose device has another ordinal copies its elements to page-locked memory, which every device can read and
//! write, and submits the call to a stream of the rail's device ([`Shared::courier`]). No thread waits: events order
//! the two streams. Used by [`device_rail`](super::device_rail) and [`hops`](super::hops).
//!
//! Invariant: a way's memory is there before the member arrives.
//!
//! [`Shared::courier`]: crate::thread::worker::Shared::courier

use super::{
    super::transport::{DeviceTransport, RailCall, RailMessage},
    trip::Trip,
};
use crate::{
    driver::{Address, Driver, DriverResult},
    error::Result,
    fabric::descriptor::{Area, Payload},
    memory::{PinnedBuffer, hazard::Access, stream::StreamCore},
};
use std::sync::Arc;

/// Messages in page-locked memory begin at multiples of this many bytes.
const ALIGN: usize = 256;

/// A member's way to the other processes.
pub(super) struct Way<'t, 'g, 'd> {
    pub trip: &'t Trip<'g, 'd>,
    pub transport: Arc<dyn DeviceTransport>,
    /// The stream of the rail's device, if that is another one than the member's.
    courier: Option<Arc<StreamCore>>,
    /// The stream of the member's own device for calls that run beside its other work.
    beside: Option<Arc<StreamCore>>,
}

/// Messages that are ready to go.
#[derive(Default)]
pub(super) struct Load {
    messages: Vec<RailMessage>,
    detour: Option<Detour>,
}

struct Detour {
    memory: PinnedBuffer<u8>,
    /// The same messages in that memory.
    messages: Vec<RailMessage>,
}

impl<'t, 'g, 'd> Way<'t, 'g, 'd> {
    /// `ordinal`: of the devices that the rail joins. `beside`: if it is the member's own, calls run beside its other
    /// work.
    pub fn new(
        trip: &'t Trip<'g, 'd>,
        transport: Arc<dyn DeviceTransport>,
        ordinal: usize,
        beside: bool,
    ) -> Result<Self> {
        if let Some(error) = transport.failed(ordinal) {
            return Err(error);
        }
        let (own, shared) = (trip.group.dev.index(), &trip.group.dev.worker.shared);
        let courier = if ordinal == own { None } else { Some(shared.courier(ordinal)?) };
        let beside = if beside && ordinal == own { Some(shared.courier(own)?) } else { None };
        Ok(Way { trip, transport, courier, beside })
    }

    /// The stream of calls of the member's own device, and of the work that goes with them.
    pub fn stream(&self) -> &Arc<StreamCore> {
        self.beside.as_ref().unwrap_or(&self.trip.group.dev.stream)
    }

    /// Whether that is another one than the member's.
    pub fn is_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// Submits a call of the member's own device to its stream.
    pub fn submit(&self, call: &RailCall<'_>) -> Result<()> {
        debug_assert!(self.courier.is_none());
        // SAFETY: every caller has an `Op` for the memory, which orders and records this use of it. All processes
        // submit the same call: they have committed it, and compute it from what they have agreed on.
        unsafe { submit(&*self.transport, self.stream(), self.trip.call.op, call) }
    }

    /// Takes the memory for these messages of this device.
    #[track_caller]
    pub fn load(&self, messages: Vec<RailMessage>) -> Result<Load> {
        if self.courier.is_none() || messages.is_empty() {
            return Ok(Load { messages, detour: None });
        }
        let room = messages.iter().map(|message| message.bytes().next_multiple_of(ALIGN)).sum::<usize>();
        let memory = self.trip.pinned(room)?;
        let mut at = memory.block.address;
        let moved = messages.iter().map(|message| {
            let moved = message.moved_to(at);
            at += message.bytes().next_multiple_of(ALIGN) as u64;
            moved
        });
        let moved = moved.collect();
        Ok(Load { messages, detour: Some(Detour { memory, messages: moved }) })
    }

    /// Submits the messages. The caller has an `Op` for the memory, and holds the collective's window.
    pub fn send(&self, load: &Load) -> Result<()> {
        match (&self.courier, &load.detour) {
            (Some(courier), Some(detour)) => self.send_by(courier, &load.messages, detour),
            _ if load.messages.is_empty() => Ok(()),
            _ => self.submit(&RailCall::Messages(&load.messages)),
        }
    }

    fn send_by(&self, courier: &Arc<StreamCore>, messages: &[RailMessage], detour: &Detour) -> Result<()> {
        let (own, op) = (&self.trip.group.dev.stream, self.trip.call.op);
        let (block, all) = (&detour.memory.block, 0..detour.memory.len());
        let pairs = || messages.iter().zip(&detour.messages);
        block.hazards.order(op, own, &all, Access::Write)?;
        let mut staged = Ok(());
        for (message, moved) in pairs() {
            if let (RailMessage::Send { at, bytes, .. }, RailMessage::Send { at: to, .. }) = (*message, *moved) {
                staged = staged.and_then(|()| {
                    // SAFETY: both ranges have so many bytes; the caller's `Op` and the hazards order the copy.
                    self.own(|driver| unsafe { driver.copy_to_host(pointer(to), at, bytes, own.raw) })
                });
            }
        }
        let last = own.submit();
        block.hazards.note(own, last, all.clone(), Access::Write);
        courier.wait_for(op, own, last)?;
        // SAFETY: the memory is page-locked, so it is the rail's device's as well, and the streams' events order its
        // uses. All processes submit these messages.
        let submitted = unsafe { submit(&*self.transport, courier, op, &RailCall::Messages(&detour.messages)) };
        let last = courier.submit();
        block.hazards.note(courier, last, all.clone(), Access::Write);
        if submitted.is_err() {
            // The transport may still use it.
            std::mem::forget(block.clone());
        }
        staged.and(submitted).and(own.wait_for(op, courier, last))?;
        let mut fetched = Ok(());
        for (message, moved) in pairs() {
            if let (RailMessage::Receive { at, bytes, .. }, RailMessage::Receive { at: from, .. }) = (*message, *moved)
            {
                fetched = fetched.and_then(|()| {
                    // SAFETY: as above.
                    self.own(|driver| unsafe { driver.copy_to_device(at, pointer(from), bytes, own.raw) })
                });
            }
        }
        block.hazards.note(own, own.submit(), all, Access::Read);
        fetched
    }

    fn own(&self, call: impl FnOnce(&dyn Driver) -> DriverResult) -> Result<()> {
        let handle = &self.trip.group.dev.worker.handle;
        handle.check(self.trip.call.op, call(&*handle.driver))
    }

    /// All members meet and send. `reads` and `writes` is memory of this device that the messages name.
    #[track_caller]
    pub fn exchange(&self, messages: Vec<RailMessage>, reads: &[&Area], writes: &[&Area]) -> Result<()> {
        let load = self.load(messages)?;
        let mut access = self.trip.op()?;
        for (areas, kind) in [(reads, Access::Read), (writes, Access::Write)] {
            areas.iter().try_for_each(|area| access.touch(&area.block, area.bytes.clone(), kind, false))?;
        }
        access.reserve()?;
        let (_, commit) = self.trip.meet(Payload::Nothing, |_| Vec::new())?;
        let sent = self.send(&load);
        drop(commit.window);
        self.trip.finish(access, sent)
    }
}

/// Submits a call to a stream. The transport's work does not pass the driver, so a checker is told.
///
/// # Safety
/// As [`DeviceTransport::submit`], for the stream's device.
pub(super) unsafe fn submit(
    transport: &dyn DeviceTransport,
    stream: &StreamCore,
    op: &'static str,
    call: &RailCall<'_>,
) -> Result<()> {
    let handle = &stream.handle;
    if let Some(watch) = handle.watch() {
        for (at, bytes, write) in call.memory().into_iter().filter(|(_, bytes, _)| *bytes > 0) {
            let noted = watch.checker.lent(watch.device, stream.raw, at, bytes, write);
            noted.map_err(|report| handle.misuse(op, report))?;
        }
    }
    // SAFETY: the caller's promise.
    unsafe { transport.submit(handle.device, stream.raw, call) }
}

/// Page-locked memory has one address on the host and on all devices.
fn pointer(at: Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at as usize)
}
