//! Copies and fills.

use crate::rig::*;
use gpu_pool::extend::driver::FaultKind;

const SIZES: [usize; 8] = [1, 3, 7, 64, 255, 4097, 65_536, (1 << 20) + 13];

pub fn odd_sizes_and_offsets(rig: &Rig) {
    let device = rig.one();
    let s = stream(device);
    for bytes in SIZES {
        for (host, at) in [(0, 0), (1, 0), (0, 1), (3, 5)] {
            let (mut from, mut to) = (pinned(device, bytes + 8), pinned(device, bytes + 8));
            let x = mem(device, bytes + 8);
            let data = pattern(bytes + 8, bytes as u8);
            from.all().copy_from_slice(&data);
            // SAFETY: in range, ordered by the stream, waited for below.
            unsafe {
                device.fill_u8(x.raw, 0xEE, bytes + 8, s.raw).unwrap();
                device.copy_to_device(x.raw + at as u64, from.raw.add(host), bytes, s.raw).unwrap();
                device.copy_to_host(to.raw.add(host), x.raw + at as u64, bytes, s.raw).unwrap();
            }
            s.wait();
            let to = to.all();
            assert_eq!(to[host..host + bytes], data[host..host + bytes], "{bytes} bytes, {host}, {at}");
            assert!(to[..host].iter().chain(&to[host + bytes..]).all(|&b| b == 0), "wrote beside the range");
            let all = read(&x);
            assert!(all[..at].iter().chain(&all[at + bytes..]).all(|&b| b == 0xEE), "wrote beside the range");
        }
    }
}

/// Nothing is touched, so nothing need be there.
pub fn empty_copies_do_nothing(rig: &Rig) {
    let device = rig.one();
    let s = stream(device);
    // SAFETY: empty ranges.
    unsafe {
        device.copy_to_device(0, std::ptr::null(), 0, s.raw).unwrap();
        device.copy_to_host(std::ptr::null_mut(), 0, 0, s.raw).unwrap();
        device.copy_within(0, 0, 0, s.raw).unwrap();
        device.fill_u8(0, 1, 0, s.raw).unwrap();
        device.fill_u32(0, 1, 0, s.raw).unwrap();
    }
    s.wait();
}

pub fn copies_within(rig: &Rig) {
    let device = rig.one();
    let s = stream(device);
    for bytes in SIZES {
        let (x, y) = (mem(device, bytes), mem(device, bytes + 5));
        write(&x, &pattern(bytes, 1));
        // SAFETY: in range, ordered by the stream, waited for below.
        unsafe {
            device.fill_u8(y.raw, 0xEE, bytes + 5, s.raw).unwrap();
            device.copy_within(y.raw + 3, x.raw, bytes, s.raw).unwrap();
        }
        s.wait();
        let y = read(&y);
        assert_eq!(y[3..3 + bytes], pattern(bytes, 1));
        assert!(y[..3].iter().chain(&y[3 + bytes..]).all(|&b| b == 0xEE));
    }
    // Also between managed memory and the device.
    let (mut shared, x) = (managed(device, 1000), mem(device, 1000));
    shared.all().copy_from_slice(&pattern(1000, 2));
    // SAFETY: as above.
    unsafe { device.copy_within(x.raw, shared.raw as u64, 1000, s.raw) }.unwrap();
    s.wait();
    assert_eq!(read(&x), pattern(1000, 2));
}

pub fn fills(rig: &Rig) {
    let device = rig.one();
    let (s, x) = (stream(device), mem(device, 4100));
    // SAFETY: in range, ordered by the stream, waited for below.
    unsafe {
        device.fill_u8(x.raw, 0x11, 4100, s.raw).unwrap();
        device.fill_u8(x.raw + 1, 0x22, 9, s.raw).unwrap();
        device.fill_u32(x.raw + 16, 0xDEAD_BEEF, 1000, s.raw).unwrap();
        let odd = device.fill_u32(x.raw + 2, 0, 4, s.raw).unwrap_err();
        assert_eq!(odd.kind, FaultKind::InvalidArgument, "a misaligned fill of words: {odd}");
    }
    s.wait();
    let x = read(&x);
    assert_eq!(x[..16], [[0x11; 1].as_slice(), &[0x22; 9], &[0x11; 6]].concat());
    assert!(x[16..4016].chunks(4).all(|word| word == 0xDEAD_BEEF_u32.to_ne_bytes()));
    assert_eq!(x[4016..], [0x11; 84]);
}

/// Both devices may drive the copy, with the one right that it takes; the data is compared, since peer copies have been
/// seen to report success and write nothing (open-gpu-kernel-modules#1257, CUDA.jl#3112) or to fail across contexts
/// (candle#3524, cudarc#559).
pub fn peer_copies(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    for (owner, other) in [(a, b), (b, a)] {
        owner.enable_peer(&**other).unwrap();
        let s = stream(owner);
        for bytes in SIZES {
            let (mine, theirs) = (mem(owner, bytes + 4), mem(other, bytes + 4));
            write(&mine, &pattern(bytes + 4, 3));
            write(&theirs, &pattern(bytes + 4, 99));
            // SAFETY: in range, ordered by the stream, waited for below.
            unsafe { owner.copy_peer(theirs.raw + 1, &**other, mine.raw + 2, &**owner, bytes, s.raw) }.unwrap();
            s.wait();
            assert_eq!(read(&theirs)[1..1 + bytes], pattern(bytes + 4, 3)[2..2 + bytes], "push of {bytes}");
            write(&theirs, &pattern(bytes + 4, 50));
            // SAFETY: as above.
            unsafe { owner.copy_peer(mine.raw + 3, &**owner, theirs.raw, &**other, bytes, s.raw) }.unwrap();
            s.wait();
            assert_eq!(read(&mine)[3..3 + bytes], pattern(bytes + 4, 50)[..bytes], "pull of {bytes}");
            assert_eq!(read(&mine)[..3], pattern(bytes + 4, 3)[..3]);
        }
        owner.disable_peer(&**other).unwrap();
    }
}

pub fn host_memory_is_portable(rig: &Rig) {
    let Some((a, b)) = rig.two() else { return };
    let mut from = pinned(a, 5000);
    from.all().copy_from_slice(&pattern(5000, 4));
    let (s, x, mut to) = (stream(b), mem(b, 5000), pinned(a, 5000));
    s.up(&x, &from);
    s.down(&to, &x);
    s.wait();
    assert_eq!(to.all(), pattern(5000, 4));
}
