use super::*;

fn gpu(place: usize, name: &[u8; 16]) -> Arc<GpuOrder> {
    GpuOrder::of(*name, place)
}

#[test]
fn entries_of_one_pool_hold_a_gpu_together_and_pools_take_turns() {
    let [a, b, c] = [0, 1, 2].map(|place| gpu(place, b"held together..."));
    let (first, second) = (7, 8);
    let gang = [a.issue(first), b.issue(first), c.issue(first)];
    let other = a.issue(second);
    let later = [b.issue(first), c.issue(first)];
    assert_eq!((gang, other, later), ([0; 3], 3, [4; 2]));
    assert!(b.has_come(gang[1]) && !a.has_come(other) && !b.has_come(later[0]));
    // The gang has ended when all of its entries have, in any order.
    drop((Turn(&c.gpu), Turn(&a.gpu)));
    assert!(!a.has_come(other));
    drop(Turn(&b.gpu));
    assert!(a.has_come(other) && !b.has_come(later[0]));
    drop(Turn(&a.gpu));
    assert!(later.iter().all(|&turn| c.has_come(turn)));
}

#[test]
fn devices_on_one_gpu_share_its_order_and_have_progress_of_their_own() {
    let name = b"one for all.....";
    let (a, b) = (gpu(0, name), gpu(1, name));
    assert!(Arc::ptr_eq(&a, &gpu(0, name)) && !Arc::ptr_eq(&a, &b) && Arc::ptr_eq(&a.gpu, &b.gpu));
    b.progress.advance();
    b.progress.relay();
    assert_eq!((a.progress.any(), b.progress.own(), b.progress.any()), (0, 1, 2));
    // The GPU's order stays the same one after the first device is dropped.
    drop(a);
    assert!(Arc::ptr_eq(&gpu(0, name).gpu, &b.gpu));
    assert!(!Arc::ptr_eq(&gpu(0, b"another one.....").gpu, &b.gpu));
}
