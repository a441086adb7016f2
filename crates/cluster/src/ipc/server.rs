//! The thread of an exporter that gives memory to importers, and knows which of them still have it.
//!
//! It begins with the first export and ends with the last exported buffer. It never waits for one importer: each read
//! and write is non-blocking, a request has a limit, and so has their number. Invariant: no lock of this file is held
//! while memory is given up, since that comes back to [`forget`].

use super::TICK;
use super::chunk::{Chunk, Loan};
use super::wire::{self, Key, NAME, Process, RELEASED, Reply, Request};
use crate::runtime::Region;
use crate::socket;
use gpu_pool::Result;
use parking_lot::Mutex;
use rustix::net::RecvFlags;
use std::{
    collections::{HashMap, VecDeque},
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

/// A guest that has not asked by then is sent away.
const GUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Most guests that have not asked yet; the one that has waited longest makes room.
const MOST_ASKING: usize = 64;
/// Most exports that have ended, and of which an importer that comes too late is told how.
const MOST_ENDED: usize = 256;
const MOST_GUESTS: usize = 4096;

static SERVER: Mutex<Option<Arc<Server>>> = Mutex::new(None);

pub(super) struct Server {
    pub name: String,
    pub process: Process,
    book: Mutex<Book>,
    /// Closed or written to, it wakes the thread.
    wake: UnixStream,
}

#[derive(Default)]
struct Book {
    exports: HashMap<u64, Export>,
    ended: VecDeque<(u64, Export)>,
    /// The exported memory that there is, by its address.
    regions: HashMap<usize, Weak<Region>>,
    next: u64,
    /// No exported buffer is left; the thread ends.
    over: bool,
}

struct Export {
    key: Key,
    region: Weak<Region>,
    exclusive: bool,
    status: u32,
}

/// Enters an export of a region, which has a [`Chunk`]. Returns the server, and the export's number.
pub(super) fn register(region: &Arc<Region>, exclusive: bool, key: Key) -> Result<(Arc<Server>, u64)> {
    let mut current = SERVER.lock();
    // A forked process has the server's data, but not its thread.
    let ours = current.as_ref().filter(|server| server.process.pid == std::process::id());
    let server = match ours {
        Some(server) => server.clone(),
        None => current.insert(start()?).clone(),
    };
    let mut book = server.book.lock();
    book.next += 1;
    let id = book.next;
    let export = Export { key, region: Arc::downgrade(region), exclusive, status: Reply::GRANTED };
    book.regions.insert(Arc::as_ptr(region).addr(), export.region.clone());
    book.exports.insert(id, export);
    drop(book);
    Ok((server, id))
}

pub(super) fn withdraw(region: &Arc<Region>, chunk: &Chunk) {
    let current = SERVER.lock();
    let Some(server) = &*current else { return };
    let mut book = server.book.lock();
    let of_region = |(_, export): &(&u64, &Export)| std::ptr::eq(export.region.as_ptr(), Arc::as_ptr(region));
    let ids: Vec<u64> = book.exports.iter().filter(of_region).map(|(id, _)| *id).collect();
    for id in ids {
        book.end(id, Reply::WITHDRAWN);
        chunk.end(None, false);
    }
}

/// Some exported memory is gone.
pub(super) fn forget() {
    let mut current = SERVER.lock();
    let Some(server) = &*current else { return };
    let mut book = server.book.lock();
    book.exports.retain(|_, export| export.region.strong_count() > 0);
    book.ended.retain(|(_, export)| export.region.strong_count() > 0);
    book.regions.retain(|_, region| region.strong_count() > 0);
    book.over = book.regions.is_empty();
    if book.over {
        drop(book);
        let _ = socket::send(&server.wake, b"!", None);
        *current = None;
    }
}

#[cfg(test)]
pub(super) fn remembered() -> (usize, usize) {
    let current = SERVER.lock();
    current.as_ref().map_or((0, 0), |server| {
        let book = server.book.lock();
        (book.exports.len(), book.ended.len())
    })
}

fn start() -> Result<Arc<Server>> {
    let failed = |what: &str, why: io::Error| cluster_error!("export", "{what}: {why}");
    let no_process = || cluster_error!("export", "there is no /proc that tells processes apart");
    let process = Process::own().ok_or_else(no_process)?;
    let number = u64::from_le_bytes(*wire::random("export")?.first_chunk().expect("32 bytes"));
    let name = format!("{NAME}{}.{number:016x}", process.pid);
    let listener = socket::listen(&name).map_err(|why| failed("no socket", why))?;
    let (wake, woken) = UnixStream::pair().map_err(|why| failed("no socket", why))?;
    let server = Arc::new(Server { name, process, book: Mutex::default(), wake });
    let served = server.clone();
    let thread = thread::Builder::new().name("gpu-pool:ipc".into());
    thread.spawn(move || serve(&served, &listener, &woken)).map_err(|why| failed("no thread", why))?;
    Ok(server)
}

impl Book {
    fn claim(&mut self, request: &Request) -> Result<Loan, u32> {
        let ended = || self.ended.iter().find(|(id, _)| *id == request.id).map(|(_, export)| export);
        let export = self.exports.get(&request.id).or_else(ended).ok_or(Reply::STALE)?;
        fail_if!(!wire::same(&export.key, &request.key), Reply::FORGED);
        fail_if!(export.status != Reply::GRANTED, export.status);
        let region = export.region.upgrade().ok_or(Reply::STALE)?;
        let loan = Loan { region, exclusive: export.exclusive };
        self.end(request.id, Reply::USED);
        Ok(loan)
    }

    fn end(&mut self, id: u64, status: u32) {
        self.ended.extend(self.exports.remove(&id).map(|export| (id, Export { status, ..export })));
        if self.ended.len() > MOST_ENDED {
            self.ended.pop_front();
        }
    }
}

struct Guest {
    socket: UnixStream,
    process: Process,
    state: State,
}

enum State {
    /// Its request has not come as a whole.
    Asking { since: Instant, got: usize, request: [u8; size_of::<Request>()] },
    /// It has memory.
    Holding(Loan),
    /// It has memory, and its socket has ended without a word. The memory is its own until the process has ended.
    Ending(Loan),
}

fn serve(server: &Server, listener: &UnixListener, woken: &UnixStream) {
    let mut guests: Vec<Guest> = Vec::new();
    while !server.book.lock().over {
        let mut sockets: Vec<BorrowedFd<'_>> = vec![woken.as_fd(), listener.as_fd()];
        let silent = |guest: &Guest| matches!(guest.state, State::Ending(_));
        sockets.extend(guests.iter().filter(|guest| !silent(guest)).map(|guest| guest.socket.as_fd()));
        let ticks = guests.iter().any(|guest| !matches!(guest.state, State::Holding(_)));
        let ready = socket::poll(&sockets, ticks.then_some(TICK));
        guests = guests.into_iter().filter_map(|guest| guest.next(server)).collect();
        if ready[1] && !receive(listener, &mut guests) {
            // No descriptor is left for a guest, who stays at the door.
            thread::sleep(TICK);
        }
    }
}

/// Accepts some waiting connections: a stream of strangers must not hold up the others. False if that was not possible.
fn receive(listener: &UnixListener, guests: &mut Vec<Guest>) -> bool {
    for _ in 0..MOST_ASKING {
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            Err(why) => return matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        };
        let is_asking = |guest: &Guest| matches!(guest.state, State::Asking { .. });
        if guests.iter().filter(|guest| is_asking(guest)).count() >= MOST_ASKING
            && let Some(oldest) = guests.iter().position(is_asking)
        {
            guests.remove(oldest);
        }
        let known = socket::peer(&socket).ok().filter(|(_, user)| wire::may_have(*user, socket::own_user()));
        let process = known.and_then(|(pid, _)| Process::of(pid).ok()?);
        let Some(process) = process.filter(|_| guests.len() < MOST_GUESTS) else { continue };
        let state = State::Asking { since: Instant::now(), got: 0, request: [0; size_of::<Request>()] };
        guests.push(Guest { socket, process, state });
    }
    true
}

