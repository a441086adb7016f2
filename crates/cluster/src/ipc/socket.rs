//! Sockets of one host: connect with a limit, who is at the other end, and descriptors that go over them.
//!
//! Invariant: no call here blocks. Who waits, waits with [`poll`] and a limit.

use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    time::Duration,
};

/// Bytes for the descriptors of one message: an importer that gets more than one refuses them.
const CONTROL: usize = 64;

fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A socket with an abstract name: nothing is left in the file system when the process dies.
pub(super) fn listen(name: &str) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects; `WouldBlock` if too many others wait for the exporter's server.
pub(super) fn connect(name: &str) -> io::Result<UnixStream> {
    // SAFETY: plain data, for which zeros are a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // An abstract name begins with a zero byte.
    let place = address.sun_path.get_mut(1..=name.len()).ok_or(io::ErrorKind::InvalidInput)?;
    place.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from as libc::c_char);
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a descriptor, which is owned at once; the address is live and has at least this length.
    unsafe {
        let socket = OwnedFd::from_raw_fd(done(libc::socket(libc::AF_UNIX, kind, 0))?);
        done(libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length as libc::socklen_t))?;
        Ok(UnixStream::from(socket))
    }
}

/// Process and user at the other end, as the kernel knows them.
pub(super) fn peer(socket: &UnixStream) -> io::Result<(u32, libc::uid_t)> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: an open socket; the pointers are to a live struct of the layout that the kernel writes, and its size.
    let asked = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut who).cast(), &raw mut length) };
    done(asked)?;
    Ok((who.pid as u32, who.uid))
}

/// The user of this process.
pub(super) fn own_user() -> libc::uid_t {
    // SAFETY: reads a number of the process.
    unsafe { libc::geteuid() }
}

/// Waits until one of the sockets has something to read, or has ended. Returns which. Less than `limit` after a signal.
pub(super) fn poll(sockets: &[BorrowedFd<'_>], limit: Option<Duration>) -> Vec<bool> {
    let wait = |socket: &BorrowedFd<'_>| libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut waits: Vec<libc::pollfd> = sockets.iter().map(wait).collect();
    let limit = limit.map_or(-1, |limit| limit.as_millis().clamp(1, 60_000) as libc::c_int);
    // SAFETY: the pointer is to as many live structs.
    let ready = unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, limit) };
    waits.iter().map(|wait| ready > 0 && wait.revents != 0).collect()
}

/// Sends a frame, with a descriptor. All of it, or an error.
pub(super) fn send(socket: &UnixStream, frame: &[u8], memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut place = libc::iovec { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() };
    let mut control = [0u64; CONTROL / 8];
    // SAFETY: plain data, for which zeros are a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut place, 1);
    if let Some(memory) = memory {
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: arithmetic. The control bytes are aligned and more than this.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as _;
        // SAFETY: `message` has room for one header with one descriptor, so the pointers stay within `control`.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(memory.as_raw_fd());
        }
    }
    // SAFETY: frame and control bytes are live and as large as the message says.
    let sent =
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    match usize::try_from(sent) {
        Ok(sent) if sent == frame.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Receives up to `frame.len()` bytes, and the descriptors that came with them; 0 bytes if the other end is closed.
pub(super) fn receive(socket: &UnixStream, frame: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut place = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
    let mut control = [0u64; CONTROL / 8];
    // SAFETY: plain data, for which zeros are a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut place, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), CONTROL as _);
    let how = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: frame and control bytes are live and as large as the message says.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, how) };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let mut descriptors = Vec::new();
    // SAFETY: the kernel has filled in the control bytes, and the macros stay within them; each descriptor was made for
    // this process by the call above, and is owned here.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let first = libc::CMSG_DATA(header).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    descriptors.push(OwnedFd::from_raw_fd(first.add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((got, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn descriptors_arrive_with_their_frame() {
        let (a, b) = UnixStream::pair().unwrap();
        let (inner, other) = UnixStream::pair().unwrap();
        send(&a, b"hello", Some(inner.as_fd())).unwrap();
        let mut frame = [0; 9];
        let (got, descriptors) = receive(&b, &mut frame).unwrap();
        assert_eq!((&frame[..got], descriptors.len()), (&b"hello"[..], 1));
        drop(inner);
        let inner = UnixStream::from(descriptors.into_iter().next().unwrap());
        send(&inner, b"x", None).unwrap();
        let (got, descriptors) = receive(&other, &mut frame).unwrap();
        assert_eq!((got, frame[0], descriptors.len()), (1, b'x', 0));
        assert_eq!(receive(&other, &mut frame).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(inner);
        assert_eq!(receive(&other, &mut frame).unwrap().0, 0);
    }

    #[test]
    fn the_peer_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert_eq!(peer(&a).unwrap(), (std::process::id(), own_user()));
    }

    #[test]
    fn names_that_nobody_has_and_that_do_not_fit() {
        assert_eq!(connect("gpu-pool-ipc.nobody").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(connect(&"x".repeat(200)).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_poll_says_which() {
        let ((a, b), (c, _d)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        send(&a, b"x", None).unwrap();
        assert_eq!(poll(&[b.as_fd(), c.as_fd()], None), [true, false]);
        assert_eq!(poll(&[c.as_fd()], Some(Duration::from_millis(1))), [false]);
    }
}
