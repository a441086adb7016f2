//! From one device to one other: `send`, `recv`, `sendrecv`, which [`api`](super::api) gives to users.
//!
//! A sender copies its data on its own device, in stream order, and hands the copy over; the receiver fetches it over
//! the link. So a sender waits for no other member, and may write to its buffer at once: `send(next); recv(previous)`
//! on all devices cannot deadlock, whatever the sizes (MPI's `MPI_Send` may). The copy runs at the speed of the
//! device's memory, some ten times that of a link. The parcel's memory knows its last writer, as all memory does. So
//! the receiver's copy is ordered after the sender's without an event. A dropped parcel's memory goes back to its
//! device's pool.

use super::Group;
use crate::{
    error::{Error, Result},
    fabric::{call::Call, parcels::Parcel, types::Element},
    memory::{DeviceView, DeviceViewMut},
    thread::wait,
};
use std::{marker::PhantomData, panic::Location};

impl Group<'_> {
    #[track_caller]
    pub(super) fn send_view<T: Element>(&self, src: DeviceView<'_, T>, to: usize) -> Result<()> {
        let dev = self.dev;
        let _here = dev.worker.handle.enter("send", Location::caller());
        self.check_peer("send", to)?;
        let call = Call::new("send").elements(T::DTYPE, src.len());
        self.note_call(&call);
        let mut contents = dev.allocate::<u8>("send", src.bytes().len())?;
        dev.copy(&bytes(src), &mut contents)?;
        let gang = &dev.session.gang;
        let (from, group) = (dev.index(), self.ranks().clone());
        let told = dev.worker.handle.hand_over();
        let parcel = Parcel { gang: gang.place(), from, group, call, contents, told };
        dev.worker.endpoint.borrow().parcels.send(self.ordinal(to), parcel);
        gang.waker(self.ranks()[to]).notify();
        Ok(())
    }

    #[track_caller]
    pub(super) fn recv_view<T: Element>(&self, dst: DeviceViewMut<'_, T>, from: usize) -> Result<()> {
        let dev = self.dev;
        let _here = dev.worker.handle.enter("recv", Location::caller());
        self.check_peer("recv", from)?;
        dev.check()?;
        dev.worker.handle.progress.advance();
        let call = Call::new("recv").elements(T::DTYPE, dst.len());
        self.note_call(&call);
        let (gang, rank, ordinal) = (&dev.session.gang, self.ranks()[from], self.ordinal(from));
        let take = || dev.worker.endpoint.borrow_mut().parcels.take(gang.place(), ordinal, self.ranks());
        let parcel = wait::for_peer(dev.waiter(), "recv", rank, || {
            // This comes before the look into the mailbox: a member sends before it leaves.
            let left = gang.has_left(rank);
            match take() {
                Some(parcel) => Some(Ok(parcel)),
                None => left.then(|| Err(self.absent(&call, rank))),
            }
        })?;
        dev.worker.handle.take_over(parcel.told.as_deref());
        if let Some(what) = call.differs_in_elements(&parcel.call) {
            // The sender has gone on, so only a failed gang tells it of the mismatch.
            let error = self.mismatch(what, (self.rank, &call), (from, &parcel.call));
            gang.poison(dev.index(), error.clone());
            return Err(error);
        }
        let mut dst =
            DeviceViewMut::<u8> { block: dst.block, address: dst.address(), len: dst.bytes().len(), of: PhantomData };
        dev.copy(&parcel.contents.peer(), &mut dst)
    }

    /// `peer` must be a member, and captures must not be under way: a graph cannot hold these calls.
    #[track_caller]
    fn check_peer(&self, op: &'static str, peer: usize) -> Result<()> {
        if peer >= self.count() {
            return Err(Error::invalid(op, format_args!("member {peer} of {}", self.count())));
        }
        self.dev.not_in_graph(op)
    }
}

fn bytes<T: Element>(view: DeviceView<'_, T>) -> DeviceView<'_, u8> {
    DeviceView { block: view.block, address: view.address(), len: view.bytes().len(), of: PhantomData }
}
