//! Memory that several processes map, and how a process comes to another one's.
//!
//! The memory is a `memfd`: it has no name in a file system, so nothing is left when processes die. Its descriptor goes
//! through a socket of the abstract name space, to processes of the same user only. It is sealed, so nobody can make it
//! shorter while it is mapped (`SIGBUS`).

use super::failure;
use gpu_pool::{Error, Result};
use std::{
    io::{self, Read, Write},
    mem,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    ptr, thread,
    time::{Duration, Instant},
};

/// The seals that memory must have.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// A mapping.
pub(super) struct Shared {
    descriptor: OwnedFd,
    at: *mut u8,
    bytes: usize,
}

// SAFETY: an address range. What its bytes are used for, and by whom, its users say.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// New memory, of zeros. Pages take room when they are touched.
    pub(super) fn new(bytes: usize) -> Result<Shared> {
        // SAFETY: a name that ends.
        let made = unsafe { libc::memfd_create(c"gpu-pool".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        // SAFETY: a new descriptor, which nobody else has.
        let descriptor = unsafe { OwnedFd::from_raw_fd(checked("memfd_create", made)?) };
        let length = libc::off_t::try_from(bytes).map_err(|_| failure("ftruncate", "more than a file may have"))?;
        // SAFETY: calls on our descriptor.
        unsafe {
            checked("ftruncate", libc::ftruncate(descriptor.as_raw_fd(), length))?;
            let seals = SEALS | libc::F_SEAL_SEAL;
            checked("fcntl", libc::fcntl(descriptor.as_raw_fd(), libc::F_ADD_SEALS, seals))?;
        }
        Self::map(descriptor, bytes)
    }

    /// Memory of another process, which must have `bytes` bytes for good.
    pub(super) fn map(descriptor: OwnedFd, bytes: usize) -> Result<Shared> {
        // SAFETY: calls on our descriptor, and room for a result.
        let (size, seals) = unsafe {
            let mut stat: libc::stat = mem::zeroed();
            checked("fstat", libc::fstat(descriptor.as_raw_fd(), &mut stat))?;
            (stat.st_size, checked("fcntl", libc::fcntl(descriptor.as_raw_fd(), libc::F_GET_SEALS))?)
        };
        if usize::try_from(size) != Ok(bytes) || seals & SEALS != SEALS {
            return Err(failure("mmap", format!("a peer's memory of {size} bytes, seals {seals:#x}, is not its ring")));
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of a whole file that keeps its size.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, descriptor.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(last("mmap"));
        }
        Ok(Shared { descriptor, at: at.cast(), bytes })
    }

    /// The first byte.
    pub(super) fn at(&self) -> *mut u8 {
        self.at
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: this object's mapping, which its users have outlived by their promise.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

/// What a process tells in the table: a part of its socket's name, and what a visitor must know.
const ADDRESS: usize = 16;
const KEY: usize = 16;

/// Gives this process's memory to all others, and gets theirs, of the same size, by their numbers. None for itself.
pub(super) fn introduce(
    own: &Shared,
    name: &str,
    (rank, size): (usize, usize),
    set: &impl Fn(&str, &[u8]) -> Result<()>,
    get: &impl Fn(&str) -> Result<Vec<u8>>,
    deadline: Duration,
) -> Result<Vec<Option<Shared>>> {
    let start = Instant::now();
    let left = || deadline.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
    let entry = |rank: usize| format!("shm/{name}/{rank}");
    let random = random()?;
    let listener = UnixListener::bind_addr(&address(&random[..ADDRESS])?).map_err(|why| broken("bind", &why))?;
    listener.set_nonblocking(true).map_err(|why| broken("listen", &why))?;
    set(&entry(rank), &random)?;

    // The system keeps visitors until they are received, so nobody waits for a peer that is still on its way to others.
    let visit = |peer: usize| -> Result<UnixStream> {
        let told = get(&entry(peer))?;
        let Some((to, key)) = told.split_at_checked(ADDRESS).filter(|(_, key)| key.len() == KEY) else {
            return Err(failure("connect", format!("host {peer} has told {} bytes as its address", told.len())));
        };
        let mut stream = UnixStream::connect_addr(&address(to)?).map_err(|why| match why.kind() {
            // Nobody has that name here.
            io::ErrorKind::ConnectionRefused => failure(
                "connect",
                format!("host {peer} has gone, or is on another machine (or in another container): use MPI"),
            ),
            _ => broken("connect", &why),
        })?;
        same_user(&stream)?;
        stream.write_all(&[key, &(rank as u64).to_ne_bytes()].concat()).map_err(|why| broken("connect", &why))?;
        Ok(stream)
    };
    let streams = (0..size).map(|peer| (peer != rank).then(|| visit(peer)).transpose());
    let streams = streams.collect::<Result<Vec<_>>>()?;

    let mut missing: Vec<usize> = (0..size).filter(|&peer| peer != rank).collect();
    while !missing.is_empty() {
        match listener.accept() {
            // A stranger is no failure of the cluster's.
            Ok((stream, _)) => {
                if let Some(peer) = greet(stream, &random[ADDRESS..], own, left()) {
                    missing.retain(|&other| other != peer);
                }
            }
            Err(why) if why.kind() != io::ErrorKind::WouldBlock => return Err(broken("accept", &why)),
            Err(_) if start.elapsed() > deadline => {
                return Err(Error::HostTimeout { op: "shared memory".to_owned(), waited: start.elapsed(), missing });
            }
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
    let receive = |stream: UnixStream| {
        stream.set_read_timeout(Some(left())).map_err(|why| broken("receive", &why))?;
        Shared::map(take(&stream)?, own.bytes)
    };
    streams.into_iter().map(|stream| stream.map(receive).transpose()).collect()
}

/// Receives a visitor, and gives it the memory. None for one that does not know the key, or has gone.
fn greet(mut stream: UnixStream, key: &[u8], own: &Shared, limit: Duration) -> Option<usize> {
    let mut told = [0; KEY + 8];
    same_user(&stream).ok()?;
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    stream.read_exact(&mut told).ok()?;
    let (told, peer) = told.split_at(KEY);
    if told != key {
        return None;
    }
    give(&stream, &own.descriptor).ok()?;
    usize::try_from(u64::from_ne_bytes(peer.try_into().ok()?)).ok()
}

fn address(random: &[u8]) -> Result<SocketAddr> {
    let name = format!("gpu-pool/{}", random.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    SocketAddr::from_abstract_name(name).map_err(|why| broken("bind", &why))
}

fn random() -> Result<[u8; ADDRESS + KEY]> {
    let mut bytes = [0; ADDRESS + KEY];
    getrandom::fill(&mut bytes).map_err(|why| failure("getrandom", why.to_string()))?;
    Ok(bytes)
}

/// Names of the abstract space are everybody's, so each side asks who the other is.
fn same_user(stream: &UnixStream) -> Result<()> {
    // SAFETY: room for a result of that size; calls without arguments.
    let (who, me) = unsafe {
        let mut who: libc::ucred = mem::zeroed();
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        let code = libc::getsockopt(stream.as_raw_fd(), level, option, (&raw mut who).cast(), &mut len);
        checked("getsockopt", code)?;
        (who, libc::geteuid())
    };
    match who.uid == me {
        true => Ok(()),
        false => Err(failure("connect", format!("process {} is user {}'s, this one {me}'s", who.pid, who.uid))),
    }
}

/// Room for a control message with one descriptor, aligned as such messages are.
type Control = [u64; 4];

/// Calls `f` with a message of one byte and room for one descriptor.
fn with_message<R>(f: impl FnOnce(&mut libc::msghdr) -> R) -> R {
    let (mut byte, mut control): (u8, Control) = (1, [0; 4]);
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: a header of zeros has no parts.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: a computation.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<libc::c_int>() as u32) } as _;
    assert!(message.msg_controllen as usize <= size_of::<Control>());
    f(&mut message)
}

fn give(to: &UnixStream, descriptor: &OwnedFd) -> Result<()> {
    // SAFETY: the message and its room are alive; there is room for one control message.
    let sent = with_message(|message| unsafe {
        let control = libc::CMSG_FIRSTHDR(message);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SCM_RIGHTS;
        (*control).cmsg_len = libc::CMSG_LEN(size_of::<libc::c_int>() as u32) as _;
        libc::CMSG_DATA(control).cast::<libc::c_int>().write_unaligned(descriptor.as_raw_fd());
        libc::sendmsg(to.as_raw_fd(), message, libc::MSG_NOSIGNAL)
    });
    if sent == 1 { Ok(()) } else { Err(last("sendmsg")) }
}

fn take(from: &UnixStream) -> Result<OwnedFd> {
    // SAFETY: the message and its room are alive. A control message of this kind and length has one descriptor, which
    // is this process's from now on.
    with_message(|message| unsafe {
        let got = libc::recvmsg(from.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC);
        if got < 0 {
            return Err(last("recvmsg"));
        }
        let control = libc::CMSG_FIRSTHDR(message).as_ref();
        let length = libc::CMSG_LEN(size_of::<libc::c_int>() as u32);
        match control {
            Some(c) if got == 1 && c.cmsg_type == libc::SCM_RIGHTS && c.cmsg_len as u64 == u64::from(length) => {
                Ok(OwnedFd::from_raw_fd(libc::CMSG_DATA(c).cast::<libc::c_int>().read_unaligned()))
            }
            _ => Err(failure("recvmsg", "a peer has gone, or has sent no memory")),
        }
    })
}

fn checked(op: &'static str, result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 { Err(last(op)) } else { Ok(result) }
}

fn last(op: &'static str) -> Error {
    broken(op, &io::Error::last_os_error())
}

fn broken(op: &'static str, why: &io::Error) -> Error {
    Error::Transport { library: "shm", op, code: why.raw_os_error().unwrap_or(0), why: why.to_string() }
}
