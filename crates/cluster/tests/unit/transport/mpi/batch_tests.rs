use super::*;
use proptest::prelude::*;

#[test]
fn a_library_with_few_tags_is_refused() {
    for bound in [-1, 0, 1, 32767, (1 << 19) - 2] {
        assert!(matches!(Tags::new(bound), Err(Error::Cluster { .. })), "{bound}");
    }
    assert_eq!(Tags::new((1 << 19) - 1).unwrap().bits, 8);
    assert_eq!(Tags::new(c_int::MAX).unwrap().bits, 20);
}

proptest! {
    #[test]
    fn tags_are_within_the_bound_and_differ(
        bound in (1 << 19) - 1..=c_int::MAX,
        a in (0u64..256, 0u32..16, 0u32..64), b in (0u64..256, 0u32..16, 0u32..64), base: u64,
    ) {
        let tags = Tags::new(bound).unwrap();
        let tag = |(number, phase, rail)| Tag { number: base.saturating_add(number), phase, rail };
        let (a, b) = (tag(a), tag(b));
        for tag in [a, b, Tags::START] {
            prop_assert!((0..=bound).contains(&tags.of(tag)));
        }
        prop_assert_eq!(tags.of(a) == tags.of(b), a == b);
    }
}
