//! Elements from one device to one other: `send`, `recv`, `sendrecv`, `send_owned`, `recv_any`.
//!
//! A sender copies its data on its own device, in stream order, and hands the copy over; the receiver fetches it over
//! the link. So `send(next); recv(previous)` on all devices cannot deadlock at any size (`MPI_Send` may). A sender that
//! gives its buffer up saves the copy. The parcel's memory knows its last writer, and returns to its device's pool.

use super::{Group, Outgoing, face::collectives};
use crate::{
    Device, DeviceBuffer, DeviceCopy,
    error::{Error, Result, op_site::OpSite},
    fabric::{Area, Call, Contents, Element, Label, Parcel},
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};
use std::marker::PhantomData;

collectives! {
    /// From one member to one other. Messages of one pair arrive in the order in which they were sent. The page
    /// "Collectives" of the guide has an example.
    errors " [`Error::InvalidArgument`] if there is no such member, \
        [`Error::Aborted`], and the driver's errors.";

    /// Sends a copy of `src` to member `to`, which fetches it by [`recv`](Self::recv). A member may send to itself.
    /// Asynchronous, and waits for no other member: `src` may be written immediately. The copy takes memory on this
    /// device until it is fetched. A copy that is not fetched goes at the latest when the receiver's next scope begins.
    fails " `OutOfMemory` for the copy.";
    fn send<S: AsView<Elem: Element>>(&self, src: &S, to: usize) -> Result<()> {
        self.send_view(src.view(), to)
    }

    /// Fetches the next message of member `from`. The host waits until it was sent, the device until it has arrived.
    fails " [`Error::Timeout`]. [`Error::Mismatch`] if the message has \
        another type or length, or if its sender's closure has ended without sending it. A mismatch fails the gang.";
    fn recv<D: AsViewMut<Elem: Element>>(&self, dst: &mut D, from: usize) -> Result<()> {
        self.recv_view(dst.view_mut(), from)
    }

    /// [`send`](Self::send), then [`recv`](Self::recv).
    fails " And those of both.";
    fn sendrecv<S: AsView<Elem: Element>, D: AsViewMut<Elem: Element>>(
        &self, src: &S, to: usize, dst: &mut D, from: usize,
    ) -> Result<()> {
        // Both views before anything is sent: the caller's `view_mut` of `dst` may write to `src`.
        let (src, dst) = (src.view(), dst.view_mut());
        self.send_view(src, to)?;
        self.recv_view(dst, from)
    }

    /// [`send`](Self::send) of a buffer that this device needs no more: nothing is copied on this device. The receiver
    /// calls [`recv`](Self::recv) or [`recv_any`](Self::recv_any).
    fails " [`Error::WrongDevice`] and [`Error::WrongPool`] for a \
        buffer that is not this device's. After an error the buffer is gone.";
    fn send_owned<T: Element>(&self, buffer: DeviceBuffer<T>, to: usize) -> Result<()> {
        let call = Call::new("send_owned").elements(T::DTYPE, buffer.len());
        self.check_peer(&call, to)?;
        self.check_own("send_owned", &buffer)?;
        if let Some(across) = &self.across {
            return match across.here_of(to) {
                Some(at) => self.here().send_owned(buffer, at),
                None => self.send_across((&call, Label::Message), &message_of(bytes(buffer.view())), to),
            };
        }
        let bytes = buffer.len() * size_of::<T>();
        self.post(call, to, Label::Message, Contents::Elements(DeviceBuffer::new(buffer.block, bytes)))
    }

    /// Fetches the next message of member `from`, of any length: from [`send`](Self::send) or
    /// [`send_owned`](Self::send_owned). The host waits until it was sent, the device until it has arrived. A message
    /// of a device to itself is not copied.
    fails " [`Error::Timeout`], `OutOfMemory`. [`Error::Mismatch`] if \
        the message has another type, or if its sender's closure has ended without sending it. A mismatch fails the \
        gang.";
    fn recv_any<T: Element>(&self, from: usize) -> Result<DeviceBuffer<T>> {
        let dev = self.dev;
        let call = Call::new("recv_any").elements(T::DTYPE, 0);
        if let Some(across) = &self.across {
            self.check_peer(&call, from)?;
            if let Some(at) = across.here_of(from) {
                return self.here().recv_any(at);
            }
            let incoming = self.receive_across((&call, Label::Message), from)?;
            let here = dev.allocate::<T>("recv_any", incoming.only(size_of::<T>())? / size_of::<T>())?;
            incoming.store(&[area(bytes(here.view()))])?;
            return Ok(here);
        }
        let (sent, there) = self.message(&call, from)?;
        fail_if!(sent.dtype != call.dtype, self.differs("dtype", &call, from, &sent));
        if there.device() == dev.index() {
            return Ok(DeviceBuffer::new(there.block, sent.count));
        }
        let mut here = dev.allocate::<T>("recv_any", sent.count)?;
        self.fetch(there, bytes_mut(here.view_mut()))?;
        Ok(here)
    }
}

