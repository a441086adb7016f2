use super::{super::pages::GRANULARITY, *};

#[test]
fn addresses_are_reused_late_and_never_overlap() {
    let mut memory = Memory::new([1 << 20].into_iter(), false).unwrap();
    let a = memory.alloc(0, 1000).unwrap();
    memory.free(0, a).unwrap();
    let b = memory.alloc(0, 1000).unwrap();
    assert_ne!(a, b);
    assert!(memory.resolve(a, 1).is_err() && memory.resolve(b, 1000).is_ok() && memory.resolve(b, 1001).is_err());
    // At the end of the window the search starts over and skips live allocations.
    memory.devices[0].cursor = WINDOW - 256;
    let c = memory.alloc(0, 5000).unwrap();
    let d = memory.alloc(0, 256).unwrap();
    assert!(c > b && d > c, "{a:#x} {b:#x} {c:#x} {d:#x}");
    assert!(memory.free(0, a).is_err() && memory.free(0, b + 256).is_err());
    assert_eq!(memory.info(0), ((1 << 20) - 1000 - 5000 - 256, 1 << 20));
}

#[test]
fn windows_are_handed_out_again_as_late_as_possible() {
    let mut numbers = Numbers { next: 1, end: 9, free: BTreeMap::new() };
    let [a, b, c] = [3, 2, 2].map(|n| numbers.take(n).unwrap());
    assert_eq!((a, b, c, numbers.take(2)), (1, 4, 6, None));
    numbers.give(b, 2);
    assert_eq!(numbers.take(1), Some(8), "a new number first");
    assert_eq!((numbers.take(3), numbers.take(1), numbers.take(1), numbers.take(1)), (None, Some(4), Some(5), None));
    // Adjacent numbers become one run, in any order of return.
    for (first, n) in [(6, 2), (1, 3), (0, 0), (8, 1), (4, 1), (5, 1)] {
        numbers.give(first, n);
    }
    assert_eq!((numbers.free.len(), numbers.take(8), numbers.take(1)), (1, Some(1), None));
}

#[test]
fn a_machine_gives_its_windows_back() {
    let memory = Memory::new([1, 2, 3].into_iter(), false).unwrap();
    let first = memory.first_window();
    drop(memory);
    let numbers = NUMBERS.lock();
    let (start, length) = numbers.free.range(..=first).next_back().unwrap();
    assert!(start + length >= first + 3);
}

#[test]
fn no_size_overflows() {
    let mut memory = Memory::new([u64::MAX].into_iter(), true).unwrap();
    for bytes in [usize::MAX, usize::MAX - 4095, usize::MAX / 2 + 1, 2 * WINDOW as usize] {
        assert!(memory.alloc(0, bytes).is_err(), "{bytes}");
        assert!(memory.reserve(0, bytes as u64).is_err() && memory.map(0, window_of(1), bytes).is_err());
    }
    assert!(memory.reserve(0, !(GRANULARITY as u64 - 1)).is_err(), "the largest multiple");
}

#[test]
fn host_memory_is_aligned_zeroed_and_of_one_kind() {
    let mut memory = Memory::new([].into_iter(), false).unwrap();
    let ptr = memory.host_insert(Block::zeroed(100).unwrap(), HostKind::Pinned);
    assert_eq!(ptr as usize % ALIGN, 0);
    // SAFETY: freshly allocated.
    assert!(unsafe { std::slice::from_raw_parts(ptr, 100) }.iter().all(|&b| b == 0));
    assert!(memory.check_host(ptr as Address + 99, 1).is_ok() && memory.check_host(ptr as Address + 99, 2).is_err());
    assert!(memory.host_remove(ptr, HostKind::Managed).is_err());
    assert!(memory.host_remove(ptr, HostKind::Pinned).is_ok() && memory.host_remove(ptr, HostKind::Pinned).is_err());
}
