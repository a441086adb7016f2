//! The relay of a member's messages over rails between devices (NCCL's PXN): its own device's rail, or that of another
//! device of this process, through page-locked memory.
//!
//! A rail joins devices with one ordinal, and each process has the same messages on it in the order of commits. A
//! member whose device has another ordinal copies its elements to page-locked memory, which every device can read and
//! write, and submits the call to a stream of the rail's device (`DeviceInternals::proxy_stream`). No thread waits:
//! events order the two streams. Used by [`device_rail`](super::device_rail) and [`two_hop`](super::two_hop).
//! Invariant: a relay's memory is there before the member arrives.

use super::hierarchical::HierarchicalCall;
use crate::internals::*;
use crate::runtime::{Access, Address, Area, Driver, DriverResult, Payload, StreamCore};
use crate::traits::{DeviceTransport, RailCall, RailMessage};
use gpu_pool::{PinnedBuffer, Result};
use std::sync::Arc;

/// Messages in page-locked memory begin at multiples of this many bytes.
const ALIGN: usize = 256;

pub(super) struct Relay<'t, 'g, 'd> {
    pub hier: &'t HierarchicalCall<'g, 'd>,
    pub transport: Arc<dyn DeviceTransport>,
    /// The stream of the rail's device, if that is another one than the member's.
    proxy_stream: Option<Arc<StreamCore>>,
    /// The stream of the member's own device for calls that overlap with its other work.
    side_stream: Option<Arc<StreamCore>>,
}

/// Messages that are ready to go.
#[derive(Default)]
pub(super) struct Load {
    messages: Vec<RailMessage>,
    host_copy: Option<HostCopy>,
}

struct HostCopy {
    memory: PinnedBuffer<u8>,
    messages: Vec<RailMessage>,
}

impl<'t, 'g, 'd> Relay<'t, 'g, 'd> {
    /// `overlapped`: if the rail joins the member's own device, its calls overlap with the member's other work.
    pub fn new(
        hier: &'t HierarchicalCall<'g, 'd>,
        transport: Arc<dyn DeviceTransport>,
        overlapped: bool,
    ) -> Result<Self> {
        let rail = hier.rail_map.of(hier.across.me, hier.across.here);
        let ordinal = rail.map_or(hier.group.device().index(), |rail| hier.rail_map.all[rail].ordinal);
        transport.failed(ordinal).map_or(Ok(()), Err)?;
        let (own, dev) = (hier.group.device().index(), hier.group.device());
        let proxy_stream = if ordinal == own { None } else { Some(dev.proxy_stream(ordinal)?) };
        let side_stream = if overlapped && ordinal == own { Some(dev.proxy_stream(own)?) } else { None };
        Ok(Relay { hier, transport, proxy_stream, side_stream })
    }

    pub fn stream(&self) -> &Arc<StreamCore> {
        self.side_stream.as_ref().unwrap_or(self.hier.group.device().core())
    }

    pub fn has_side_stream(&self) -> bool {
        self.side_stream.is_some()
    }

    pub fn submit(&self, call: &RailCall<'_>) -> Result<()> {
        debug_assert!(self.proxy_stream.is_none());
        // SAFETY: every caller has an `Op` for the memory, which orders and records this use of it. All processes
        // submit the same call: they have committed it, and compute it from what they have agreed on.
        unsafe { submit(&*self.transport, self.stream(), self.hier.call.op, call) }
    }

    /// The result of work behind a commit. The other members count on this work, so a failure ends their calls, too.
    pub fn report<R>(&self, done: Result<R>) -> Result<R> {
        done.map_err(|error| self.transport.broken(error))
    }

    pub fn load(&self, messages: Vec<RailMessage>) -> Result<Load> {
        if self.proxy_stream.is_none() || messages.is_empty() {
            return Ok(Load { messages, host_copy: None });
        }
        let room = messages.iter().map(|message| message.bytes.next_multiple_of(ALIGN)).sum::<usize>();
        let memory = self.hier.pinned(room)?;
        let mut next = memory.block().address();
        let moved = messages.iter().map(|message| {
            let at = next;
            next += message.bytes.next_multiple_of(ALIGN) as u64;
            RailMessage { at, ..*message }
        });
        let moved = moved.collect();
        Ok(Load { messages, host_copy: Some(HostCopy { memory, messages: moved }) })
    }

    pub fn send(&self, load: &Load) -> Result<()> {
        match (&self.proxy_stream, &load.host_copy) {
            (Some(proxy_stream), Some(host_copy)) => self.send_by(proxy_stream, &load.messages, host_copy),
            _ if load.messages.is_empty() => Ok(()),
            _ => self.submit(&RailCall::Messages(&load.messages)),
        }
    }