impl Group<'_> {
    #[track_caller]
    fn send_view<T: Element>(&self, src: DeviceView<'_, T>, to: usize) -> Result<()> {
        let dev = self.dev;
        let _here = OpSite::here("send");
        let call = Call::new("send").elements(T::DTYPE, src.len());
        self.check_peer(&call, to)?;
        if let Some(across) = &self.across {
            return match across.here_of(to) {
                Some(at) => self.here().send_view(src, at),
                None => self.send_across((&call, Label::Message), &message_of(bytes(src)), to),
            };
        }
        let mut contents = dev.allocate::<u8>("send", src.bytes().len())?;
        // In order also for a program that orders its streams itself: it does not know of the parcel's memory.
        dev.in_order().copy(&bytes(src), &mut contents)?;
        self.post(call, to, Label::Message, Contents::Elements(contents))
    }

    #[track_caller]
    fn recv_view<T: Element>(&self, dst: DeviceViewMut<'_, T>, from: usize) -> Result<()> {
        let _here = OpSite::here("recv");
        let call = Call::new("recv").elements(T::DTYPE, dst.len());
        if let Some(across) = &self.across {
            self.check_peer(&call, from)?;
            if let Some(at) = across.here_of(from) {
                return self.here().recv_view(dst, at);
            }
            let incoming = self.receive_across((&call, Label::Message), from)?;
            incoming.expect(dst.bytes().len())?;
            let to = bytes_mut(dst);
            return incoming.store(&[area(to.view())]);
        }
        let (sent, there) = self.message(&call, from)?;
        if let Some(what) = call.differs_in_elements(&sent) {
            return Err(self.differs(what, &call, from, &sent));
        }
        self.fetch(there, bytes_mut(dst))
    }

    fn message(&self, call: &Call, from: usize) -> Result<(Call, DeviceBuffer<u8>)> {
        match self.receive_parcel(call, from, Label::Message)? {
            Parcel { call, contents: Contents::Elements(there), .. } => Ok((call, there)),
            _ => unreachable!("messages hold elements"),
        }
    }

    #[track_caller]
    fn fetch(&self, there: DeviceBuffer<u8>, mut dst: DeviceViewMut<'_, u8>) -> Result<()> {
        let dev: &Device = &self.dev.in_order();
        dev.copy(&there.peer(), &mut dst)?;
        // The memory goes back to the sender, which waits for this copy, and not for what this device does next.
        dev.stream.record_early("recv")
    }

    #[track_caller]
    pub(super) fn check_own<T: Element>(&self, op: &'static str, buffer: &DeviceBuffer<T>) -> Result<()> {
        let (own, owner) = (&self.dev.worker.handle, &buffer.block.handle);
        fail_if!(owner.pool != own.pool, Error::wrong_pool(op, own.device));
        fail_if!(owner.device != own.device, Error::wrong_device(op, owner.device, own.device));
        Ok(())
    }
}

fn message_of(view: DeviceView<'_, u8>) -> Outgoing {
    Outgoing { header: Vec::new(), parts: vec![area(view)] }
}

/// The memory of a view.
pub fn area<T: DeviceCopy>(view: DeviceView<'_, T>) -> Area {
    Area { block: view.block.clone(), address: view.address, bytes: view.bytes() }
}

fn bytes<T: Element>(view: DeviceView<'_, T>) -> DeviceView<'_, u8> {
    DeviceView { block: view.block, address: view.address(), len: view.bytes().len(), of: PhantomData }
}

fn bytes_mut<T: Element>(view: DeviceViewMut<'_, T>) -> DeviceViewMut<'_, u8> {
    DeviceViewMut { block: view.block, address: view.address(), len: view.bytes().len(), of: PhantomData }
}
