//! Virtual memory: windows, and what is mapped into them.

use crate::rig::*;
use gpu_pool::extend::driver::{Address, DriverRef, DriverResult, FaultKind};

/// A window, with all that is mapped in it.
pub struct Window {
    of: DriverRef,
    pub raw: Address,
    bytes: u64,
    pub mapped: Vec<(Address, usize)>,
}

impl Window {
    /// One of so many units of the granularity; `None` and a note where there are none.
    pub fn new(of: &DriverRef, units: usize) -> Option<(Window, usize)> {
        let Some(unit) = of.vm_granularity() else {
            eprintln!("skipped: the device has no virtual memory");
            return None;
        };
        let bytes = (units * unit) as u64;
        let raw = of.vm_reserve(bytes).unwrap();
        assert_eq!(raw % (2 << 20), 0);
        Some((Window { of: of.clone(), raw, bytes, mapped: Vec::new() }, unit))
    }

    pub fn try_map(&mut self, offset: usize, bytes: usize) -> DriverResult<Address> {
        let at = self.raw + offset as u64;
        // SAFETY: the cases wait for all that uses a place before something else comes there.
        unsafe { self.of.vm_map(at, bytes)? };
        self.mapped.push((at, bytes));
        Ok(at)
    }

    #[track_caller]
    pub fn map(&mut self, offset: usize, bytes: usize) -> Address {
        self.try_map(offset, bytes).unwrap()
    }

    #[track_caller]
    pub fn unmap(&mut self, at: Address) {
        let index = self.mapped.iter().position(|(own, _)| *own == at).unwrap();
        let (at, bytes) = self.mapped.swap_remove(index);
        // SAFETY: as above.
        unsafe { self.of.vm_unmap(at, bytes) }.unwrap();
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        for (at, bytes) in self.mapped.drain(..) {
            // SAFETY: as above; mapped once.
            let gone = unsafe { self.of.vm_unmap(at, bytes) };
            if !std::thread::panicking() {
                gone.unwrap();
            }
        }
        // SAFETY: nothing is mapped in it any more.
        let gone = unsafe { self.of.vm_release(self.raw, self.bytes) };
        if !std::thread::panicking() {
            gone.unwrap();
        }
    }
}

#[track_caller]
pub fn put(of: &DriverRef, at: Address, bytes: &[u8]) {
    let (s, mut from) = (stream(of), pinned(of, bytes.len()));
    from.all().copy_from_slice(bytes);
    // SAFETY: live memory, waited for at once.
    unsafe { of.copy_to_device(at, from.raw, bytes.len(), s.raw) }.unwrap();
    s.wait();
}

#[track_caller]
pub fn get(of: &DriverRef, at: Address, bytes: usize) -> Vec<u8> {
    let (s, mut to) = (stream(of), pinned(of, bytes));
    // SAFETY: as above.
    unsafe { of.copy_to_host(to.raw, at, bytes, s.raw) }.unwrap();
    s.wait();
    to.all().to_vec()
}

pub fn mappings_come_and_go(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 64) else { return };
    let (before, _) = device.memory_info().unwrap();
    for round in 0..3 {
        let (a, b) = (window.map(0, 8 * unit), window.map(32 * unit, 32 * unit));
        let (during, _) = device.memory_info().unwrap();
        assert!(rig.cuda || before - during == 40 * unit as u64, "{before} -> {during}");
        put(device, a + 7, &pattern(5000, round));
        put(device, b + 32 * unit as u64 - 5000, &pattern(5000, !round));
        assert_eq!(get(device, a + 7, 5000), pattern(5000, round));
        window.unmap(a);
        assert_eq!(get(device, b + 32 * unit as u64 - 5000, 5000), pattern(5000, !round));
        window.unmap(b);
        assert!(rig.cuda || device.memory_info().unwrap().0 == before);
    }
}

pub fn data_survives_a_neighbours_end(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 3) else { return };
    let all: Vec<_> = (0..3).map(|i| window.map(i * unit, unit)).collect();
    let data = pattern(unit, 3);
    put(device, all[0], &data);
    put(device, all[2], &data);
    window.unmap(all[1]);
    assert!(get(device, all[0], unit) == data && get(device, all[2], unit) == data);
    window.map(unit, unit);
    assert!(get(device, all[0], unit) == data && get(device, all[2], unit) == data);
}

