use super::*;

#[test]
fn memory_comes_and_goes_within_a_range() {
    let pages = Pages::reserve(8 * GRANULARITY).unwrap();
    assert!(pages.commit(GRANULARITY, 2 * GRANULARITY));
    // SAFETY: committed above, and no other code uses it.
    let all = |from: usize, n: usize| unsafe { std::slice::from_raw_parts_mut(pages.first().as_ptr().add(from), n) };
    all(GRANULARITY, 2 * GRANULARITY).fill(7);
    pages.decommit(2 * GRANULARITY, GRANULARITY);
    assert!(all(GRANULARITY, GRANULARITY).iter().all(|&byte| byte == 7), "its neighbour's end harms nothing");
    assert!(pages.commit(2 * GRANULARITY, GRANULARITY));
    assert!(all(2 * GRANULARITY, GRANULARITY).iter().all(|&byte| byte == 0), "it had really gone");
}

/// The range is larger than the computer's memory; that works because no memory is behind it.
#[test]
fn addresses_cost_nothing() {
    let pages: Vec<_> = (0..4).map(|_| Pages::reserve(1 << 40).unwrap()).collect();
    assert!(pages[3].commit((1 << 40) - GRANULARITY, GRANULARITY));
}
