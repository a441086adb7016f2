use super::*;

fn clock(counts: &[(Component, u64)]) -> Clock {
    let mut clock = Clock::default();
    counts.iter().for_each(|&(component, count)| clock.set(component, count));
    clock
}

#[test]
fn a_wait_learns_what_all_who_may_end_it_knew() {
    let mut flags = Flags::default();
    flags.write(0, 5, 1, 1, clock(&[(1, 1), (9, 4)]));
    flags.write(0, 6, 1, 2, clock(&[(1, 2), (9, 8)]));
    let nothing = |_, _| false;
    let first = flags.acquire(0, 5, nothing).unwrap();
    assert!(first.covers(9, 4) && !first.covers(9, 5) && first.covers(1, 1) && !first.covers(1, 2));
    assert!(flags.acquire(0, 6, nothing).unwrap().covers(9, 8));
    assert!(flags.acquire(0, 7, nothing).is_none() && flags.acquire(8, 5, nothing).is_none());
    // The first write cannot end a wait that knows of the second write.
    assert!(flags.acquire(0, 5, |c, n| (c, n) == (1, 2)).unwrap().covers(9, 8));
    // Cyclically, 5 is past the end of the range.
    assert!(flags.acquire(0, u64::MAX, nothing).is_some());
}

#[test]
fn a_reset_flag_lets_nobody_go() {
    let mut flags = Flags::default();
    flags.write(0, 1, 1, 1, clock(&[(1, 1)]));
    flags.overwrite(&(4..8), 1, 2, &clock(&[(1, 2)]));
    assert!(flags.acquire(0, 1, |_, n| n <= 2).is_none());
    flags.write(0, 1, 1, 3, clock(&[(1, 3)]));
    assert!(flags.acquire(0, 1, |_, n| n <= 2).unwrap().covers(1, 3));
    flags.host_writes(&(0..8), &clock(&[(1, 3)]));
    assert!(flags.acquire(0, 1, |_, _| true).is_none());
    for i in 0..1000 {
        flags.write(0, i, 1, i, clock(&[(1, i)]));
    }
    assert_eq!(flags.0[&0].writes.len(), KEPT);
}

#[test]
fn who_reads_a_value_learns_what_its_write_knew_and_no_more() {
    let mut flags = Flags::default();
    assert!(flags.seen(0, 0).is_none());
    for i in 1..=3 {
        flags.write(0, 16 * i, 1, i, clock(&[(1, i)]));
    }
    assert!(flags.seen(0, 0).is_none(), "none of them has been seen");
    let second = flags.seen(0, 32).unwrap();
    assert!(second.covers(1, 2) && !second.covers(1, 3));
    // From now on no write is dropped before the host has seen it, regardless of their number.
    for i in 4..=1000 {
        flags.write(0, 16 * i, 1, i, clock(&[(1, i)]));
    }
    for i in [3, 500, 1000] {
        let seen = flags.seen(0, 16 * i).unwrap();
        assert!(seen.covers(1, i) && !seen.covers(1, i + 1));
    }
    assert_eq!(flags.0[&0].writes.len(), 1);
}
