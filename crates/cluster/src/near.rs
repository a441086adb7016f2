//! The hub of processes that share one machine: a journal in memory that all of them map.
//!
//! ```text
//!   process a: append(what it tells the hub) --+                   +--> replica of the hub --> frames for a
//!                                              v                   |
//!   rank 0's server: ticks, losses -------> [ journal: one order ]-+--> replica of the hub --> frames for b
//!                                              ^                   |
//!   process b: append ------------------------/                    ..
//! ```
//!
//! Every process carries the whole order out by a hub of its own. A hub does the same wherever it is told the same, and
//! its time is that of the ticks, so all of them decide alike: the place in the order decides between commit and
//! failure (C2), and all have commits in one order (C3). No process waits for another one's answer. Rank 0's server
//! keeps the connections. It finds losses, writes them into the journal, and then tells them by the connections: a
//! process reads the journal before it takes such a word.
//!
//! `world.rs` calls this. Threads that wait read the journal themselves; a thread of this module does when they sleep.

use super::control::Control;
use super::hub::{Hub, Limits};
use super::transport::shm::{Shared, pass_on};
use super::wire::{self, Arrive, Record, ToHost, ToHub};
use super::world::{Local, Near};
use super::{
    connect,
    launch::{self, Meeting},
    socket,
};
use crate::runtime::sync::journal::{Bell, Mapped, Reader, Writer};
use crate::runtime::variables;
use gpu_pool::{Result, event};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// The slots of a process, and the bytes of one: most frames take one or two. A process that is stopped reads nothing,
/// and rank 0's ticks should have room for longer than that is a loss: some minutes, at ten ticks a second.
const SLOTS: (usize, usize) = (4096, 256);

/// More processes of a machine use the hub of rank 0: each of them would carry out what all tell.
const MOST: usize = 64;

struct Journal {
    host: usize,
    told: Mutex<Told>,
    replica: Mutex<Replica>,
    bell: Bell<Mapped>,
    _memory: Vec<Arc<Shared>>,
}

/// What this process tells.
struct Told {
    writer: Writer<Mapped>,
    last: Option<Arrive>,
    /// What it has not read itself: it need not decode that.
    unread: VecDeque<Record>,
    bytes: Vec<u8>,
}

struct Replica {
    reader: Reader<Mapped>,
    hub: Hub,
}

pub(super) struct End(Arc<Journal>);

impl Drop for End {
    fn drop(&mut self) {
        // Here, and not on the reading thread, which may end with the process. Writers would wait for this reader.
        self.0.replica.lock().reader.leave();
        self.0.bell.close();
    }
}

/// Opens the journal, if all processes share kernel, names of sockets and user. All call it at about the same time.
pub(super) fn open(control: &Control, local: &Arc<Local>, limits: Limits) -> Result<Option<End>> {
    let (host, size) = (control.host, control.size());
    let near = launch::meeting(&variables::text)? == Meeting::Auto;
    let own = ((2..=MOST).contains(&size) && near).then(|| Shared::new(Mapped::size(size, SLOTS)));
    let own =
        own.and_then(|own| own.map_err(|why| event!(warn, "meeting_by_hub", "processes meet by rank 0: {why}")).ok());
    let net = std::fs::read_link("/proc/self/ns/net");
    let identity = format!("{net:?} {} {:02x?}", socket::own_user(), connect::machine()?);
    let able = own.is_some() && net.is_ok();
    let told = control.gather("near", if able { identity.as_bytes() } else { b"" })?;
    let Some(own) = own.filter(|_| connect::same_everywhere(&told)) else { return Ok(None) };
    let key = |host: usize| format!("journal/{host}");
    let (tell, ask) = (|own: &[u8]| control.local.set(&key(host), own), |peer| control.local.get(&key(peer)));
    let (lost, limit, all) = (|| control.lost(), limits.connect_timeout, (0..size).collect::<Vec<_>>());
    let theirs = pass_on(own.descriptor(), (host, &all), &tell, &ask, &lost, limit)?;
    let theirs = own.map_theirs(theirs)?;
    let own = Arc::new(own);
    let memory: Vec<_> = theirs.into_iter().map(|theirs| theirs.map_or_else(|| own.clone(), Arc::new)).collect();
    let regions: Vec<_> = memory.iter().map(|memory| memory.at()).collect();
    // SAFETY: mappings begin with a page, have the size, and live as long as the journal, which has all that uses them.
    // They were zeros. Each process makes one writer and one reader.
    let mapped = unsafe { Mapped::new(&regions, SLOTS) };
    let (unread, reader) = (VecDeque::new(), Reader::new(mapped.clone(), host));
    let journal = Arc::new(Journal {
        host,
        told: Mutex::new(Told { writer: Writer::new(mapped.clone(), host), last: None, unread, bytes: Vec::new() }),
        replica: Mutex::new(Replica { reader, hub: Hub::replica(limits, host) }),
        bell: Bell::new(mapped, host),
        _memory: memory,
    });
    local.meet_near(journal.clone());
    let (reading, local) = (journal.clone(), local.clone());
    super::server::spawn("journal", move || {
        while reading.bell.sleep(|| local.look(&*reading, true)) {}
        reading.replica.lock().reader.leave();
    })?;
    Ok(Some(End(journal)))
}

impl Near for Journal {
    fn append(&self, record: Record) -> Result<(), Record> {
        let (urgent, mut told) = (record.is_urgent(), self.told.lock());
        let Told { writer, last, unread, bytes } = &mut *told;
        let short = record.short(last.as_ref());
        let framed = wire::frame_in(bytes, short.as_ref().unwrap_or(&record));
        if let Err(why) = framed {
            event!(error, "frame_too_long", "a frame is too long: {why}");
            return Ok(());
        }
        // The length is the journal's.
        let done = writer.append(&bytes[4..]);
        let left = if done {
            if let Record::Frame(ToHub::Arrive(arrive)) = &record {
                *last = Some(arrive.without_note());
            }
            unread.push_back(record);
            Ok(())
        } else {
            Err(record)
        };
        drop(told);
        // A process that lags behind makes room.
        self.bell.ring(urgent || !done);
        left
    }

    fn read(&self, must: bool, take: &mut dyn FnMut(ToHost)) {
        let replica = if must { Some(self.replica.lock()) } else { self.replica.try_lock() };
        let Some(mut replica) = replica else { return };
        loop {
            let (host, record) = match replica.reader.read() {
                Ok(Some((host, _))) if host == self.host => {
                    (host, self.told.lock().unread.pop_front().ok_or("a record of another one".to_owned()))
                }
                Ok(Some((host, record))) => (host, wire::decode(record).map_err(|e| e.to_string())),
                Ok(None) => return,
                Err(_) => (0, Err("an impossible place in the journal".to_owned())),
            };
            let broken = record.is_err();
            let out = replica.hub.record(host, record);
            out.into_iter().filter(|(to, _)| *to == self.host).for_each(|(_, frame)| take(frame));
            if broken {
                return;
            }
        }
    }

    fn change(&self, looking: isize, waiting: isize) {
        self.bell.change(looking, waiting);
    }
}