    fn send_by(&self, proxy_stream: &Arc<StreamCore>, messages: &[RailMessage], host_copy: &HostCopy) -> Result<()> {
        let (own, op) = (self.hier.group.device().core(), self.hier.call.op);
        let (block, all) = (host_copy.memory.block(), 0..host_copy.memory.len());
        let pairs = |sends| messages.iter().zip(&host_copy.messages).filter(move |(message, _)| message.sends == sends);
        block.order(op, own, &all, Access::Write)?;
        let mut staged = Ok(());
        for (message, moved) in pairs(true) {
            let (to, from, bytes) = (pointer(moved.at), message.at, message.bytes);
            // SAFETY: both ranges have so many bytes; the caller's `Op` and the hazards order the copy.
            let copy = || self.own(|driver| unsafe { driver.copy_to_host(to, from, bytes, own.raw) });
            staged = staged.and_then(|()| copy());
        }
        let last = own.submit();
        block.note(own, last, all.clone(), Access::Write);
        proxy_stream.wait_for(op, own, last)?;
        // SAFETY: the memory is page-locked, so it is the rail's device's as well, and the streams' events order its
        // uses. All processes submit these messages.
        let submitted = unsafe { submit(&*self.transport, proxy_stream, op, &RailCall::Messages(&host_copy.messages)) };
        let last = proxy_stream.submit();
        block.note(proxy_stream, last, all.clone(), Access::Write);
        if submitted.is_err() {
            // The transport may still use it.
            std::mem::forget(block.clone());
        }
        staged.and(submitted).and(own.wait_for(op, proxy_stream, last))?;
        let mut fetched = Ok(());
        for (message, moved) in pairs(false) {
            let (to, from, bytes) = (message.at, pointer(moved.at), message.bytes);
            // SAFETY: as above.
            let copy = || self.own(|driver| unsafe { driver.copy_to_device(to, from, bytes, own.raw) });
            fetched = fetched.and_then(|()| copy());
        }
        block.note(own, own.submit(), all, Access::Read);
        fetched
    }

    fn own(&self, call: impl FnOnce(&dyn Driver) -> DriverResult) -> Result<()> {
        let handle = self.hier.group.device().handle();
        handle.check(self.hier.call.op, call(&*handle.driver))
    }

    /// All members meet and send. `reads` and `writes` is memory of this device that the messages name.
    pub fn exchange(&self, messages: Vec<RailMessage>, reads: &[&Area], writes: &[&Area]) -> Result<()> {
        let load = self.load(messages)?;
        let mut access = self.hier.op()?;
        for (areas, kind) in [(reads, Access::Read), (writes, Access::Write)] {
            areas.iter().try_for_each(|area| access.touch(&area.block, area.bytes.clone(), kind, false))?;
        }
        access.reserve()?;
        let (_, commit) = self.hier.meet(Payload::Nothing, |_| Vec::new())?;
        let sent = self.report(self.send(&load));
        drop(commit.window);
        self.hier.finish(access, sent)
    }
}

/// Submits work of a stream that uses this memory: `later` is ordered behind earlier work, the rest is already. Returns
/// the work's place in the stream. After an error the memory is kept: the transport may still use it.
pub(super) fn with_memory(
    stream: &Arc<StreamCore>,
    op: &'static str,
    uses: &[(Area, Access)],
    later: &[(Area, Access)],
    work: impl FnOnce() -> Result<()>,
) -> Result<u64> {
    later.iter().try_for_each(|(area, access)| area.block.order(op, stream, &area.bytes, *access))?;
    let submitted = work();
    let last = stream.submit();
    for (area, access) in uses {
        area.block.note(stream, last, area.bytes.clone(), *access);
        if submitted.is_err() {
            std::mem::forget(area.block.clone());
        }
    }
    submitted.map(|()| last)
}

/// Submits a call to a stream. The transport's work does not pass the driver, so a checker is told.
///
/// # Safety
/// As [`DeviceTransport::submit`], for the stream's device.
pub(super) unsafe fn submit(
    transport: &dyn DeviceTransport,
    stream: &Arc<StreamCore>,
    op: &'static str,
    call: &RailCall<'_>,
) -> Result<()> {
    let handle = &stream.handle;
    for (at, bytes, write) in call.memory().into_iter().filter(|(_, bytes, _)| *bytes > 0) {
        handle.lent(op, stream.raw, at, bytes, write)?;
    }
    // SAFETY: the caller's promise.
    let submit = || unsafe { transport.submit(handle.device, stream.raw, call) };
    match transport.pad() {
        Ok(pad) => pad.in_turn(stream, submit),
        Err(_) => submit(),
    }
}

/// Page-locked memory has one address on the host and on all devices.
fn pointer(at: Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at as usize)
}
