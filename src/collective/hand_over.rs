//! Values from one device to one other: `give` and `take`; [`point`](super::point) and pipelines share the parcels.
//!
//! A value goes from one device's thread to another's. Memory in it stays where it is. It knows its last uses, so the
//! taker's streams wait for the giver's work on it, by events that are recorded when the value is given. A member of
//! another process gets the value in parts ([`Pack`]). For that the type must be a [`Transfer`]. A pipeline says so by
//! its bound; [`give`](Group::give) asks the pool's table, as Rust cannot ask for a trait at run time.
//!
//! Invariant: no call waits for a receiver, so no order of calls among givers can deadlock.

use super::meeting::{absent, note_call};
use super::{
    Group, Outgoing, Transfer, across::Incoming, face::collectives, point::area, transfer::codec, values::stays,
};
use crate::error::{Error, Result, op_site::OpSite};
use crate::fabric::{Area, Call, Codec, Contents, Label, Pack, Parcel, Unpack};
use crate::{Device, DeviceBuffer, contain::Contained, gang::LastCall, memory::AsView, thread::wait};
use std::{any::Any, panic::Location};

const TRANSFER: &str = "if it is a `Transfer`, tell the pool by `Builder::register_transfer`";

collectives! {
    /// Hand-over of values between members. The page "Pipelines" of the guide has an example.
    errors " [`Error::InvalidArgument`] if there is no such member, \
        [`Error::Aborted`], and the driver's errors.";

    /// Gives a value to member `to`, which takes it by [`take`](Self::take). The value may be anything that is `Send`:
    /// numbers, vectors, [`DeviceBuffer`](crate::DeviceBuffer)s, tuples of them. It may go to this device itself.
    ///
    /// Does not wait, neither for the receiver nor for the device. Memory in the value stays on its device; the
    /// receiver may read it, [copy it](crate::DeviceBuffer::copy_to) or pass it on immediately: its streams wait for
    /// the work that this device has submitted up to now, on all of its streams, and for nothing that it submits later.
    /// (That is for the library's ordering. After [`unordered`](crate::Device::unordered) work, give an
    /// [`Event`](crate::Event) along.) A value that is not taken is dropped at the latest when the receiver's next
    /// scope begins, or the pool is closed.
    ///
    /// **To another process** go values whose type is a [`Transfer`]: buffers of all [`Element`](crate::Element)s,
    /// pairs of these, numbers and `String`, and `Vec`s of all; other types after
    /// [`Builder::register_transfer`](crate::Builder::register_transfer). The memory in the value is copied, as it is
    /// at this moment in the order of the streams; the receiver has it on its own device. There all values must be
    /// taken: the end of the scope waits for it.
    ///
    /// Each tag is a queue of its own: values of one pair of members with one tag are taken in the order in which they
    /// were given. Groups do not see each other's values.
    fails " After an error the value is dropped. `InvalidArgument` also for a type that cannot go to another process.";
    fn give<T>(&self, value: T, to: usize, tag: u64) -> Result<()>
    where [T: Send + 'static]
    {
        self.give_as(("give", Location::caller()), Label::Value(tag), value, to, || self.codec())
    }

    /// Takes the next value that member `from` has given with this `tag`. The host waits until it was given, or, from
    /// another process, until it has arrived.
    fails " [`Error::Timeout`]. [`Error::Mismatch`] if the value has \
        another type, or if the closure of `from` has ended without giving it. A value of another type fails the \
        gang. `InvalidArgument` also if `from` is this device itself, and it has given no such value before, and for a \
        type that cannot come from another process. Between processes: \
        [`Error::WorldMismatch`], [`Error::HostTimeout`], \
        [`Error::AbortedByHost`], [`Error::HostLost`].";
    fn take<T>(&self, from: usize, tag: u64) -> Result<T>
    where [T: Send + 'static]
    {
        self.take_as(("take", Location::caller()), Label::Value(tag), from, || self.codec())
    }
}

impl Group<'_> {
    pub(crate) fn on<'v>(&self, via: &'v Device) -> Group<'v> {
        let (membership, across) = (self.membership.clone(), self.across.clone());
        Group { dev: via, membership, rank: self.rank, across, overlaps: self.overlaps }
    }

    pub(crate) fn beside<'v>(&self, via: &'v Device) -> Group<'v> {
        Group { overlaps: true, ..self.on(via) }
    }

    pub(crate) fn give_transfer<T: Transfer>(&self, call: LastCall, label: Label, value: T, to: usize) -> Result<()> {
        self.give_as(call, label, value, to, || Some(codec::<T>()))
    }

    pub(crate) fn take_transfer<T: Transfer>(&self, call: LastCall, label: Label, from: usize) -> Result<T> {
        self.take_as(call, label, from, || Some(codec::<T>()))
    }

    fn codec<T: 'static>(&self) -> Option<Codec<T>> {
        self.dev.worker.shared.codecs.get()
    }

    fn give_as<T: Send + 'static>(
        &self,
        (op, site): LastCall,
        label: Label,
        value: T,
        to: usize,
        codec: impl FnOnce() -> Option<Codec<T>>,
    ) -> Result<()> {
        let dev = self.dev;
        let _here = OpSite { op, site }.enter();
        let call = Call::at(op, site).of_type::<T>();
        self.check_peer(&call, to)?;
        let Some(across) = &self.across else {
            return self.post(call, to, label, Contents::Value(Contained::new(Box::new(value))));
        };
        if let Some(to) = across.here_of(to) {
            return self.here().give_as((op, site), label, value, to, codec);
        }
        let codec = codec().ok_or_else(|| stays(&call, TRANSFER))?;
        let mut pack = Pack::new((op, site));
        (codec.pack)(value, &mut pack)?;
        let (header, parts) = pack.into_parts();
        let part = |part: DeviceBuffer<u8>| {
            // It may be another device's, which has given it to this one.
            let part = part.transfer(dev)?;
            self.check_own(op, &part)?;
            Ok(area(part.view()))
        };
        let parts = parts.into_iter().map(part).collect::<Result<_>>()?;
        self.send_across((&call, label), &Outgoing { header, parts }, to)
    }

    fn take_as<T: Send + 'static>(
        &self,
        (op, site): LastCall,
        label: Label,
        from: usize,
        codec: impl FnOnce() -> Option<Codec<T>>,
    ) -> Result<T> {
        let dev = self.dev;
        let _here = OpSite { op, site }.enter();
        let call = Call::at(op, site).of_type::<T>();
        if let Some(across) = &self.across {
            self.check_peer(&call, from)?;
            if let Some(from) = across.here_of(from) {
                return self.here().take_as((op, site), label, from, codec);
            }
            let codec = codec().ok_or_else(|| stays(&call, TRANSFER))?;
            let incoming = self.receive_across((&call, label), from)?;
            let allocate = |bytes| dev.allocate::<u8>(op, bytes);
            let mut parts = Unpack::new((op, site), incoming.header(), incoming.lens(), &allocate);
            let value = incoming.done((codec.unpack)(&mut parts))?;
            let parts: Vec<Area> = incoming.done(parts.finish())?.iter().map(|part| area(part.view())).collect();
            incoming.store(&parts)?;
            return Ok(value);
        }
        let parcel = self.receive_parcel(&call, from, label)?;
        let Contents::Value(value) = parcel.contents else { unreachable!("values are not messages") };
        match value.into_inner().downcast() {
            Ok(value) => Ok(*value),
            Err(value) => {
                drop(Contained::<Box<dyn Any + Send>>::new(value));
                Err(self.differs("dtype", &call, from, &parcel.call))
            }
        }
    }

    /// The next use of its memory waits for this device's work up to now.
    pub(super) fn post(&self, call: Call, to: usize, label: Label, contents: Contents) -> Result<()> {
        let (dev, gang) = (self.dev, &self.dev.session.gang);
        dev.check()?;
        dev.worker.handle.progress.advance();
        let _entry = note_call(dev, &call, &[dev.index(), self.ordinal(to)]);
        dev.worker.record_early(call.op)?;
        let (from, group, told) = (dev.index(), self.ranks().clone(), dev.worker.handle.hand_over());
        let parcel = Parcel { gang: gang.place(), from, group, label, call, contents, told };
        dev.worker.endpoint.borrow().parcels.send(self.ordinal(to), parcel);
        gang.waker(self.ranks()[to]).notify();
        Ok(())
    }

    /// Waits for the next parcel with this label from a member.
    pub(super) fn receive_parcel(&self, call: &Call, from: usize, label: Label) -> Result<Parcel> {
        let dev = self.dev;
        self.check_peer(call, from)?;
        dev.check()?;
        dev.worker.handle.progress.advance();
        let _entry = note_call(dev, call, &[self.ordinal(from), dev.index()]);
        let (gang, rank, ordinal) = (&dev.session.gang, self.ranks()[from], self.ordinal(from));
        let take = || dev.worker.endpoint.borrow_mut().parcels.take(gang.place(), ordinal, self.ranks(), label);
        let nothing_from_itself = || {
            Error::invalid_at(call.site, call.op, format_args!("member {from} is this device, which sent no {label}"))
        };
        let parcel = wait::for_peer(dev.waiter(), call.op, rank, || {
            // This comes before the look into the mailbox: a member sends before it leaves.
            let left = gang.has_left(rank);
            match take() {
                Some(parcel) => Some(Ok(parcel)),
                None if from == self.rank => Some(Err(nothing_from_itself())),
                None => left.then(|| Err(absent(dev, call, rank))),
            }
        })?;
        dev.worker.handle.take_over(parcel.told.as_deref());
        Ok(parcel)
    }

    /// The error for a parcel that is not what was asked for. The sender has gone on, so only a failed gang tells it.
    pub(super) fn differs(&self, what: &'static str, call: &Call, from: usize, sent: &Call) -> Error {
        let error = self.meeting().mismatch(what, (self.rank, call), (from, sent));
        self.dev.session.gang.poison(self.dev.index(), error.clone());
        error
    }

    /// And captures must not be under way: a graph cannot hold these calls.
    pub(super) fn check_peer(&self, call: &Call, peer: usize) -> Result<()> {
        if peer >= self.count() {
            return Err(Error::invalid_at(call.site, call.op, format_args!("member {peer} of {}", self.count())));
        }
        self.dev.not_in_graph_at(call.site, call.op)
    }

    pub(super) fn send_across(&self, call: (&Call, Label), message: &Outgoing, to: usize) -> Result<()> {
        self.door().expect("it spans processes").send(self, call, message, to)
    }

    pub(super) fn receive_across<'g>(&'g self, call: (&'g Call, Label), from: usize) -> Result<Box<dyn Incoming + 'g>> {
        self.door().expect("it spans processes").receive(self, call, from)
    }
}
