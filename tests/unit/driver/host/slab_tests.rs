use super::*;

#[test]
fn stale_and_foreign_keys_find_nothing() {
    let (mut a, mut b) = (Slab::new(1), Slab::new(2));
    let old = a.insert('x').unwrap();
    assert_eq!(a.remove(old), Some('x'));
    let new = a.insert('y').unwrap();
    assert_eq!(a.remove(old), None);
    assert_eq!((a.get(old), a.get(new)), (None, Some(&'y')));
    assert_eq!(b.get(new), None);
    let foreign = b.insert('z').unwrap();
    assert_eq!(a.get(foreign), None);
    assert_eq!(a.get(u64::MAX), None);
}

/// The parts of a key must not overflow into each other, and no key is used twice.
#[test]
fn keys_run_out_with_a_word() {
    let mut slab = Slab::new(7);
    slab.most = 2;
    let keys = [slab.insert(0).unwrap(), slab.insert(1).unwrap()];
    let fault = slab.insert(2).unwrap_err();
    assert!(fault.detail.contains("2 handles"), "{fault}");
    slab.remove(keys[0]).unwrap();
    let again = slab.insert(3).unwrap();
    assert_eq!((slab.get(keys[0]), slab.get(again), slab.len()), (None, Some(&3), 2));
    // The last generation of a slot.
    slab.slots[1].key |= MASK << BITS;
    let last = slab.slots[1].key;
    assert_eq!(slab.remove(last), Some(1));
    assert!(slab.insert(4).is_err() && slab.len() == 1);
    assert_eq!(last >> (2 * BITS), 7);
}
