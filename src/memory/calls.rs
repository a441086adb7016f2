//! The flight recorder of a device: its thread's last calls and waits.
//!
//! The device's thread writes a record when a call, a wait or a scope's closure begins ([`CallLog::begin`]), fills in
//! what becomes known later, and ends the record ([`Entry`]). Any thread reads ([`Calls::read`]): for errors that name
//! the last calls, and for flight records. A record has a number: 0, 1, ..
//!
//! The clock is half of what a record costs, so only the ends of waits, closures and collectives have times.
//!
//! A record is eight words, a cache line:
//!
//! | word | |
//! |---|---|
//! | 0 | number of the operation's name (16 bits), of the program's outermost call (16), of the place (32) |
//! | 1, 2 | bytes; members of a collective, a bit for each of the first 64 ordinals in the pool. 0: not known |
//! | 3 | kind (8 bits); 1 + the ordinal of the awaited device (16); 1 + the number of the algorithm's name (16) |
//! | 4, 5 | the stream's id; the number of the operation on that stream. 0: none |
//! | 6, 7 | times of begin and end, in ticks. An end of 0: not yet; 1: it has ended, the time is not known |
//!
//! Invariant: one thread writes. A reader gets whole records, also of a thread that has died.

use crate::{
    driver::{DriverRef, host},
    error::{OpId, Site, SiteId, op_site::OpSite, site_id::ids},
    sync::{History, Scale, ticks},
};
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::{marker::PhantomData, panic::Location, ptr, sync::Arc, time::Duration};

const BYTES: usize = 1;
const MEMBERS: usize = 2;
const KIND: usize = 3;
const SEQUENCE: usize = 5;
const END: usize = 7;
/// Of word 0: the operation.
const OP: u64 = 0xffff;
/// Bits of word 3.
const AWAITED: u32 = 8;
const ALGORITHM: u32 = 24;

/// In word 7: it has ended, at a time that is not known.
const ENDED: u64 = 1;

/// The records that a device keeps.
const RECORDS: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A scope's closure.
    Scope,
    /// An operation of the device.
    Call,
    /// The thread waits: for another device, or for its own streams.
    Wait,
}

const KINDS: [Kind; 3] = [Kind::Scope, Kind::Call, Kind::Wait];

/// The device thread's side. There is one per [`Calls`], and it stays on its thread, so there is one writer.
pub(crate) struct CallLog {
    calls: Arc<Calls>,
    /// Of a device in virtual time: its driver knows the time.
    virtual_time: Option<DriverRef>,
    /// The innermost record that has not ended.
    open: Cell<Open>,
    /// Word 0 of the last record.
    last: Cell<u64>,
    stays: PhantomData<*const ()>,
}

#[derive(Clone, Copy)]
struct Open {
    number: u64,
    /// Word 0 of the record; all ones before the first one.
    what: u64,
    /// Whether its end gets a time.
    timed: bool,
    is_collective: bool,
}

/// The side of all other threads.
pub(crate) struct Calls {
    history: History<8>,
    in_virtual_time: bool,
}

/// A record, as a reader gets it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub number: u64,
    pub kind: Kind,
    pub op: &'static str,
    /// The program's outermost call, of which the operation is a part.
    pub call: &'static str,
    /// Where the program has made that call.
    pub site: Site,
    pub bytes: u64,
    pub members: u64,
    /// The device that a wait is for.
    pub awaited: Option<usize>,
    pub algorithm: Option<&'static str>,
    pub stream: u64,
    pub sequence: u64,
    /// Times are since the first use of the clock ([`Scale::start`]), or virtual.
    pub begin: Duration,
    pub end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    NotYet,
    Unknown,
    At(Duration),
}

/// The log of a new thread. `virtual_time`: the driver, if its time is virtual.
pub(crate) fn new(virtual_time: Option<DriverRef>) -> (Rc<CallLog>, Arc<Calls>) {
    let in_virtual_time = virtual_time.is_some();
    let calls = Arc::new(Calls { history: History::new(RECORDS), in_virtual_time });
    let open = Cell::new(Open { number: 0, what: u64::MAX, timed: false, is_collective: false });
    let log = CallLog { calls: calls.clone(), virtual_time, open, last: Cell::new(0), stays: PhantomData };
    (Rc::new(log), calls)
}

thread_local! {
    /// The log of a device's thread.
    static OWN: RefCell<Weak<CallLog>> = const { RefCell::new(Weak::new()) };
}

/// Runs `f`, which waits for a device. A device's thread notes that.
pub(crate) fn while_waiting<R>(op: &'static str, device: usize, f: impl FnOnce() -> R) -> R {
    let log = OWN.try_with(|own| own.borrow().upgrade()).ok().flatten();
    let _entry = log.as_ref().map(|log| log.wait(op, device));
    f()
}

impl CallLog {
    /// The calling thread is the device's.
    pub fn enter(self: &Rc<Self>) {
        OWN.set(Rc::downgrade(self));
    }

    #[inline]
    fn now(&self) -> u64 {
        match &self.virtual_time {
            None => ticks(),
            Some(driver) => host::virtual_now(&**driver).map_or(0, |now| now.as_nanos() as u64),
        }
    }

