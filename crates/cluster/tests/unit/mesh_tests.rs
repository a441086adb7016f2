//! The mesh: members get arrivals, and a connection that breaks, lags or sends nonsense is not used any more.

use super::*;
use crate::world::Mesh as _;
use std::num::NonZeroU64;

/// One connection: process 0's mesh, and process 1's end.
fn pair() -> (Mesh, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let here = listener.accept().unwrap().0;
    here.set_nonblocking(true).unwrap();
    let reading = Reading { stream: here.try_clone().unwrap(), bytes: Vec::new() };
    let (writing, reading) = (Mutex::new(vec![None, Some(here)]), Mutex::new(vec![None, Some(reading)]));
    (Mesh { host: 0, writing, reading }, there)
}

fn arrive(number: u64, hosts: &[u32], note: usize) -> ToHub {
    let members = hosts.iter().map(|host| (*host, 0)).collect();
    let (arrival, scope, device, known, behind, proxied) = (number, 1, 0, NonZeroU64::new(1), None, false);
    let (call, site, note) = ("sum".into(), "".into(), vec![7; note]);
    ToHub::Arrive(Arrive { arrival, scope, members, number, device, known, behind, proxied, call, site, note })
}

/// The numbers of what comes from process 1, until there are so many or a second has passed.
fn read(mesh: &Mesh, count: usize) -> Vec<u64> {
    let (until, mut numbers) = (Instant::now() + Duration::from_secs(1), Vec::new());
    while numbers.len() < count && Instant::now() < until {
        mesh.read(&mut |host, arrive| {
            assert_eq!(host, 1);
            numbers.push(arrive.number);
        });
    }
    numbers
}

#[test]
fn members_are_told() {
    let (mesh, there) = pair();
    mesh.tell(&arrive(1, &[0, 2], 0));
    mesh.tell(&arrive(2, &[0, 1], 4096));
    let told: ToHub = wire::read(&mut &there, wire::MOST).unwrap();
    assert_eq!(told, arrive(2, &[0, 1], 4096), "the first is of others");
}

#[test]
fn frames_come_in_parts() {
    let (mesh, mut there) = pair();
    let bytes: Vec<u8> = (1..=3).flat_map(|number| wire::frame(&arrive(number, &[0, 1], 300)).unwrap()).collect();
    let mut numbers = Vec::new();
    for part in bytes.chunks(97) {
        there.write_all(part).unwrap();
        mesh.read(&mut |_, arrive| numbers.push(arrive.number));
    }
    numbers.extend(read(&mesh, 3 - numbers.len()));
    assert_eq!(numbers, [1, 2, 3]);
}

#[test]
fn a_connection_that_does_not_read_is_not_used_any_more() {
    let (mesh, there) = pair();
    let told = (0..).find(|number| {
        mesh.tell(&arrive(*number, &[0, 1], 4096));
        mesh.writing.lock()[1].is_none()
    });
    assert!(told.is_some_and(|told| told > 1));
    // Words of the other one still come.
    (&there).write_all(&wire::frame(&arrive(5, &[0, 1], 0)).unwrap()).unwrap();
    assert_eq!(read(&mesh, 1), [5]);
}

#[test]
fn nonsense_and_ends_close_it() {
    let frames = [vec![255; 8], wire::frame(&ToHub::Bye).unwrap(), vec![1, 0, 0, 0, 99], Vec::new()];
    for bytes in frames {
        let (mesh, mut there) = pair();
        there.write_all(&bytes).unwrap();
        drop(there);
        assert!(read(&mesh, 1).is_empty());
        assert!(mesh.reading.lock()[1].is_none(), "{bytes:?}");
    }
}