/// A block of the pool may lie in several mappings; no call may care.
pub fn operands_span_mappings(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 4) else { return };
    let at = window.map(0, unit);
    window.map(unit, 2 * unit);
    window.map(3 * unit, unit);
    let (s, by, n) = (stream(device), adder(device), unit);
    let start = at + unit as u64 / 2;
    let words = 3 * n / 4;
    // SAFETY: all of it is mapped; ordered by the stream, waited for below.
    unsafe {
        device.fill_u32(start, 5, words, s.raw).unwrap();
        by.add(&s, start, words, 2);
        // The last quarter of a unit, and what lies after the kernel's words.
        device.fill_u8(start + 3 * n as u64, 9, n / 2, s.raw).unwrap();
        device.copy_within(at, start + 3 * n as u64 - 8, 16, s.raw).unwrap();
    }
    s.wait();
    let seen = get(device, start, 3 * n);
    assert!(seen.chunks_exact(4).all(|word| word == 7u32.to_ne_bytes()));
    assert_eq!(get(device, at, 16), [7, 0, 0, 0, 7, 0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9]);
}

pub fn mapping_runs_out_of_memory(rig: &Rig) {
    let device = rig.one();
    let Some(unit) = device.vm_granularity() else { return };
    let piece = (device.info().total_memory as usize / 8).next_multiple_of(unit);
    let Some((mut window, _)) = Window::new(device, 10 * piece / unit) else { return };
    let mut count = 0;
    let full = loop {
        match window.try_map(count * piece, piece) {
            Ok(_) => count += 1,
            Err(full) => break full,
        }
    };
    assert!(count <= 8);
    assert_eq!((full.kind, full.code), (FaultKind::OutOfMemory, 2), "{full}");
    // The failed one has left nothing behind: what is free is free for all.
    let last = window.mapped.last().unwrap().0;
    window.unmap(last);
    let x = mem(device, piece / 2);
    drop(x);
    let again = window.map((last - window.raw) as usize, piece);
    put(device, again, &[1; 100]);
    assert_eq!(get(device, again, 100), [1; 100]);
}

/// Mapped memory is reached by whoever may reach the device's memory, whichever came first (xla#40852,
/// llama.cpp#24491), and copies that say all went well have written (CUDA.jl#3112, NVIDIA's bug 6098762).
pub fn peers_reach_what_is_mapped_before_and_after(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    let Some((mut window, unit)) = Window::new(b, 4) else { return };
    let early = window.map(0, unit);
    put(b, early, &[0; 4096]);
    let (s, own, by) = (stream(a), mem(a, 4096), adder(a));
    // SAFETY: live memory, waited for at once, in all of these.
    let push = |to: Address| unsafe { a.copy_peer(to, &**b, own.raw, &**a, 4096, s.raw) };
    // SAFETY: as above.
    let pull = |from: Address| unsafe { a.copy_peer(own.raw, &**a, from, &**b, 4096, s.raw) };
    write(&own, &[0; 4096]);
    assert_eq!(push(early).unwrap_err().kind, FaultKind::PeerDenied);
    a.enable_peer(&**b).unwrap();
    let late = window.map(unit, unit);
    for (round, at) in [early, late, early + unit as u64 - 2048].into_iter().enumerate() {
        let data = pattern(4096, 40 + round as u8);
        write(&own, &data);
        put(b, at, &[0xEE; 4096]);
        push(at).unwrap();
        s.wait();
        assert_eq!(get(b, at, 4096), data, "to the mapping, {round}");
        write(&own, &[0xEE; 4096]);
        pull(at).unwrap();
        s.wait();
        assert_eq!(read(&own), data, "from the mapping, {round}");
        put(b, at, &[0; 4096]);
        by.add(&s, at, 1024, 3);
        s.wait();
        assert!(get(b, at, 4096).chunks_exact(4).all(|word| word == 3u32.to_ne_bytes()), "by a kernel, {round}");
    }
    a.disable_peer(&**b).unwrap();
    assert_eq!(push(late).unwrap_err().kind, FaultKind::PeerDenied);
    a.enable_peer(&**b).unwrap();
    write(&own, &[77; 4096]);
    push(early).unwrap();
    push(late).unwrap();
    s.wait();
    assert_eq!((get(b, early, 4096), get(b, late, 4096)), (vec![77; 4096], vec![77; 4096]));
    a.disable_peer(&**b).unwrap();
}

/// Both sides mapped, on both devices.
pub fn mappings_copy_to_mappings(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    let (Some((mut from, unit)), Some((mut to, _))) = (Window::new(a, 1), Window::new(b, 1)) else { return };
    a.enable_peer(&**b).unwrap();
    let (x, y, s) = (from.map(0, unit), to.map(0, unit), stream(a));
    let data = pattern(unit, 90);
    put(a, x, &data);
    put(b, y, &vec![0; unit]);
    // SAFETY: live memory, waited for at once.
    unsafe { a.copy_peer(y, &**b, x, &**a, unit, s.raw) }.unwrap();
    s.wait();
    assert!(get(b, y, unit) == data);
    a.disable_peer(&**b).unwrap();
}

