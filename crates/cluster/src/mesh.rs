//! Connections from each process to each other one, by which they tell each other that they have arrived.
//!
//! The hub is told of every arrival, too, and commits. So nothing depends on these connections: one that breaks, or
//! takes no more bytes, is not used any more, and its processes wait for the hub as without it. A process that knows of
//! all arrivals of a collective need not wait for the hub (`process.rs`): one trip instead of two, and no other thread.
//!
//! `control.rs` opens the mesh, where processes do not meet in shared memory (`near.rs`). Threads that wait read it.

use super::wire::{self, Arrive, ToHub};
use super::{
    control::Control,
    greet,
    launch::{self, Meeting},
    world,
};
use crate::runtime::variables;
use gpu_pool::{Result, event};
use parking_lot::Mutex;
use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// More processes meet by the hub alone: each would have a connection to all others.
const MOST: usize = 64;

/// The mesh is open within this time, or there is none. At most a quarter of the time to connect.
const LIMIT: Duration = Duration::from_secs(5);

/// Between two looks for a connection.
const AGAIN: Duration = Duration::from_millis(1);

/// A greeting: a stranger that says nothing holds up others.
const GREETING: Duration = Duration::from_millis(500);

const LATE: &str = "other processes did not connect";

struct Mesh {
    host: usize,
    /// By host; the own one has none.
    writing: Mutex<Vec<Option<TcpStream>>>,
    reading: Mutex<Vec<Option<Reading>>>,
}

struct Reading {
    stream: TcpStream,
    bytes: Vec<u8>,
}

/// Opens the mesh, if all processes can. `own`: where others reach this process; `rank_0`: where this one reaches that.
/// All call it at about the same time. Returns whether there is a mesh.
pub(super) fn open(
    control: &Control,
    secret: &[u8],
    (own, rank_0): (Option<IpAddr>, IpAddr),
    connect_timeout: Duration,
) -> Result<bool> {
    if !(2..=MOST).contains(&control.size()) {
        return Ok(false);
    }
    let own = own.filter(|_| launch::meeting(&variables::text).is_ok_and(|by| by != Meeting::Hub));
    // A process of rank 0's machine, where the name of that may be one of loopback.
    let at_all = |ip: &IpAddr| ip.is_loopback() && !secret.is_empty();
    let all = if rank_0.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let own = own.map(|ip| if at_all(&ip) { all } else { ip });
    let listener = own.and_then(|ip| TcpListener::bind((ip, 0)).ok());
    let listener = listener.filter(|listener| listener.set_nonblocking(true).is_ok());
    let at = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    let told = control.gather("mesh", at.map_or_else(String::new, |at| at.to_string()).as_bytes())?;
    let at: Option<Vec<SocketAddr>> = told.iter().map(|at| std::str::from_utf8(at).ok()?.parse().ok()).collect();
    let (Some(listener), Some(mut at)) = (listener, at) else { return Ok(false) };
    let of_rank_0 = |at: &&mut SocketAddr| at.ip().is_loopback() || at.ip().is_unspecified();
    at.iter_mut().filter(of_rank_0).for_each(|at| at.set_ip(rank_0));
    let mesh = connect(control, &listener, &at, secret, Instant::now() + LIMIT.min(connect_timeout / 4));
    let why = mesh.as_ref().err().map_or("", String::as_str);
    let told = control.gather("mesh/open", wire::cut(why.to_owned()).as_bytes())?;
    let failed = |why: &Vec<u8>| !why.is_empty();
    let cause = told.iter().position(|why| failed(why) && why != LATE.as_bytes());
    if let Some(host) = cause.or_else(|| told.iter().position(failed)) {
        let why = String::from_utf8_lossy(&told[host]);
        event!(warn, "meeting_by_hub", host, "processes meet by rank 0: rank {host}: {why}");
        return Ok(false);
    }
    mesh.into_iter().for_each(|mesh| control.local.meet_by(Arc::new(mesh)));
    Ok(true)
}

/// Connects to all processes before this one, and then accepts all behind it.
fn connect(
    control: &Control,
    listener: &TcpListener,
    at: &[SocketAddr],
    secret: &[u8],
    until: Instant,
) -> Result<Mesh, String> {
    let (host, size) = (control.host, control.size());
    let text = |e: std::io::Error| e.to_string();
    let left = || until.saturating_duration_since(Instant::now()).max(AGAIN);
    let mut streams: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
    for (other, at) in at.iter().enumerate().take(host) {
        let stream = TcpStream::connect_timeout(at, left()).map_err(text)?;
        greet::introduce(&stream, secret, host, size, until).map_err(text)?;
        streams[other] = Some(stream);
    }
    while streams.iter().flatten().count() + 1 < size {
        let lost = control.lost().map(|lost| lost.to_string());
        let late = || (Instant::now() >= until).then(|| LATE.to_owned());
        lost.or_else(late).map_or(Ok(()), Err)?;
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).map_err(text)?;
                let greeted = greet::greet(&stream, GREETING, secret, |other, of, welcome| {
                    let expected = of == size && other > host && other < size && streams[other].is_none();
                    fail_if!(!expected, greet::Not::Stranger("it is not expected here".to_owned()));
                    welcome().map_err(|e| greet::Not::Stranger(e.to_string()))
                });
                if let Ok(other) = greeted {
                    streams[other] = Some(stream);
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => thread::sleep(AGAIN),
            Err(e) => return Err(e.to_string()),
        }
    }
    let own = |stream: &TcpStream| {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Some(Reading { stream: stream.try_clone()?, bytes: Vec::new() }))
    };
    let reading = streams.iter().map(|stream| stream.as_ref().map_or(Ok(None), own)).collect::<Result<_, _>>();
    Ok(Mesh { host, writing: Mutex::new(streams), reading: Mutex::new(reading.map_err(text)?) })
}

impl world::Mesh for Mesh {
    fn tell(&self, arrive: &ToHub) {
        let ToHub::Arrive(Arrive { members, .. }) = arrive else { return };
        let Ok(frame) = wire::frame(arrive) else { return };
        let mut streams = self.writing.lock();
        for (host, stream) in streams.iter_mut().enumerate() {
            let told = host != self.host && members.iter().any(|member| member.0 as usize == host);
            // A part of a frame is worth nothing.
            let all = |mut stream: &TcpStream| matches!(stream.write(&frame), Ok(sent) if sent == frame.len());
            stream.take_if(|stream| told && !all(stream));
        }
    }

    fn read(&self, take: &mut dyn FnMut(usize, Arrive)) {
        let Some(mut streams) = self.reading.try_lock() else { return };
        for (host, stream) in streams.iter_mut().enumerate() {
            stream.take_if(|reading| reading.read(&mut |arrive| take(host, arrive)).is_err());
        }
    }
}

impl Reading {
    fn read(&mut self, take: &mut dyn FnMut(Arrive)) -> std::io::Result<()> {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.bytes.extend_from_slice(&buffer[..read]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
            let mut rest = &self.bytes[..];
            while let Some((frame, behind)) = wire::first_frame(rest)? {
                match wire::decode(frame)? {
                    ToHub::Arrive(arrive) => take(arrive),
                    _ => return Err(ErrorKind::InvalidData.into()),
                }
                rest = behind;
            }
            let left = rest.len();
            self.bytes.drain(..self.bytes.len() - left);
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/mesh_tests.rs"]
mod tests;
