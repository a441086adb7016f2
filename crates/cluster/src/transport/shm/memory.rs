//! Memory that several processes map, and how a process comes to another one's.
//!
//! The memory is a `memfd`: it has no name in a file system, so nothing is left when processes die. Its descriptor goes
//! through a socket of the abstract name space, to processes of the same user only. It is sealed, so nobody can make it
//! shorter while it is mapped (`SIGBUS`).

use super::failure;
use crate::socket;
use gpu_pool::{Error, Result};
use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
    net::RecvFlags,
};
use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    ptr, thread,
    time::{Duration, Instant},
};

/// The seals that memory must have.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

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
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = rustix::fs::memfd_create(c"gpu-pool", flags).map_err(|why| errno("memfd_create", why))?;
        rustix::fs::ftruncate(&descriptor, bytes as u64).map_err(|why| errno("ftruncate", why))?;
        rustix::fs::fcntl_add_seals(&descriptor, SEALS | SealFlags::SEAL).map_err(|why| errno("fcntl", why))?;
        Self::map(descriptor, bytes)
    }

    /// Memory of another process, which must have `bytes` bytes for good.
    pub(super) fn map(descriptor: OwnedFd, bytes: usize) -> Result<Shared> {
        let size = rustix::fs::fstat(&descriptor).map_err(|why| errno("fstat", why))?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&descriptor).map_err(|why| errno("fcntl", why))?;
        if usize::try_from(size) != Ok(bytes) || !seals.contains(SEALS) {
            let seals = seals.bits();
            return Err(failure("mmap", format!("a peer's memory of {size} bytes, seals {seals:#x}, is not its ring")));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a whole file that keeps its size.
        let at = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &descriptor, 0) };
        let at = at.map_err(|why| errno("mmap", why))?;
        Ok(Shared { descriptor, at: at.cast(), bytes })
    }

    pub(super) fn at(&self) -> *mut u8 {
        self.at
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: this object's mapping, which its users have outlived by their promise.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.bytes) };
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
    let (process, user) = socket::peer(stream).map_err(|why| broken("getsockopt", &why))?;
    match socket::own_user() {
        me if me == user => Ok(()),
        me => Err(failure("connect", format!("process {process} is user {user}'s, this one {me}'s"))),
    }
}

fn give(to: &UnixStream, descriptor: &OwnedFd) -> Result<()> {
    socket::send(to, &[1], Some(descriptor.as_fd())).map_err(|why| broken("sendmsg", &why))
}

fn take(from: &UnixStream) -> Result<OwnedFd> {
    let received = socket::receive(from, &mut [0], RecvFlags::empty()).map_err(|why| broken("recvmsg", &why))?;
    match <[OwnedFd; 1]>::try_from(received.1) {
        Ok([descriptor]) if received.0 == 1 => Ok(descriptor),
        _ => Err(failure("recvmsg", "a peer has gone, or has sent no memory")),
    }
}

fn errno(op: &'static str, why: Errno) -> Error {
    broken(op, &why.into())
}

fn broken(op: &'static str, why: &io::Error) -> Error {
    Error::Transport { library: "shm", op, code: why.raw_os_error().unwrap_or(0), why: why.to_string() }
}
