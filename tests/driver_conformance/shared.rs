//! Mappings with a descriptor, which other processes map. Here one process does both; `tests/cluster/ipc.rs` has two.

use crate::{
    mapped::{Window, get, put},
    rig::*,
};
use gpu_pool::extend::driver::{Address, DriverRef, DriverResult, FaultKind};
use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// Maps a unit and makes its descriptor; `None` and a note where that is not possible.
fn shared(device: &DriverRef, window: &mut Window, offset: usize, unit: usize) -> Option<(Address, OwnedFd)> {
    let at = window.map(offset, unit);
    // SAFETY: mapped just now.
    match unsafe { device.vm_export(at, unit) } {
        Ok(memory) => Some((at, memory)),
        Err(fault) if fault.kind == FaultKind::Unsupported => {
            eprintln!("skipped: {fault}");
            None
        }
        Err(fault) => panic!("{fault}"),
    }
}

fn import(
    device: &DriverRef,
    window: &mut Window,
    offset: usize,
    unit: usize,
    memory: BorrowedFd<'_>,
) -> DriverResult<Address> {
    let at = window.raw + offset as u64;
    // SAFETY: the cases wait for all that uses the memory.
    unsafe { device.vm_import(at, unit, memory)? };
    window.mapped.push((at, unit));
    Ok(at)
}

pub fn a_mapping_is_shared_by_its_descriptor(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 4) else { return };
    let Some((a, memory)) = shared(device, &mut window, 0, 2 * unit) else { return };
    let (before, _) = device.memory_info().unwrap();
    put(device, a, &vec![0; 2 * unit]);
    put(device, a + unit as u64, &pattern(5000, 1));
    let b = import(device, &mut window, 2 * unit, 2 * unit, memory.as_fd()).unwrap();
    drop(memory);
    assert!(rig.cuda || device.memory_info().unwrap().0 == before, "the memory is there once");
    assert_eq!(get(device, b + unit as u64, 5000), pattern(5000, 1));
    put(device, b, &pattern(5000, 2));
    assert_eq!(get(device, a, 5000), pattern(5000, 2));
    // A kernel, and copies within, on the other's memory.
    let (s, by) = (stream(device), adder(device));
    put(device, a, &[0; 4096]);
    by.add(&s, b, 1024, 7);
    s.wait();
    assert!(get(device, a, 4096).chunks_exact(4).all(|word| word == 7u32.to_ne_bytes()));
    // The exporter's end is not the memory's.
    window.unmap(a);
    assert!(get(device, b, 4096).chunks_exact(4).all(|word| word == 7u32.to_ne_bytes()));
    // What comes to its place is fresh memory.
    let c = window.map(0, 2 * unit);
    put(device, c, &[1; 4096]);
    assert!(get(device, b, 4096).chunks_exact(4).all(|word| word == 7u32.to_ne_bytes()));
    window.unmap(b);
    window.unmap(c);
    assert!(rig.cuda || device.memory_info().unwrap().0 == before + 2 * unit as u64);
}

/// A panic names the line of the call.
#[track_caller]
fn invalid<T: std::fmt::Debug>(refused: DriverResult<T>) {
    let fault = refused.unwrap_err();
    assert!(fault.kind == FaultKind::InvalidArgument, "{:?}: {fault}", fault.kind);
}

pub fn what_is_no_such_memory_is_refused(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 8) else { return };
    let Some((a, memory)) = shared(device, &mut window, 0, unit) else { return };
    put(device, a, &[3; 100]);
    invalid(import(device, &mut window, 2 * unit, 2 * unit, memory.as_fd()));
    invalid(import(device, &mut window, 0, unit, memory.as_fd()));
    invalid(import(device, &mut window, 8 * unit, unit, memory.as_fd()));
    invalid(import(device, &mut window, 2 * unit + 4096, unit, memory.as_fd()));
    for path in ["/dev/null", "/proc/self/exe"] {
        let file = File::open(path).unwrap();
        assert!(import(device, &mut window, 2 * unit, unit, file.as_fd()).is_err(), "{path}");
    }
    // SAFETY: nothing uses these addresses.
    let [behind, longer] = unsafe { [device.vm_export(a + unit as u64, unit), device.vm_export(a, 2 * unit)] };
    invalid(behind);
    invalid(longer);
    assert_eq!(get(device, a, 100), [3; 100]);
    // Nothing was left behind.
    let b = import(device, &mut window, 2 * unit, unit, memory.as_fd()).unwrap();
    assert_eq!(get(device, b, 100), [3; 100]);
}

pub fn what_is_shared_does_not_move(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 4) else { return };
    let Some((a, memory)) = shared(device, &mut window, 0, unit) else { return };
    put(device, a, &[5; 100]);
    let b = import(device, &mut window, unit, unit, memory.as_fd()).unwrap();
    for from in [a, b] {
        // SAFETY: nothing uses it, nothing is there.
        let refused = unsafe { device.vm_move(from, window.raw + 3 * unit as u64, unit) }.unwrap_err();
        assert_eq!(refused.kind, FaultKind::InvalidArgument, "{refused}");
    }
    assert_eq!((get(device, a, 100), get(device, b, 100)), (vec![5; 100], vec![5; 100]));
}
