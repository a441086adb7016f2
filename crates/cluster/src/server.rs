//! The first process's server: brings the frames of all processes to the hub, and its answers back.
//!
//! One thread accepts, one ticks, and each connection has a reader. All of the hub's answers are written under its
//! lock, so each process gets them in the hub's order. The threads end with the [`Server`].

use super::greet::{self, Not};
use super::hub::{Hub, Limits, Out};
use super::wire::{self, Failure, Record, ToHost, ToHub};
use gpu_pool::{Result, event};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::{BTreeMap, VecDeque},
    io::{BufReader, ErrorKind, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The most connections that are being greeted at a time. The oldest one of the address that has most makes room.
const GREETINGS: usize = 64;

/// After a refusal or a loss in the start rank 0 waits so long for others that come late, to tell them.
const LATE: Duration = Duration::from_secs(2);

pub(super) struct Server {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    secret: Vec<u8>,
    start: Instant,
    heartbeat_timeout: Duration,
}

/// Must not wait.
type Tell = Box<dyn Fn(Record) + Send>;

struct State {
    hub: Hub,
    links: BTreeMap<usize, Arc<TcpStream>>,
    greeted: VecDeque<(IpAddr, Arc<TcpStream>)>,
    /// Tells all processes, once they meet in shared memory ([`near`](super::near)): the time, and losses.
    near: Option<Tell>,
    closing: bool,
}

impl Server {
    /// Listens at this address: without a secret only on loopback.
    pub(super) fn start(at: SocketAddr, limits: Limits, secret: Vec<u8>) -> Result<Server> {
        check_secret(at, &secret)?;
        let listener = match TcpListener::bind(at) {
            // The name of a service, say, whose address is not this machine's: the secret keeps strangers out.
            Err(e) if e.kind() == ErrorKind::AddrNotAvailable && !secret.is_empty() => {
                let any = if at.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
                TcpListener::bind(SocketAddr::new(any, at.port()))
            }
            bound => bound,
        };
        let listener = listener.map_err(|e| cluster_error!("listen", "rank 0 cannot listen at {at}: {e}"))?;
        let address = listener.local_addr().map_err(|e| cluster_error!("listen", "{e}"))?;
        let reserve = listener.try_clone();
        let reserve = Some(reserve.map_err(|e| cluster_error!("listen", "rank 0 cannot accept connections: {e}"))?);
        let (links, greeted, hub) = (BTreeMap::new(), VecDeque::new(), Hub::new(limits));
        let state = Mutex::new(State { hub, links, greeted, near: None, closing: false });
        let (start, heartbeat_timeout) = (Instant::now(), limits.heartbeat_timeout);
        let shared = Arc::new(Shared { state, changed: Condvar::new(), secret, start, heartbeat_timeout });
        let accepting = shared.spawn("accept", move |shared| shared.accept(&listener, reserve))?;
        let server = Server { address, shared, accepting: Some(accepting) };
        server.shared.spawn("tick", |shared| shared.tick())?;
        Ok(server)
    }

    /// From now on all meet in shared memory.
    pub(super) fn tells(&self, near: Tell) {
        self.shared.state.lock().near = Some(near);
    }

    /// From now on processes tell each other of their arrivals.
    pub(super) fn mesh(&self) {
        self.shared.state.lock().hub.mesh();
    }
}

pub(super) fn check_secret(at: SocketAddr, secret: &[u8]) -> Result<()> {
    let open = secret.is_empty() && !at.ip().is_loopback();
    let why = "can be reached from other machines, so a secret is needed: set GPU_POOL_SECRET";
    fail_if!(open, cluster_error!("connect", "{at} {why}"));
    Ok(())
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        let until = Instant::now() + LATE;
        while state.hub.has_to_tell() && Instant::now() < until {
            self.shared.changed.wait_for(&mut state, Duration::from_millis(5));
        }
        state.closing = true;
        let gone = ToHost::Over { failure: Failure::lost(0, "it has left the cluster") };
        let out = state.links.keys().map(|host| (*host, gone.clone())).collect();
        state.send(out);
        // This ends the readers' reads.
        state.links.values().for_each(|link| drop(link.shutdown(Shutdown::Both)));
        drop(state);
        self.shared.changed.notify_all();
        // This ends the thread that accepts.
        let mut at = self.address;
        if at.ip().is_unspecified() {
            at.set_ip(if at.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
        }
        let woken = TcpStream::connect_timeout(&at, Duration::from_secs(1)).is_ok();
        // The next cluster may want the port, which that thread has.
        if let Some(accepting) = self.accepting.take().filter(|_| woken) {
            let _ = accepting.join();
        }
    }
}

impl State {
    /// The hub's frames come behind the welcome.
    fn join(
        &mut self,
        stream: &Arc<TcpStream>,
        host: usize,
        welcome: &mut dyn FnMut() -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        fail_if!(!self.forget(stream), ErrorKind::ConnectionAborted.into());
        stream.set_nodelay(true)?;
        welcome()?;
        self.links.insert(host, stream.clone());
        let out = self.hub.joined(host);
        self.send(out);
        Ok(())
    }

    fn forget(&mut self, stream: &Arc<TcpStream>) -> bool {
        let at = self.greeted.iter().position(|(_, other)| Arc::ptr_eq(other, stream));
        at.and_then(|at| self.greeted.remove(at)).is_some()
    }

    /// A new connection: silent strangers must not crowd out members.
    fn greets(&mut self, from: IpAddr, stream: Arc<TcpStream>) {
        if self.greeted.len() >= GREETINGS {
            let mut counts = BTreeMap::<IpAddr, usize>::new();
            self.greeted.iter().for_each(|(address, _)| *counts.entry(*address).or_default() += 1);
            let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(address, _)| address);
            let oldest = self.greeted.iter().position(|(address, _)| Some(*address) == most);
            if let Some((_, oldest)) = oldest.and_then(|at| self.greeted.remove(at)) {
                let _ = oldest.shutdown(Shutdown::Both);
            }
        }
        self.greeted.push_back((from, stream));
    }

    /// Writes frames in their order. A process that does not read is shut out, which its reader sees.
    fn send(&mut self, out: Out) {
        let mut bytes = BTreeMap::<usize, Vec<u8>>::new();
        let over = out.iter().find_map(|(_, frame)| match frame {
            ToHost::Over { failure } => Some(Record::Over(failure.clone())),
            _ => None,
        });
        if let (Some(near), Some(over)) = (&self.near, over) {
            near(over);
        }
        for (host, frame) in out {
            match wire::frame(&frame) {
                Ok(frame) => bytes.entry(host).or_default().extend(frame),
                Err(e) => event!(error, "hub_write_failed", host, "the hub could not write a frame: {e}"),
            }
        }
        // This process last: it may end as soon as it has read its own.
        for (host, bytes) in bytes.into_iter().rev() {
            if let Some(link) = self.links.get(&host)
                && (&**link).write_all(&bytes).is_err()
            {
                let _ = link.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Shared {
    fn spawn(self: &Arc<Self>, name: &str, f: impl FnOnce(&Arc<Shared>) + Send + 'static) -> Result<JoinHandle<()>> {
        let shared = self.clone();
        spawn(name, move || f(&shared))
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener, mut reserve: Option<TcpListener>) {
        loop {
            let mut accepted = listener.accept();
            let full = accepted.as_ref().err().filter(|e| wire::no_descriptor(e)).map(ToString::to_string);
            if full.is_some() {
                reserve.take();
                accepted = listener.accept();
            }
            let mut state = self.state.lock();
            if state.closing {
                return;
            }
            let Ok((stream, from)) = accepted else {
                self.changed.wait_for(&mut state, Duration::from_millis(50));
                continue;
            };
            if let Some(full) = full {
                drop(state);
                self.serve(&Arc::new(stream), from, Some(&format!("rank 0 cannot accept it: {full}")));
                reserve = listener.try_clone().ok();
                continue;
            }
            let stream = Arc::new(stream);
            state.greets(from.ip(), stream.clone());
            drop(state);
            let serving = stream.clone();
            if let Err(e) = self.spawn("connection", move |shared| shared.serve(&serving, from, None)) {
                event!(warn, "hub_has_no_thread", "{e}");
                self.state.lock().forget(&stream);
            }
        }
    }

    fn serve(&self, stream: &Arc<TcpStream>, from: SocketAddr, full: Option<&str>) {
        let joined = greet::greet(stream, greet::GREETING, &self.secret, |host, size, welcome| {
            let mut state = self.state.lock();
            match state.hub.refuses(host, size).or_else(|| full.map(|why| format!("rank {host}: {why}"))) {
                Some(why) => Err(Not::Member(why)),
                None if state.closing => Err(Not::Stranger("rank 0 has left".to_owned())),
                None => state.join(stream, host, welcome).map_err(|e| Not::Stranger(e.to_string())),
            }
        });
        let mut state = self.state.lock();
        state.forget(stream);
        if let Err(Not::Member(why)) = &joined {
            let out = state.hub.refused(&format!("a process was refused: {why}"));
            state.send(out);
        }
        drop(state);
        match joined {
            Ok(host) => self.read(stream, host),
            Err(Not::Stranger(why) | Not::Member(why)) => {
                event!(warn, "connection_refused", "a connection from {from} was refused: {why}");
            }
        }
    }

    fn read(&self, stream: &TcpStream, host: usize) {
        let limit = Some(self.heartbeat_timeout / 2).filter(|limit| !limit.is_zero());
        let mut from = BufReader::new(stream);
        let set = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(limit));
        let mut read = set.and_then(|()| wire::read::<ToHub>(&mut from, wire::MOST));
        while let Ok(frame) = read {
            let mut state = self.state.lock();
            let out = match frame {
                ToHub::Clock { sent } => {
                    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    vec![(host, ToHost::Clock { sent, wall })]
                }
                frame => state.hub.frame(host, frame),
            };
            state.send(out);
            if state.hub.has_left(host) {
                state.links.remove(&host);
                return;
            }
            drop(state);
            read = wire::read(&mut from, wire::MOST);
        }
        let why = match read.err() {
            Some(e) if e.kind() == ErrorKind::InvalidData => format!("it has sent nonsense: {e}"),
            Some(e) if e.kind() != ErrorKind::UnexpectedEof => format!("its connection broke: {e}"),
            _ => "its connection has ended, as when a process ends".to_owned(),
        };
        let _ = stream.shutdown(Shutdown::Both);
        let mut state = self.state.lock();
        state.links.remove(&host);
        let out = state.hub.lost_at(self.start.elapsed(), host, &why);
        state.send(out);
    }

    fn tick(&self) {
        let mut state = self.state.lock();
        while !state.closing {
            let clock = self.start.elapsed();
            let out = state.hub.tick(clock);
            state.send(out);
            state.near.iter().for_each(|near| near(Record::Tick(clock)));
            self.changed.wait_for(&mut state, beat(self.heartbeat_timeout));
        }
    }
}

pub(super) fn beat(heartbeat_timeout: Duration) -> Duration {
    (heartbeat_timeout / 8).clamp(Duration::from_millis(5), Duration::from_millis(100))
}

pub(super) fn spawn(name: &str, f: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let started = thread::Builder::new().name(format!("cluster {name}")).spawn(f);
    started.map_err(|e| cluster_error!("connect", "no thread could be started: {e}"))
}