impl Guest {
    fn next(self, server: &Server) -> Option<Guest> {
        let Guest { socket, process, state } = self;
        let state = match state {
            State::Asking { since, mut got, mut request } => {
                // Descriptors that a stranger sends are closed at once.
                match socket::receive(&socket, &mut request[got..], RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return None,
                    Ok((more, _)) => got += more,
                    Err(why) if why.kind() == io::ErrorKind::WouldBlock && since.elapsed() < GUEST_TIMEOUT => {}
                    Err(_) => return None,
                }
                if got < request.len() {
                    State::Asking { since, got, request }
                } else {
                    State::Holding(answer(server, &socket, process, bytemuck::pod_read_unaligned(&request))?)
                }
            }
            State::Holding(loan) => {
                let mut word = [0];
                match socket::receive(&socket, &mut word, RecvFlags::DONTWAIT) {
                    Ok((1, _)) if word == [RELEASED] => {
                        loan.end(process.pid, false);
                        return None;
                    }
                    Err(why) if matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                        State::Holding(loan)
                    }
                    _ => ending(loan, process)?,
                }
            }
            State::Ending(loan) => ending(loan, process)?,
        };
        Some(Guest { socket, process, state })
    }
}

/// Its socket has ended. While the process lives it may still use the memory.
fn ending(loan: Loan, process: Process) -> Option<State> {
    if process.is_alive() {
        return Some(State::Ending(loan));
    }
    loan.end(process.pid, true);
    None
}

fn answer(server: &Server, socket: &UnixStream, process: Process, request: Request) -> Option<Loan> {
    let refused = |status| {
        let _ = socket::send(socket, bytemuck::bytes_of(&Reply::without_memory(status)), None);
    };
    if !request.is_valid() {
        refused(Reply::FORGED);
        return None;
    }
    let loan = server.book.lock().claim(&request);
    let loan = loan.map_err(refused).ok()?;
    let chunk = loan.chunk()?;
    chunk.begin(process.pid);
    let reply = chunk.reply(loan.exclusive);
    match socket::send(socket, bytemuck::bytes_of(&reply), Some(chunk.memory.as_fd())) {
        Ok(()) => Some(loan),
        Err(_) => {
            loan.end(process.pid, false);
            None
        }
    }
}
