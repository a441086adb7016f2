//! Memory that several processes map, and how a process comes to another one's.
//!
//! The memory is a `memfd`: it has no name in a file system, so nothing is left when processes die. Its descriptor goes
//! through a socket of the abstract name space, to processes of the same user only. It is sealed, so no process can
//! make it shorter while it is mapped (`SIGBUS`).

use super::failure;
use crate::socket;
use gpu_pool::{Error, Result};
use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
    net::RecvFlags,
};
use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    ptr, thread,
    time::{Duration, Instant},
};

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

pub(crate) struct Shared {
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
    pub(crate) fn new(bytes: usize) -> Result<Shared> {
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
        // A core dump would contain the whole mapping, and so touch each of its pages.
        // SAFETY: the mapping above; it changes no content.
        let _ = unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxDontDump) };
        Ok(Shared { descriptor, at: at.cast(), bytes })
    }

    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Maps the memory of others, of this size.
    pub(crate) fn map_theirs(&self, theirs: Vec<Option<OwnedFd>>) -> Result<Vec<Option<Shared>>> {
        theirs.into_iter().map(|theirs| theirs.map(|theirs| Shared::map(theirs, self.bytes)).transpose()).collect()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: this object's mapping, which its users have outlived by their promise.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.bytes) };
    }
}

/// A process's entry in the table: a part of its socket's name, and the secret for a visitor.
const ADDRESS: usize = 16;
const KEY: usize = 16;

/// Most visitors that have not said yet which process they are; the one that has waited longest makes room.
const MOST_VISITORS: usize = 1024;

/// Gives this process's descriptor to all others, and gets theirs, by their places among `hosts`, the numbers of all.
/// None for itself. `tell` gives some bytes to the others, which `ask` for them. Every wait ends when `lost` says why,
/// and at the deadline.
pub(crate) fn pass_on(
    own: BorrowedFd<'_>,
    (rank, hosts): (usize, &[usize]),
    tell: &dyn Fn(&[u8]) -> Result<()>,
    ask: &dyn Fn(usize) -> Result<Vec<u8>>,
    lost: &dyn Fn() -> Option<Error>,
    deadline: Duration,
) -> Result<Vec<Option<OwnedFd>>> {
    let (start, size) = (Instant::now(), hosts.len());
    let pause = |missing: &dyn Fn() -> Vec<usize>| -> Result<()> {
        lost().map_or(Ok(()), Err)?;
        if start.elapsed() > deadline {
            let (op, waited) = ("shared memory".to_owned(), start.elapsed());
            let missing = missing().into_iter().map(|peer| hosts[peer]).collect();
            return Err(Error::HostTimeout { op, waited, missing });
        }
        thread::sleep(Duration::from_millis(1));
        Ok(())
    };
    let random: [u8; ADDRESS + KEY] = crate::greet::random().map_err(|why| failure("getrandom", why.to_string()))?;
    let listener = socket::listen(&address(&random[..ADDRESS])).map_err(|why| broken("bind", &why))?;
    tell(&random)?;

    // The system keeps visitors until they are received, so nobody waits for a peer that is still on its way to others.
    let visit = |peer: usize| -> Result<UnixStream> {
        let told = ask(peer)?;
        let Some((to, key)) = told.split_at_checked(ADDRESS).filter(|(_, key)| key.len() == KEY) else {
            let (host, bytes) = (hosts[peer], told.len());
            return Err(failure("connect", format!("host {host} has told {bytes} bytes as its address")));
        };
        let mut stream = loop {
            match socket::connect(&address(to)) {
                Ok(stream) => break stream,
                // Many others are at its door.
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => pause(&|| vec![peer])?,
                // Nobody has that name here.
                Err(why) if why.kind() == io::ErrorKind::ConnectionRefused => {
                    let why = "has gone, or is on another machine (or in another container): use MPI";
                    return Err(failure("connect", format!("host {} {why}", hosts[peer])));
                }
                Err(why) => return Err(broken("connect", &why)),
            }
        };
        same_user(&stream)?;
        stream.write_all(&[key, &(rank as u64).to_ne_bytes()].concat()).map_err(|why| broken("connect", &why))?;
        Ok(stream)
    };
    let streams = (0..size).map(|peer| (peer != rank).then(|| visit(peer)).transpose());
    let streams = streams.collect::<Result<Vec<_>>>()?;

    let mut missing: Vec<usize> = (0..size).filter(|&peer| peer != rank).collect();
    let mut visitors = VecDeque::new();
    while !missing.is_empty() {
        let came = match listener.accept() {
            Ok((stream, _)) => {
                // A stranger is no failure of the cluster's.
                let known = same_user(&stream).is_ok() && stream.set_nonblocking(true).is_ok();
                visitors.extend(known.then_some(stream));
                true
            }
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => false,
            Err(why) => return Err(broken("accept", &why)),
        };
        visitors.retain(|visitor| match greet(visitor, &random[ADDRESS..], own) {
            Greeted::Not => true,
            Greeted::Stranger => false,
            Greeted::Peer(peer) => {
                missing.retain(|&other| other != peer);
                false
            }
        });
        if visitors.len() > MOST_VISITORS {
            visitors.pop_front();
        }
        if !came {
            pause(&|| missing.clone())?;
        }
    }
    let receive = |(peer, stream): (usize, Option<UnixStream>)| {
        let Some(stream) = stream else { return Ok(None) };
        while !socket::poll(&[stream.as_fd()], Some(Duration::from_millis(10)))[0] {
            pause(&|| vec![peer])?;
        }
        take(&stream).map(Some)
    };
    streams.into_iter().enumerate().map(receive).collect()
}

enum Greeted {
    /// It has not given its number.
    Not,
    /// It does not know the key, or has gone.
    Stranger,
    Peer(usize),
}

/// Receives a visitor, whose word comes as a whole, and gives it the memory.
fn greet(mut stream: &UnixStream, key: &[u8], own: BorrowedFd<'_>) -> Greeted {
    let mut told = [0; KEY + 8];
    match stream.read_exact(&mut told) {
        Err(why) if why.kind() == io::ErrorKind::WouldBlock => return Greeted::Not,
        Err(_) => return Greeted::Stranger,
        Ok(()) => {}
    }
    let (told, peer) = told.split_at(KEY);
    let peer = usize::try_from(u64::from_ne_bytes(peer.try_into().expect("eight bytes")));
    match peer {
        Ok(peer) if told == key && give(stream, own).is_ok() => Greeted::Peer(peer),
        _ => Greeted::Stranger,
    }
}

fn address(random: &[u8]) -> String {
    format!("gpu-pool/{}", random.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// Any process may use names of the abstract space, so each side asks the other for its identity.
fn same_user(stream: &UnixStream) -> Result<()> {
    let (process, user) = socket::peer(stream).map_err(|why| broken("getsockopt", &why))?;
    match socket::own_user() {
        me if me == user => Ok(()),
        me => Err(failure("connect", format!("process {process} is user {user}'s, this one {me}'s"))),
    }
}

fn give(to: &UnixStream, descriptor: BorrowedFd<'_>) -> Result<()> {
    socket::send(to, &[1], Some(descriptor)).map_err(|why| broken("sendmsg", &why))
}

fn take(from: &UnixStream) -> Result<OwnedFd> {
    let received = socket::receive(from, &mut [0], RecvFlags::DONTWAIT).map_err(|why| broken("recvmsg", &why))?;
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
