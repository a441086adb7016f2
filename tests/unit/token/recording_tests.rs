use super::*;
use Access::{Read, Write};
use proptest::prelude::*;

#[test]
fn parts_that_say_nothing_new_are_left_out() {
    let mut parts = Parts::new();
    for (bytes, access) in [(0..8, Read), (2..4, Read), (0..8, Read), (4..6, Write), (4..6, Read)] {
        add(&mut parts, bytes, access);
    }
    assert_eq!(parts[..], [(0..8, Read), (4..6, Write)]);
    add(&mut parts, 0..8, Write);
    assert_eq!(parts[..], [(0..8, Write)]);
}

proptest! {
    /// Every byte that was touched is noted, with at least the same access.
    #[test]
    fn nothing_is_forgotten(all in prop::collection::vec((0usize..60, 1usize..10, any::<bool>()), 0..60)) {
        let mut parts = Parts::new();
        for &(start, len, write) in &all {
            add(&mut parts, start..start + len, if write { Write } else { Read });
        }
        prop_assert!(parts.len() <= PARTS);
        for (start, len, write) in all {
            for byte in start..start + len {
                let held =
                    |(bytes, how): &(Range<usize>, Access)| bytes.contains(&byte) && (!write || *how == Write);
                prop_assert!(parts.iter().any(held));
            }
        }
    }
}
