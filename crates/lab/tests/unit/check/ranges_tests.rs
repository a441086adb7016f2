use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_set_of_bytes(
        adds in prop::collection::vec((0_u64..64, 1_u64..20), 0..20),
        at in 0_u64..64,
        n in 1_u64..30,
    ) {
        let (mut set, mut naive) = (Ranges::default(), vec![false; 128]);
        for (start, n) in adds {
            set.add(start..start + n);
            naive[start as usize..(start + n) as usize].fill(true);
        }
        let start = (at..at + n).find(|&i| !naive[i as usize]);
        let gap = start.map(|s| s..(s..at + n).find(|&i| naive[i as usize]).unwrap_or(at + n));
        prop_assert_eq!(set.first_gap(&(at..at + n)), gap);
        prop_assert!(set.0.iter().zip(set.0.iter().skip(1)).all(|((_, end), (start, _))| end < start));
    }
}
