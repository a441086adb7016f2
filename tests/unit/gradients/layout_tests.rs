use super::*;
use proptest::prelude::*;

fn buckets(sizes: &[usize], first: usize, bytes: usize) -> Vec<Vec<usize>> {
    let order: Vec<usize> = (0..sizes.len()).rev().collect();
    let layout = Layout::new(Unit::of::<f32>(), sizes, &order, (first, bytes)).unwrap();
    layout.buckets.into_iter().map(|bucket| bucket.gradients).collect()
}

#[test]
fn buckets_are_filled_in_order() {
    assert_eq!(buckets(&[4, 4, 4, 4, 4], 16, 32), [vec![4], vec![3, 2], vec![1, 0]]);
    assert_eq!(buckets(&[1, 1000, 1], 4, 64), [vec![2], vec![1], vec![0]]);
    assert_eq!(buckets(&[0, 0, 3], 1, 1), [vec![2], vec![1, 0]]);
    assert_eq!(buckets(&[], 1, 1), Vec::<Vec<usize>>::new());
}

#[test]
fn too_much_is_told() {
    for sizes in [vec![usize::MAX], vec![usize::MAX / 2; 3], vec![isize::MAX as usize]] {
        let order: Vec<usize> = (0..sizes.len()).collect();
        assert!(matches!(Layout::new(Unit::of::<f32>(), &sizes, &order, (1, 1)), Err(Error::InvalidArgument { .. })));
    }
}

proptest! {
    #[test]
    fn gradients_tile_their_buckets(
        sizes in prop::collection::vec(0..100usize, 0..40), first in 1..300usize, bytes in 1..600usize,
        unit in prop::sample::select(vec![Unit::of::<u16>(), Unit::of::<f32>(), Unit::of::<f64>()]),
    ) {
        let order: Vec<usize> = (0..sizes.len()).collect();
        let layout = Layout::new(unit, &sizes, &order, (first, bytes)).unwrap();
        let mut seen = Vec::new();
        for (at, bucket) in layout.buckets.iter().enumerate() {
            let mut next = 0;
            for &gradient in &bucket.gradients {
                let extent = layout.extents[gradient];
                prop_assert_eq!((extent.bucket, extent.start, extent.len), (at, next, sizes[gradient]));
                prop_assert!(next * unit.bytes % 16 == 0 && extent.padded == unit.padded(extent.len));
                next += extent.padded;
                seen.push(gradient);
            }
            prop_assert_eq!(next, bucket.len);
        }
        prop_assert_eq!(seen, order);
    }
}
