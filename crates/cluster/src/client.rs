//! A process's connection to the hub: a reader, and a thread that beats. Both end with the [`Client`], and when the
//! connection does. By it a process asks for rank 0's [`Clock`].

use super::greet;
use super::server::{beat, check_secret, spawn};
use super::wire::{self, Failure, Record, ToHost, ToHub};
use super::world::Local;
use crate::runtime::{StallTimer, WallClock};
use gpu_pool::{Error, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    io::{self, BufReader, ErrorKind, Read},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream},
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant, UNIX_EPOCH},
};

/// The time between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(20);

/// A machine that says nothing to a connection is asked again.
const A_TRY: Duration = Duration::from_secs(3);

/// No start takes longer; the clock's own limit is somewhere above.
const A_YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// How often a process asks for rank 0's clock: the fastest trip counts.
const TRIPS: usize = 5;

/// All these trips take no longer.
const TRIPS_LIMIT: Duration = Duration::from_millis(500);

pub(super) struct Client {
    pub local: Arc<Local>,
    pub clock: Arc<Clock>,
    link: Arc<Line>,
    closing: Arc<(Mutex<bool>, Condvar)>,
}

/// A connection that several threads write to.
struct Line {
    stream: TcpStream,
    writing: Mutex<()>,
}

impl Line {
    fn send(&self, frame: &ToHub) -> Result<(), Failure> {
        let _writing = self.writing.lock();
        match wire::write(&mut &self.stream, frame) {
            // The reader ends the cluster: what has come before the end says more.
            Err(e) if is_cut(e.kind()) => drop(self.stream.shutdown(Shutdown::Both)),
            written => written.map_err(|e| Failure::lost(0, format!("the connection to it broke: {e}")))?,
        }
        Ok(())
    }
}

/// Rank 0's clock, over the connection. Invariant: a question comes back with its answer, so a late answer is right.
pub(super) struct Clock {
    link: Arc<Line>,
    answers: Mutex<Receiver<WallClock>>,
    /// The time 0 of questions.
    begun: Instant,
}

impl Clock {
    /// `None`: rank 0 has given no answer in time, or is lost.
    pub(super) fn ask(&self) -> Option<WallClock> {
        let (until, answers) = (Instant::now() + TRIPS_LIMIT, self.answers.lock());
        answers.try_iter().for_each(drop);
        let trip = |_| {
            self.link.send(&ToHub::Clock { sent: self.begun.elapsed() }).ok()?;
            answers.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
        };
        (0..TRIPS).map_while(trip).min_by_key(|answer| answer.error)
    }
}

/// An answer that has just come. Its trip may have been all in one direction.
fn answer(begun: Instant, sent: Duration, wall: Duration) -> Option<WallClock> {
    let now = Instant::now();
    let error = now.duration_since(begun).checked_sub(sent)? / 2;
    Some(WallClock { at: now - error, wall: UNIX_EPOCH.checked_add(wall)?, error })
}

