//! Sockets between processes of one host. Invariant: only [`poll`] blocks.

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    time::Duration,
};

/// A socket with an abstract name: nothing is left in the file system when the process dies.
pub(crate) fn listen(name: &str) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects; `WouldBlock` if too many others wait for the exporter's server.
pub(crate) fn connect(name: &str) -> io::Result<UnixStream> {
    let address =
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // std's `connect` would wait.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

/// Process and user at the other end, as the kernel knows them.
pub(crate) fn peer(socket: &UnixStream) -> io::Result<(u32, u32)> {
    // Not rustix's: its `UCred` cannot hold process 0, which is what a peer of another PID namespace has.
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: an open socket; the pointers are to a live struct of the layout that the kernel writes, and its size.
    let asked = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut who).cast(), &raw mut length) };
    if asked < 0 { Err(io::Error::last_os_error()) } else { Ok((who.pid as u32, who.uid)) }
}

pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Waits until one of the sockets has something to read, or has ended. Returns which. Less than `limit` after a signal.
pub(crate) fn poll(sockets: &[BorrowedFd<'_>], limit: Option<Duration>) -> Vec<bool> {
    let mut waits: Vec<_> = sockets.iter().map(|&socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
    let limit = limit.map(|limit| limit.clamp(Duration::from_millis(1), Duration::from_secs(60)));
    let limit = limit.map(|limit| Timespec::try_from(limit).expect("at most a minute"));
    let ready = rustix::event::poll(&mut waits, limit.as_ref()).unwrap_or(0);
    waits.iter().map(|wait| ready > 0 && !wait.revents().is_empty()).collect()
}

/// Sends a frame, with a descriptor. All of it, or an error.
pub(crate) fn send(socket: &UnixStream, frame: &[u8], memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !memory.as_slice().is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(memory.as_slice())), "the space is for one descriptor");
    }
    let how = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut control, how)? {
        sent if sent == frame.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives up to `frame.len()` bytes, 0 if the other end is closed, and descriptors. Callers refuse more than one.
pub(crate) fn receive(socket: &UnixStream, frame: &mut [u8], how: RecvFlags) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let frame = &mut [IoSliceMut::new(frame)];
    let message = rustix::net::recvmsg(socket, frame, &mut control, how | RecvFlags::CMSG_CLOEXEC)?;
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("a descriptor came, and this process has no free one for it"));
    }
    let got = message.bytes;
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((got, descriptors.flatten().collect()))
}

#[cfg(test)]
#[path = "../tests/unit/socket_tests.rs"]
mod tests;