    /// Notes that an operation begins, on this stream (0: on none). Within another call of the program that is known,
    /// it is a part of that one.
    #[inline]
    pub fn begin(&self, kind: Kind, op: &'static str, site: Site, stream: u64) -> Entry<'_> {
        self.push(kind as u64, what(op, site), stream)
    }

    /// Notes that the thread begins to wait for a device, maybe its own. A wait between calls has the last one's place.
    #[track_caller]
    pub fn wait(&self, op: &'static str, device: usize) -> Entry<'_> {
        let outer = OpSite::current().map_or(self.last.get(), |outer| what(outer.op, outer.site));
        let op = ids(op, Location::caller()).0;
        self.push(Kind::Wait as u64 | (1 + device as u64) << AWAITED, outer & !OP | op.bits(), 0)
    }

    /// Notes a collective of these members. If its call has begun already, it gets no further record.
    #[inline]
    pub fn collective(
        &self,
        op: &'static str,
        site: Site,
        bytes: usize,
        members: impl Iterator<Item = usize>,
    ) -> Option<Entry<'_>> {
        let what = what(op, site);
        let known = self.open.get();
        let entry = (known.what != what).then(|| self.push(Kind::Call as u64, what, 0));
        let number = self.open.get().number;
        self.open.set(Open { number, what, timed: true, is_collective: true });
        self.calls.history.set(number, BYTES, bytes as u64);
        let members = members.filter(|&member| member < 64).fold(0, |mask, member| mask | 1 << member);
        self.calls.history.set(number, MEMBERS, members);
        entry
    }

    /// Notes the algorithm of the collective that was noted last.
    #[inline]
    pub fn algorithm(&self, name: &'static str, site: Site) {
        let how = Kind::Call as u64 | (1 + ids(name, site).0.bits()) << ALGORITHM;
        self.calls.history.set(self.open.get().number, KIND, how);
    }

    #[inline]
    fn push(&self, how: u64, what: u64, stream: u64) -> Entry<'_> {
        self.last.set(what);
        let number = self.calls.history.push([what, 0, 0, how, stream, 0, self.now(), 0]);
        let open = Open { number, what, timed: how != Kind::Call as u64, is_collective: false };
        Entry { log: self, number, outer: self.open.replace(open) }
    }
}

/// Word 0 of a record.
#[inline]
fn what(op: &'static str, site: Site) -> u64 {
    let outer = OpSite::current().unwrap_or(OpSite { op, site });
    let (name, place) = ids(op, outer.site);
    let call = if ptr::eq(op, outer.op) { name } else { ids(outer.op, outer.site).0 };
    name.bits() | call.bits() << 16 | place.bits() << 32
}

/// A record that has not ended. Its drop ends it.
pub struct Entry<'l> {
    log: &'l CallLog,
    number: u64,
    outer: Open,
}

impl Entry<'_> {
    /// The operation's number on its stream, and the bytes of its largest operand. A collective's are known already.
    #[inline]
    pub fn submitted(&self, sequence: u64, bytes: usize) {
        let history = &self.log.calls.history;
        history.set(self.number, SEQUENCE, sequence);
        if !self.log.open.get().is_collective {
            history.set(self.number, BYTES, bytes as u64);
        }
    }
}

impl Drop for Entry<'_> {
    #[inline]
    fn drop(&mut self) {
        let &mut Entry { log, number, outer } = self;
        let open = log.open.replace(outer);
        let end = if open.timed && open.number == number { log.now() } else { ENDED };
        log.calls.history.set(number, END, end);
    }
}

impl Calls {
    /// Calls `f` with each record that is still there. Returns the number of the next record.
    pub fn read(&self, mut f: impl FnMut(Record)) -> u64 {
        let scale = if self.in_virtual_time { Scale::nanos() } else { Scale::now() };
        self.history.read(|number, words| f(Record::of(number, words, scale)))
    }

    /// The last call of the program, and its place.
    pub fn last(&self) -> Option<(&'static str, Site)> {
        let mut last = None;
        self.read(|record| match record.kind {
            Kind::Scope | Kind::Call => last = Some((record.call, record.site)),
            Kind::Wait => {}
        });
        last
    }
}

impl Record {
    fn of(number: u64, words: [u64; 8], scale: Scale) -> Self {
        let [what, bytes, members, how, stream, sequence, begin, end] = words;
        let part = |from: u32| (how >> from & 0xffff).checked_sub(1);
        Record {
            number,
            kind: KINDS[(how & 3) as usize],
            op: OpId::of_bits(what).text(),
            call: OpId::of_bits(what >> 16).text(),
            site: SiteId::of_bits(what >> 32).site(),
            bytes,
            members,
            awaited: part(AWAITED).map(|device| device as usize),
            algorithm: part(ALGORITHM).map(|name| OpId::of_bits(name).text()),
            stream,
            sequence,
            begin: scale.time(begin),
            end: match end {
                0 => End::NotYet,
                ENDED => End::Unknown,
                end => End::At(scale.time(end)),
            },
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/memory/calls_tests.rs"]
mod tests;
