//! Importers before exporters that lie, are silent, or are of another version. `tests/cluster/ipc.rs` has honest ones.

use super::{
    wire::{NAME, Reply, element, random},
    *,
};
use crate::socket::{listen, receive, send};
use gpu_pool::GpuPool;
use gpu_pool_lab::{Check, prelude::*};
use rustix::net::RecvFlags;
use std::{
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    thread,
};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(120);

fn pool(limit: Duration) -> GpuPool {
    GpuPool::builder().host(1).timeout(limit).check(Check::Races).build().unwrap()
}

/// Exports a buffer with these contents, and has an exporter of this process's name answer for it with `lie`, which
/// gets the honest answer and memory. Returns what an import gives.
fn against(lie: impl Fn(&UnixStream, Reply, BorrowedFd<'_>) + Sync) -> Result<Vec<f32>> {
    within(LONG, lie)
}

/// [`against`] with this deadline.
fn within(limit: Duration, lie: impl Fn(&UnixStream, Reply, BorrowedFd<'_>) + Sync) -> Result<Vec<f32>> {
    let (pool, number) = (pool(limit), random("test")?);
    let x = pool.run(|dev, _| {
        let mut x = dev.exportable::<f32>(4)?;
        dev.upload_into(&[1.0, 2.0, 3.0, 4.0], &mut x)?;
        Ok(x)
    })?;
    let x = &x[0];
    let mut ipc = x.export()?;
    ipc.socket = format!("{NAME}{:016x}", u64::from_le_bytes(*number.first_chunk().unwrap()));
    let liar = listen(&ipc.socket).unwrap();
    liar.set_nonblocking(false).unwrap();
    let found = thread::scope(|scope| {
        scope.spawn(|| {
            let (guest, _) = liar.accept().unwrap();
            hear(&guest);
            let chunk = chunk_of("test", x).unwrap();
            lie(&guest, chunk.reply(true), chunk.memory.as_fd());
        });
        pool.run(|dev, _| dev.download(&dev.import::<f32>(&ipc)?))
    });
    x.withdraw()?;
    found.map(|mut found| found.remove(0))
}

/// Waits until something comes, or the end.
fn hear(socket: &UnixStream) {
    while receive(socket, &mut [0; 100], RecvFlags::DONTWAIT).is_err() {
        thread::sleep(Duration::from_millis(1));
    }
}

fn tell(socket: &UnixStream, reply: &Reply, memory: Option<BorrowedFd<'_>>) {
    send(socket, bytemuck::bytes_of(reply), memory).unwrap();
}

#[track_caller]
fn refused(found: Result<Vec<f32>>, why: &str) {
    match found {
        Err(Error::Cluster { op: "import", why: said } | Error::InvalidArgument { why: said, .. })
            if said.contains(why) => {}
        other => panic!("not refused with `{why}`: {other:?}"),
    }
}

#[test]
fn an_honest_one() {
    assert_eq!(against(|to, reply, memory| tell(to, &reply, Some(memory))).unwrap(), [1.0, 2.0, 3.0, 4.0]);
}

/// The bytes at its end tell it from other memory of the same size.
#[test]
fn other_memory() {
    let other = pool(LONG).run(|dev, _| dev.exportable::<f32>(4)).unwrap().remove(0);
    let other = &other;
    let found = against(|to, reply, _| tell(to, &reply, Some(chunk_of("test", other).unwrap().memory.as_fd())));
    refused(found, "is not the exporter's");
}

#[test]
fn other_sizes_and_types() {
    let with = |change: fn(&mut Reply)| {
        against(move |to, mut reply, memory| {
            change(&mut reply);
            tell(to, &reply, Some(memory));
        })
    };
    refused(with(|reply| reply.bytes = 20), "another type or length");
    refused(with(|reply| reply.element = element::<u32>()), "another type or length");
    refused(with(|reply| reply.chunk = 40), "contradicts itself");
    refused(with(|reply| reply.bytes = u64::MAX), "contradicts itself");
    for chunk in [4 << 20, (2 << 20) + 1, u64::MAX] {
        let found = against(move |to, mut reply, memory| {
            reply.chunk = chunk;
            tell(to, &reply, Some(memory));
        });
        assert!(matches!(found, Err(Error::Driver { .. } | Error::InvalidArgument { .. })), "{chunk}: {found:?}");
    }
}

#[test]
fn answers_that_are_none() {
    refused(against(|to, reply, _| tell(to, &reply, None)), "no memory, or too much");
    let refusal = against(|to, _, memory| tell(to, &Reply::without_memory(Reply::STALE), Some(memory)));
    refused(refusal, "no memory, or too much");
    refused(against(|to, _, _| tell(to, &Reply::without_memory(77), None)), "a reason that this version");
    refused(against(|to, _, _| send(to, b"HTTP/1.1 400", None).unwrap()), "another version");
    refused(against(|to, _, _| send(to, &[0; size_of::<Reply>()], None).unwrap()), "another version");
    let file = std::fs::File::open("/dev/null").unwrap();
    let found = against(|to, reply, _| tell(to, &reply, Some(file.as_fd())));
    assert!(matches!(found, Err(Error::Driver { op: "import", .. })), "{found:?}");
}

/// A stopped process has a socket, and does not answer.
#[test]
fn a_silent_one() {
    let found = within(Duration::from_secs(1), |to, _, _| hear(to));
    let own = std::process::id() as usize;
    assert!(matches!(found, Err(Error::HostTimeout { ref missing, .. }) if *missing == [own]), "{found:?}");
}

/// However many exports are used, or withdrawn, while memory of one lives: the server keeps the live ones, and of a few
/// others how they ended.
#[test]
fn the_server_remembers_a_bounded_number_of_exports() {
    let pool = pool(LONG);
    let x = pool.run(|dev, _| dev.exportable::<f32>(4)).unwrap().remove(0);
    for _ in 0..400 {
        let ipc = x.export().unwrap();
        drop(pool.run(|dev, _| dev.import::<f32>(&ipc)).unwrap());
        x.withdraw().unwrap();
    }
    for _ in 0..400 {
        x.export().unwrap();
        x.withdraw().unwrap();
    }
    let (live, ended) = server::remembered();
    // Other tests of this process export, too.
    assert!(live < 100 && ended <= 256, "{live} live exports, {ended} ended ones");
}
