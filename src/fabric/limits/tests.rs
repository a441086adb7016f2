//! Tests of the limits between algorithms: the table of machines, interpolation, shared GPUs, the text, measurements.

use super::{Bytes, Limits, part, table};
use crate::collective::algorithm::{eager::blocks as sending, fused::combining, ring::cut};
use proptest::prelude::*;

/// Of all kernels.
fn all_blocks(limits: &Limits) -> [u32; 10] {
    let Limits { blocks, large_blocks, ll_blocks, ring_blocks, .. } = *limits;
    let Limits { inbox_blocks, slots_blocks, .. } = *limits;
    let Limits { exchange_blocks, overlapped_blocks, relay_blocks, allgather_blocks, .. } = *limits;
    let large = [large_blocks, relay_blocks, allgather_blocks];
    [
        [blocks, ll_blocks, inbox_blocks, slots_blocks, ring_blocks, exchange_blocks, overlapped_blocks].as_slice(),
        &large,
    ]
    .concat()
    .try_into()
    .unwrap()
}

fn h200() -> &'static [(usize, Limits)] {
    table::of("NVIDIA H200").unwrap()
}

#[test]
fn the_table_is_for_one_machine_by_its_whole_name() {
    assert!(table::of("NVIDIA H200 NVL").is_none() && table::of("NVIDIA H100 80GB HBM3").is_none());
    // Rows in order, and limits that make sense.
    assert!(h200().is_sorted_by(|a, b| a.0 < b.0));
    for (_, limits) in h200() {
        assert!(limits.ll < limits.eager && limits.large_blocks <= limits.blocks, "{limits:?}");
    }
}

#[test]
fn rows_stand_for_themselves_and_others_are_between() {
    for &(members, limits) in h200() {
        assert_eq!(table::between(h200(), members), limits);
    }
    let [two, three, four, nine] = [2, 3, 4, 9].map(|n| table::between(h200(), n));
    // On the line from 256 KB for 2 to 128 KB for 4: half as much for twice as many.
    assert!((two.ll / 3 * 2).abs_diff(three.ll) < 4, "{three:?}");
    assert_eq!(three.large_blocks, four.large_blocks);
    assert_eq!([two, three, four, nine].map(|limits| limits.ring), [usize::MAX, 32 << 20, 32 << 20, 32 << 20]);
    // What a device sends in all does not grow any more.
    let eight = h200().last().unwrap().1;
    assert_eq!((nine.ll, nine.eager), (eight.ll * 7 / 8, eight.eager * 7 / 8));
}

proptest! {
    #[test]
    fn more_members_push_no_more(members in 1usize..64) {
        let limits = |n| table::between(h200(), n);
        let (fewer, more, two) = (limits(members), limits(members + 1), Limits::default_of(2));
        prop_assert!(more.ll <= fewer.ll && fewer.ll <= two.ll);
        prop_assert!(more.eager <= fewer.eager && fewer.eager <= two.eager);
        // What goes eagerly is what is too much for packets.
        prop_assert!(fewer.ll <= fewer.eager);
    }

    #[test]
    fn kernels_fit_on_the_smallest_device(multiprocessors in 0u32..300, members in 1usize..64) {
        let limits = Limits::default_of(members).capped(multiprocessors);
        let most = multiprocessors.clamp(1, 128);
        for blocks in all_blocks(&limits) {
            prop_assert!((1..=most).contains(&blocks));
        }
        prop_assert!(multiprocessors < 128 || limits == Limits::default_of(members));
        for (_, row) in h200() {
            prop_assert!(all_blocks(&row.capped(multiprocessors)).iter().all(|blocks| (1..=most).contains(blocks)));
        }
    }

    /// Whatever kernel it is: the multiprocessors are left to the work beside, but for what is over in microseconds.
    #[test]
    fn few_blocks_beside_other_work(log in 0u32..31, members in 2usize..17, row in 0usize..4) {
        let limits = h200().get(row).map_or(Limits::default_of(members), |(_, limits)| *limits).overlapping();
        let bytes = 1 << log;
        prop_assert!(combining(bytes, members, &limits) <= limits.overlapped_blocks);
        prop_assert!(sending(bytes, &limits) <= limits.overlapped_blocks);
        prop_assert!(cut::blocks(bytes, &limits) <= limits.overlapped_blocks as usize);
        // Between two, engines do it where that is worth it, and no sooner otherwise.
        let two = Limits::default_of(2);
        prop_assert_eq!((two.overlapping().exchange_ce, two.overlapping().ce), (two.overlapped, two.ce));
        prop_assert!(two.overlapped < two.exchange_ce);
    }
}

// Blocks of devices on one GPU that wait for each other are all on it at once, one on a multiprocessor.
#[test]
fn kernels_fit_on_a_gpu_that_is_shared() {
    assert_eq!(part([(132, 3), (132, 3), (132, 3), (132, 2), (132, 2)].into_iter()), 44);
    for sharers in 1..=8 {
        let part = part([(132, sharers); 16].into_iter());
        for limits in h200().iter().map(|(_, limits)| *limits).chain([Limits::default_of(sharers)]) {
            assert!(all_blocks(&limits.capped(part)).iter().all(|&blocks| blocks as usize * sharers <= 132));
        }
    }
    assert_eq!(part(std::iter::empty()), u32::MAX);
}

#[test]
fn limits_in_words() {
    let text = Limits::default_of(4).to_string();
    assert_eq!(
        text,
        "pushed up to 128 KB, sent eagerly up to 341 KB, by parts up to 1 MB, sums exchanged by kernels \
         from 8 MB on, a ring of kernels from 32 MB on, a block for 16 KB, at most 64, 16 for sums in parts of 2 MB; \
         sums of floats as data that are flags up to 375 KB, in pieces up to 8 MB"
    );
    assert_eq!(
        Limits::default_of(2).to_string(),
        "pushed up to 256 KB, sent eagerly up to 1 MB, sums exchanged by copies from 64 MB on, \
         beside other work from 8 MB on, moved by copies from 128 MB on, a block for 16 KB, at most 64; \
         sums of floats as data that are flags up to 2 MB, in pieces up to 8 MB and in graphs from 128 MB on"
    );
    assert_eq!(Bytes(5).to_string(), "5 B");
}
