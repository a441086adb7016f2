use super::*;
use proptest::prelude::*;
use std::panic::Location;

proptest! {
    #[test]
    fn a_broadcast_says_all_of_it(
        (count, origin, source, destination, factor) in any::<(usize, u64, u64, u64, f64)>(),
        (cols, layer, eps) in (1usize..1 << 31, any::<bool>(), any::<f32>()),
        (dtype, reduce, root) in (0..=DType::ALL.len(), 0..=REDUCTIONS.len() + 1, prop::option::of(0u32..255)),
    ) {
        let members = (0x3210, 4);
        let call = Call { count, origin: Origin::of_bits(origin), ..Call::at("reduce", Location::caller()) };
        let reduce = match reduce {
            0 => None,
            1 => Some(ReduceOp::Scaled(factor)),
            k => Some(REDUCTIONS[k - 2]),
        };
        let dtype = DType::ALL.get(dtype).copied();
        let barrier = CompactDescriptor::of_barrier(&call, members);
        let norm = match reduce {
            None | Some(ReduceOp::Scaled(_)) => ThenNorm::default(),
            Some(_) => ThenNorm::new(cols, layer, eps),
        };
        let descriptor = CompactDescriptor { dtype, reduce, root, norm, source, destination, ..barrier };
        let words = descriptor.words().unwrap();
        // Compared as text: a factor may be a NaN.
        prop_assert_eq!(format!("{:?}", CompactDescriptor::of_words(words, members)), format!("{descriptor:?}"));
    }
}

#[test]
fn a_root_that_does_not_fit_goes_another_way() {
    let barrier = CompactDescriptor::of_barrier(&Call::new("broadcast"), (0x10, 2));
    let descriptor = CompactDescriptor { root: Some(255), ..barrier };
    assert_eq!(descriptor.words(), None);
}
