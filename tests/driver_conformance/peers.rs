//! Peer rights: directed, explicit, and never replaced by a silent detour.

use crate::rig::*;
use gpu_pool::extend::driver::{DriverRef, DriverResult, FaultKind};

fn push(owner: &DriverRef, mine: &Mem, other: &DriverRef, theirs: &Mem) -> DriverResult {
    let s = stream(owner);
    // SAFETY: live memory of the two devices, waited for at once.
    let pushed = unsafe { owner.copy_peer(theirs.raw, &**other, mine.raw, &**owner, mine.bytes, s.raw) };
    s.wait();
    pushed
}

pub fn rights_are_directed(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    let (xa, xb) = (mem(a, 1024), mem(b, 1024));
    write(&xa, &[0; 1024]);
    write(&xb, &[0; 1024]);
    assert_eq!(push(a, &xa, b, &xb).unwrap_err().kind, FaultKind::PeerDenied);
    a.enable_peer(&**b).unwrap();
    push(a, &xa, b, &xb).unwrap();
    assert_eq!(push(b, &xb, a, &xa).unwrap_err().kind, FaultKind::PeerDenied);
    a.disable_peer(&**b).unwrap();
}

/// Memory that came after the right counts, too; so does the right's end (cuda-python#2807: rights stuck to handles).
pub fn rights_are_idempotent_and_revocable(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    a.disable_peer(&**b).unwrap();
    a.enable_peer(&**b).unwrap();
    a.enable_peer(&**b).unwrap();
    let (xa, xb) = (mem(a, 1024), mem(b, 1024));
    write(&xa, &pattern(1024, 8));
    push(a, &xa, b, &xb).unwrap();
    assert_eq!(read(&xb), pattern(1024, 8));
    a.disable_peer(&**b).unwrap();
    a.disable_peer(&**b).unwrap();
    assert_eq!(push(a, &xa, b, &xb).unwrap_err().kind, FaultKind::PeerDenied);
}

pub fn a_kernel_writes_a_peers_memory(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    a.enable_peer(&**b).unwrap();
    let (s, x, by) = (stream(a), mem(b, 4096), adder(a));
    write(&x, &[0; 4096]);
    by.add(&s, x.raw, 1024, 17);
    s.wait();
    assert_eq!(read_words(&x), [17; 1024]);
    a.disable_peer(&**b).unwrap();
}

/// A copy belongs to a device that owns one of its sides.
pub fn a_wrong_owner_is_refused(rig: &Rig) {
    let [a, b, c, ..] = &rig.devices[..] else { return eprintln!("skipped: needs 3 CUDA devices") };
    let (xa, xb, s) = (mem(a, 64), mem(b, 64), stream(c));
    write(&xb, &[0; 64]);
    // SAFETY: live memory; nothing is submitted.
    let refused = unsafe { c.copy_peer(xa.raw, &**a, xb.raw, &**b, 64, s.raw) }.unwrap_err();
    assert_eq!(refused.kind, FaultKind::InvalidArgument, "{refused}");
}