impl Client {
    /// Connects to rank 0, which may come later. Tries again after a connection that ends before rank 0's word.
    pub(super) fn connect(
        at: SocketAddr,
        host: usize,
        size: usize,
        secret: &[u8],
        heartbeat_timeout: Duration,
        connect_timeout: Duration,
    ) -> Result<Client> {
        check_secret(at, secret)?;
        let broken = |e: io::Error| cluster_error!("connect", "the connection to {at}: {e}");
        let begun = Instant::now();
        let until = begun + connect_timeout.min(A_YEAR);
        let stream = loop {
            let stream = dial(at, begun, connect_timeout)?;
            stream.set_nodelay(true).map_err(broken)?;
            let why = match greet::introduce(&stream, secret, host, size, until) {
                Ok(()) => break stream,
                Err(e) if is_cut(e.kind()) && Instant::now() < until => {
                    thread::sleep(AGAIN);
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::PermissionDenied => e.to_string(),
                Err(e) if is_silent(e.kind()) => format!("{at} has given no answer for {connect_timeout:?}"),
                Err(e) => format!("{at} does not answer as rank 0 of a cluster would: {e}"),
            };
            return Err(Error::Cluster { op: "connect", why });
        };
        let limit = |part: u32| Some((heartbeat_timeout / part).max(Duration::from_millis(1)));
        stream.set_read_timeout(limit(8)).and_then(|()| stream.set_write_timeout(limit(2))).map_err(broken)?;
        let reading = stream.try_clone().map_err(broken)?;
        let link = Arc::new(Line { stream, writing: Mutex::new(()) });
        let line = link.clone();
        let local = Local::new(host, Box::new(move |frame| line.send(&frame)));
        let (tell, answers) = mpsc::sync_channel(TRIPS);
        let clock = Arc::new(Clock { link: link.clone(), answers: Mutex::new(answers), begun });
        let client = Client { local, clock, link, closing: Arc::default() };
        let local = client.local.clone();
        spawn("reader", move || {
            let take = |frame| match frame {
                // No room: nobody asks any more.
                ToHost::Clock { sent, wall } => drop(answer(begun, sent, wall).map(|answer| tell.try_send(answer))),
                frame => local.take(frame),
            };
            local.end_cluster(read(&reading, take, heartbeat_timeout));
            // After the cause is known: what breaks by this is no cause.
            let _ = reading.shutdown(Shutdown::Both);
        })?;
        let (local, link, closing) = (client.local.clone(), client.link.clone(), client.closing.clone());
        spawn("beat", move || {
            let mut closing = (closing.0.lock(), &closing.1);
            while !*closing.0 && link.send(&local.beat()).is_ok() {
                closing.1.wait_for(&mut closing.0, beat(heartbeat_timeout));
            }
        })?;
        Ok(client)
    }

    /// The address of this machine that rank 0's packets reach.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.link.stream.local_addr().ok().map(|at| at.ip())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.local.tell(Record::Frame(ToHub::Bye));
        let _ = self.link.send(&ToHub::Bye);
        let _ = self.link.stream.shutdown(Shutdown::Both);
        *self.closing.0.lock() = true;
        self.closing.1.notify_all();
    }
}

fn is_silent(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn is_cut(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

fn dial(at: SocketAddr, start: Instant, connect_timeout: Duration) -> Result<TcpStream> {
    loop {
        let left = connect_timeout.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&at, left.min(A_TRY)) {
            Err(e) if wire::no_descriptor(&e) => {
                let why = "this process has no free file descriptor for a connection to rank 0";
                return Err(cluster_error!("connect", "{why}: {e}"));
            }
            // Without a listener, a port that the system picks for this end may be the very port.
            Ok(stream) if stream.local_addr().ok() != stream.peer_addr().ok() => return Ok(stream),
            result if start.elapsed() >= connect_timeout => {
                let why = result.err().map_or_else(|| "it has connected to itself".to_owned(), |e| e.to_string());
                return Err(cluster_error!("connect", "rank 0 did not listen at {at} for {connect_timeout:?}: {why}"));
            }
            _ => thread::sleep(AGAIN),
        }
    }
}

/// Reads until the connection ends, and tells why it did. Only whole frames are signs of life.
fn read(stream: &TcpStream, take: impl Fn(ToHost), heartbeat_timeout: Duration) -> Failure {
    let mut from = BufReader::new(Patient { stream, stall: StallTimer::new(heartbeat_timeout) });
    loop {
        match wire::read::<ToHost>(&mut from, wire::MOST) {
            Ok(frame) => {
                from.get_mut().stall.renew();
                take(frame);
            }
            Err(e) => {
                let why = match e.kind() {
                    kind if is_silent(kind) => format!("it has said nothing for {heartbeat_timeout:?}"),
                    ErrorKind::InvalidData => format!("it has sent nonsense: {e}"),
                    ErrorKind::UnexpectedEof => "its connection has ended, as when a process ends".to_owned(),
                    _ => format!("the connection to it broke: {e}"),
                };
                return Failure::lost(0, why);
            }
        }
    }
}

/// A stream whose reads time out only when the stall does.
struct Patient<'a> {
    stream: &'a TcpStream,
    stall: StallTimer,
}

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        loop {
            match stream.read(buffer) {
                // A look at each read: bytes that are no frame are none.
                Ok(_) if self.stall.is_over() => return Err(ErrorKind::TimedOut.into()),
                Err(e) if is_silent(e.kind()) && !self.stall.is_over() => {}
                read => return read,
            }
        }
    }
}