pub fn a_mapping_moves(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 8) else { return };
    let (kept, x) = (window.map(0, unit), window.map(unit, 2 * unit));
    put(device, kept, &pattern(100, 1));
    let (before, _) = device.memory_info().unwrap();
    let to = window.raw + 5 * unit as u64;
    // SAFETY: nothing uses it, nothing is there.
    unsafe { device.vm_move(x, to, 2 * unit) }.unwrap();
    window.mapped.retain(|(at, _)| *at != x);
    window.mapped.push((to, 2 * unit));
    assert!(rig.cuda || device.memory_info().unwrap().0 == before);
    put(device, to + unit as u64, &pattern(unit, 2));
    assert!(get(device, to + unit as u64, unit) == pattern(unit, 2) && get(device, kept, 100) == pattern(100, 1));
    // The old place is free, and the new one is taken.
    let again = window.map(unit, unit);
    put(device, again, &[4; 64]);
    assert_eq!(window.try_map(5 * unit, unit).unwrap_err().kind, FaultKind::InvalidArgument);
    // Onto something, out of the window, and a part of it: refused, without effect.
    for (from, to, n) in [(to, kept, 2), (to, window.raw + 7 * unit as u64, 2), (to, window.raw + 3 * unit as u64, 1)] {
        // SAFETY: as above.
        let refused = unsafe { device.vm_move(from, to, n * unit) }.unwrap_err();
        assert_eq!(refused.kind, FaultKind::InvalidArgument, "{refused}");
    }
    assert!(get(device, kept, 100) == pattern(100, 1) && get(device, again, 64) == [4; 64]);
}

/// Peers reach a mapping where it has gone to.
pub fn a_mapping_that_moves_keeps_its_peers(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    let Some((mut window, unit)) = Window::new(b, 4) else { return };
    a.enable_peer(&**b).unwrap();
    let (x, s, own) = (window.map(0, unit), stream(a), mem(a, 4096));
    let to = x + 2 * unit as u64;
    // SAFETY: nothing uses it, nothing is there.
    unsafe { b.vm_move(x, to, unit) }.unwrap();
    window.mapped = vec![(to, unit)];
    write(&own, &pattern(4096, 6));
    put(b, to, &[0; 4096]);
    // SAFETY: live memory, waited for at once.
    unsafe { a.copy_peer(to, &**b, own.raw, &**a, 4096, s.raw) }.unwrap();
    s.wait();
    assert_eq!(get(b, to, 4096), pattern(4096, 6));
    a.disable_peer(&**b).unwrap();
}

pub fn wrong_places_are_refused(rig: &Rig) {
    let device = rig.one();
    let Some((mut window, unit)) = Window::new(device, 4) else { return };
    let x = window.map(unit, 2 * unit);
    put(device, x, &[3; 64]);
    let whole = (window.raw, window.bytes);
    // SAFETY: none of these does anything.
    let faults = unsafe {
        [
            device.vm_reserve(0).map(drop),
            device.vm_reserve(unit as u64 + 1).map(drop),
            device.vm_map(window.raw, 0),
            device.vm_map(window.raw, unit / 2),
            device.vm_map(window.raw + 4096, unit),
            device.vm_map(window.raw, 2 * unit),
            device.vm_map(x, unit),
            device.vm_map(x + unit as u64, unit),
            device.vm_map(window.raw + 3 * unit as u64, 2 * unit),
            device.vm_map(1 << 20, unit),
            device.vm_unmap(x, unit),
            device.vm_unmap(x + unit as u64, unit),
            device.vm_unmap(window.raw, unit),
            device.vm_release(whole.0, whole.1),
            device.vm_release(whole.0, whole.1 / 2),
        ]
    };
    for (i, fault) in faults.into_iter().enumerate() {
        assert_eq!(fault.unwrap_err().kind, FaultKind::InvalidArgument, "number {i}");
    }
    assert_eq!(get(device, x, 64), [3; 64]);
}

/// Windows of several devices, and from several threads at once.
pub fn devices_map_at_once(rig: &Rig) {
    std::thread::scope(|scope| {
        for device in &rig.devices {
            scope.spawn(move || {
                let Some((mut window, unit)) = Window::new(device, 16) else { return };
                for round in 0..4u8 {
                    let all: Vec<_> = (0..16).map(|i| window.map(i * unit, unit)).collect();
                    put(device, all[round as usize], &[round; 100]);
                    assert_eq!(get(device, all[round as usize], 100), [round; 100]);
                    all.into_iter().for_each(|at| window.unmap(at));
                }
            });
        }
    });
}
