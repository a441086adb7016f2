//! From one device to one other: `send`, `recv`, `sendrecv`.
//!
//! A sender copies its data on its own device, in stream order, and hands the copy over; the receiver fetches it over
//! the link. So a sender waits for no other member, and may write to its buffer at once: `send(next); recv(previous)`
//! on all devices cannot deadlock, whatever the sizes (MPI's `MPI_Send` may). The copy runs at the speed of the
//! device's memory, some ten times that of a link. The parcel's memory knows its last writer, as all memory does. So
//! the receiver's copy is ordered after the sender's without an event. A dropped parcel's memory goes back to its
//! device's pool.

use super::{Group, face::collectives};
use crate::{
    error::{Error, Result},
    fabric::{call::Call, parcels::Parcel, types::Element},
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
    thread::wait,
};
use std::{marker::PhantomData, panic::Location};

collectives! {
    /// From one member to one other. Messages of one pair arrive in the order in which they were sent.
    errors " [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there is no such member, \
        [`Error::Aborted`](crate::Error::Aborted), and the driver's errors.";

    /// Sends a copy of `src` to member `to`, which fetches it by [`recv`](Self::recv). A member may send to itself.
    /// Asynchronous, and waits for no other member: `src` may be written at once. The copy takes memory on this device
    /// until it is fetched; a copy that nobody fetches goes when the scope ends.
    example {
        /// ```
        /// # use gpu_pool::GpuPool;
        /// let pool = GpuPool::builder().host(3).build()?;
        /// let found = pool.run(|dev, _| {
        ///     let (next, previous) = ((dev.rank() + 1) % 3, (dev.rank() + 2) % 3);
        ///     let (x, mut y) = (dev.upload(&[dev.rank() as u32])?, dev.zeros::<u32>(1)?);
        ///     dev.send(&x, next)?;
        ///     dev.recv(&mut y, previous)?;
        ///     dev.download(&y)
        /// })?;
        /// assert_eq!(found, [[2], [0], [1]]);
        /// # Ok::<(), gpu_pool::Error>(())
        /// ```
    }
    fails " `OutOfMemory` for the copy.";
    fn send<S>(&self, src: &S, to: usize) -> Result<()>
    where [S: AsView + ?Sized, S::Elem: Element]
    {
        self.send_view(src.view(), to)
    }

    /// Fetches the next message of member `from`. The host waits until it was sent, the device until it has arrived.
    fails " [`Error::Timeout`](crate::Error::Timeout). [`Error::Mismatch`](crate::Error::Mismatch) if the message has \
        another type or length, or if its sender's closure has ended without sending it. A mismatch fails the gang.";
    fn recv<D>(&self, dst: &mut D, from: usize) -> Result<()>
    where [D: AsViewMut + ?Sized, D::Elem: Element]
    {
        self.recv_view(dst.view_mut(), from)
    }

    /// [`send`](Self::send), then [`recv`](Self::recv).
    fails " And those of both.";
    fn sendrecv<S, D>(&self, src: &S, to: usize, dst: &mut D, from: usize) -> Result<()>
    where [S: AsView + ?Sized, D: AsViewMut + ?Sized, S::Elem: Element, D::Elem: Element]
    {
        // Both views before anything is sent: the caller's `view_mut` of `dst` may write to `src`.
        let (src, dst) = (src.view(), dst.view_mut());
        self.send_view(src, to)?;
        self.recv_view(dst, from)
    }
}

impl Group<'_> {
    #[track_caller]
    fn send_view<T: Element>(&self, src: DeviceView<'_, T>, to: usize) -> Result<()> {
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
    fn recv_view<T: Element>(&self, dst: DeviceViewMut<'_, T>, from: usize) -> Result<()> {
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
