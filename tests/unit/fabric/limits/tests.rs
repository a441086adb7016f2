//! Blocks fit on the devices, also on shared ones, and leave room to other work.

use super::{Limits, part};
use crate::{
    collective::algorithm::{eager::blocks as sending, fused::combining, ring::cut},
    fabric::layout::BLOCKS,
};
use proptest::prelude::*;

proptest! {
    #[test]
    fn kernels_fit_on_the_smallest_device(multiprocessors in 0u32..300, most in 1u32..=BLOCKS) {
        let limits = Limits::new(multiprocessors);
        for blocks in [limits.blocks(most), limits.of_one_trip(most), limits.overlapping().blocks(most)] {
            prop_assert!((1..=multiprocessors.clamp(1, 128)).contains(&blocks));
        }
        prop_assert!(multiprocessors < 128 || limits.blocks(most) == most);
    }

    /// Whatever kernel it is: the multiprocessors are left to the work beside, but for what is over in microseconds.
    #[test]
    fn few_blocks_beside_other_work(log in 0u32..31, members in 2usize..17) {
        let limits = Limits::new(132).overlapping();
        let bytes = 1 << log;
        prop_assert!(combining(bytes, members, &limits) <= 16);
        prop_assert!(sending(bytes, &limits) <= 16);
        prop_assert!(cut::blocks(bytes, &limits) <= 16);
    }
}

// Blocks of devices on one GPU that wait for each other are all on it at once, one on a multiprocessor.
#[test]
fn kernels_fit_on_a_gpu_that_is_shared() {
    assert_eq!(part([(132, 3), (132, 3), (132, 3), (132, 2), (132, 2)].into_iter()), 44);
    for sharers in 1..=8 {
        let limits = Limits::new(part([(132, sharers); 16].into_iter()));
        assert!((1..=BLOCKS).all(|most| limits.blocks(most) as usize * sharers <= 132));
    }
    assert_eq!(part(std::iter::empty()), u32::MAX);
}
