//! The importer's side: asks an exporter for its memory, and gives it back.

use super::wire::{self, LONGEST_NAME, NAME, Process, RELEASED, Reply, Request};
use super::{IpcBuffer, TICK};
use crate::runtime::{Access, BufferInternals, DeviceInternals, ErrorInternals, OpSite};
use crate::{socket, wire::no_descriptor};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut, Error, Result, memory::PeerView,
};
use rustix::net::RecvFlags;
use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

/// Memory of another process of this host, as a buffer of this device: from [`import`](super::ClusterDevice::import).
///
/// Operations take it like every buffer. It can be written if the exporter has called
/// [`export_mut`](super::ClusterBuffer::export_mut); else a write is [`Error::Borrowed`].
///
/// The exporter's memory stays until this is dropped. The exporter is told when the last operations on it have
/// completed: by [`release`](Self::release) immediately, after a drop at the end of the device's scope at the latest.
pub struct Imported<T: DeviceCopy> {
    pub(super) buffer: DeviceBuffer<T>,
    pub(super) exclusive: bool,
}

impl<T: DeviceCopy> Imported<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Whether it can be written.
    pub fn is_exclusive(&self) -> bool {
        self.exclusive
    }

    /// Names this memory on another device's thread: copies and kernels there may read it.
    pub fn peer(&self) -> PeerView<'_, T> {
        self.buffer.peer()
    }

    /// Waits for the last operations on the memory, unmaps it, and tells the exporter, which may then use it again.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::DeviceLost`], the driver's: then the exporter is told when the operations have
    /// completed.
    #[track_caller]
    pub fn release(self, dev: &Device) -> Result<()> {
        let _here = OpSite::here("release");
        dev.op("release")?.reads(&self.view())?;
        self.buffer.block().wait_host("release", Access::Write, dev.deadline())
    }
}

impl<T: DeviceCopy> AsView for Imported<T> {
    type Elem = T;
    fn view(&self) -> DeviceView<'_, T> {
        self.buffer.view()
    }
}

impl<T: DeviceCopy> AsViewMut for Imported<T> {
    fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        self.buffer.view_mut()
    }
}

debug_as!(Imported<T> [T: DeviceCopy], |self| "Imported {:?}", self.buffer);

/// The connection to the exporter. Its drop says that the memory is unmapped here.
pub(super) struct Lease(UnixStream);

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = socket::send(&self.0, &[RELEASED], None);
    }
}

/// The exporter has ended, or its process number is another's by now.
fn lost(ipc: &IpcBuffer, why: &str) -> Error {
    Error::HostLost { host: ipc.process.pid as usize, op: "import", why: format!("the exporter {why}") }
}

/// Asks the exporter for its memory. `stop` fails when the gang has failed.
#[track_caller]
pub(super) fn ask(ipc: &IpcBuffer, limit: Duration, stop: &dyn Fn() -> Result<()>) -> Result<(Lease, Reply, OwnedFd)> {
    let begun = Instant::now();
    let named = ipc.socket.starts_with(NAME) && ipc.socket.len() <= LONGEST_NAME;
    let named = named && !ipc.socket.contains('\0');
    invalid_if!(!named, "import", "this is not what `export` has made: no exporter has such a socket");
    let missing = || vec![ipc.process.pid as usize];
    let late = || Error::HostTimeout { op: "import".into(), waited: limit, missing: missing() };
    let wait = || if begun.elapsed() > limit { Err(late()) } else { stop() };
    loop {
        wait()?;
        match socket::connect(&ipc.socket) {
            Ok(socket) => match ask_once(ipc, socket, &wait)? {
                Some((lease, reply, Some(memory))) => return Ok((lease, reply, memory)),
                Some((_, reply, None)) => return Err(Error::invalid("import", reply.refused().unwrap_or("no memory"))),
                // The server has ended meanwhile, which the next attempt will see; or strangers have crowded it.
                None => {}
            },
            // Many others are at the door.
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => {}
            Err(why) if no_descriptor(&why) => return Err(no_room(&why)),
            Err(_) if !ipc.process.is_alive() => return Err(lost(ipc, "has ended")),
            Err(why) if why.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(Error::invalid("import", "the exporter has dropped its exported buffers"));
            }
            Err(why) => return Err(cluster_error!("import", "no connection: {why}")),
        }
        std::thread::sleep(TICK);
    }
}

/// This process has no file descriptor for the import.
fn no_room(why: &io::Error) -> Error {
    cluster_error!("import", "this process has no free file descriptor: {why}")
}

type Answer = (Lease, Reply, Option<OwnedFd>);

#[track_caller]
fn ask_once(ipc: &IpcBuffer, socket: UnixStream, wait: &dyn Fn() -> Result<()>) -> Result<Option<Answer>> {
    let who = |why| cluster_error!("import", "who is the exporter? {why}");
    let (pid, user) = socket::peer(&socket).map_err(who)?;
    let same_user = wire::may_have(user, socket::own_user());
    invalid_if!(!same_user, "import", "the exporter is a process of user {user}");
    if Process::of(pid).map_err(|why| no_room(&why))? != Some(ipc.process) {
        return Err(lost(ipc, &format!("has ended, and process {pid} has its socket's name")));
    }
    // From here on a grant may come at any time.
    let lease = Lease(socket);
    if socket::send(&lease.0, bytemuck::bytes_of(&Request::new(ipc.id, ipc.key)), None).is_err() {
        return Ok(None);
    }
    while !socket::poll(&[lease.0.as_fd()], Some(TICK))[0] {
        wait()?;
    }
    let mut frame = [0; size_of::<Reply>()];
    let (got, mut memory) = match socket::receive(&lease.0, &mut frame, RecvFlags::DONTWAIT) {
        Ok((0, _)) => return Ok(None),
        Err(why) if why.kind() == io::ErrorKind::Other => {
            return Err(cluster_error!("import", "{why}; this export has ended, so export once more"));
        }
        Err(_) => return Ok(None),
        Ok(received) => received,
    };
    let reply: Reply = bytemuck::pod_read_unaligned(&frame);
    let readable = got == frame.len() && reply.is_valid();
    fail_if!(!readable, cluster_error!("import", "the exporter is of another version of this crate"));
    match (reply.refused(), memory.pop(), memory.is_empty()) {
        (Some(_), None, _) => Ok(Some((lease, reply, None))),
        (None, Some(memory), true) => Ok(Some((lease, reply, Some(memory)))),
        _ => Err(cluster_error!("import", "the exporter's answer has no memory, or too much")),
    }
}
