use super::*;
use proptest::prelude::*;

#[test]
fn the_remainder_goes_to_the_first() {
    let parts: Vec<_> = (0..4).map(|i| balanced(i, 4, 9).len()).collect();
    assert_eq!(parts, [3, 2, 2, 2]);
}

/// The parts of all ranks.
fn parts(weights: &[f64], len: usize) -> Vec<Range<usize>> {
    let shard = Shard::new(0, weights.len(), Some(weights.into()));
    (0..weights.len()).map(|rank| shard.range_of(rank, len)).collect()
}

#[test]
fn weights_three_to_one() {
    assert_eq!(parts(&[3.0, 1.0], 10), [0..8, 8..10]);
}

#[test]
fn weights_of_any_size_split_by_their_ratios() {
    const TINIEST: f64 = f64::from_bits(1);
    assert_eq!(parts(&[f64::MAX, f64::MAX], 300_000_001), [0..150_000_001, 150_000_001..300_000_001]);
    assert_eq!(parts(&[f64::MAX, f64::MAX / 2.0, f64::MAX / 2.0], 8), [0..4, 4..6, 6..8]);
    assert_eq!(parts(&[3.0 * TINIEST, TINIEST], 8), [0..6, 6..8]);
    assert_eq!(parts(&[f64::MIN_POSITIVE, f64::MIN_POSITIVE / 2.0], 6), [0..4, 4..6]);
    assert_eq!(parts(&[f64::MAX, TINIEST], usize::MAX), [0..usize::MAX, usize::MAX..usize::MAX]);
}

#[test]
fn as_many_items_as_there_can_be() {
    let half = usize::MAX / 2;
    assert_eq!(parts(&[1.0, 1.0], usize::MAX), [0..half + 1, half + 1..usize::MAX]);
    let all = vec![(); usize::MAX];
    let weighted = Shard::new(1, 2, Some([1.0, 3.0].into()));
    assert_eq!(weighted.of(&all).len(), usize::MAX / 4 * 3 + 2);
    assert_eq!(weighted.rows(&all, 3).len(), usize::MAX / 12 * 9 + 3);
    assert_eq!(Shard::new(1, 2, None).of(&all).len(), half);
}

#[test]
#[should_panic(expected = "rank 2 of 2 shards")]
fn a_rank_that_is_not_there() {
    Shard::new(0, 2, None).range_of(2, 10);
}

/// The split of earlier versions, which took only weights of normal size.
fn by_plain_floats(weights: &[f64], len: usize) -> Vec<usize> {
    let total: f64 = weights.iter().sum();
    let ideal: Vec<f64> = weights.iter().map(|w| w / total * len as f64).collect();
    let mut parts: Vec<usize> = ideal.iter().map(|x| x.floor() as usize).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| ideal[b].fract().total_cmp(&ideal[a].fract()).then(a.cmp(&b)));
    let mut given: usize = parts.iter().sum();
    while given > len {
        let i = *order.iter().rev().find(|&&i| parts[i] > 0).unwrap();
        parts[i] -= 1;
        given -= 1;
    }
    for &i in order.iter().take(len - given) {
        parts[i] += 1;
    }
    parts
}

/// Weights as people write them, and measured ones.
fn sane_weight() -> impl Strategy<Value = f64> {
    prop_oneof![(1u32..20).prop_map(f64::from), (1u32..100).prop_map(|w| f64::from(w) / 10.0), 1e-6f64..1e6]
}

/// Any finite number above zero; all exponents are equally likely.
fn any_weight() -> impl Strategy<Value = f64> {
    prop_oneof![(1u64..f64::INFINITY.to_bits()).prop_map(f64::from_bits), sane_weight(), Just(f64::MAX)]
}

fn any_len() -> impl Strategy<Value = usize> {
    (any::<usize>(), 0..usize::BITS).prop_map(|(len, shift)| len >> shift)
}

proptest! {
    #[test]
    fn sane_weights_split_as_ever(weights in prop::collection::vec(sane_weight(), 1..17), len in 0..MOST_BY_FLOAT) {
        for len in [len, len % 1000] {
            let sizes: Vec<usize> = parts(&weights, len).iter().map(Range::len).collect();
            prop_assert_eq!(sizes, by_plain_floats(&weights, len));
        }
    }

    #[test]
    fn parts_are_within_one_of_their_share(
        weights in prop::collection::vec(any_weight(), 1..17), weighted: bool, len in any_len()
    ) {
        let count = weights.len();
        let shard = Shard::new(count - 1, count, weighted.then(|| weights[..].into()));
        let shares = if weighted { scaled(&weights) } else { vec![1; count] };
        let total: u128 = shares.iter().sum();
        let mut next = 0;
        for (rank, share) in shares.iter().enumerate() {
            let range = shard.range_of(rank, len);
            prop_assert_eq!(range.start, next);
            next = range.end;
            // `f64` may round a share across a whole number.
            let (low, rest) = divided(len, *share, total);
            let slack = usize::from(len <= MOST_BY_FLOAT && (rest < total >> 5 || rest > total - (total >> 5)));
            prop_assert!(range.len() + slack >= low && range.len() <= low + 1 + slack, "{rank}: {range:?} {low}");
        }
        prop_assert_eq!(next, len);
        prop_assert_eq!(shard.range(len), shard.range_of(count - 1, len));
    }

    #[test]
    fn weights_keep_their_ratios(a in any_weight(), b in any_weight()) {
        let (a, b) = (a.max(b), a.min(b));
        let [most, less] = scaled(&[a, b])[..] else { unreachable!() };
        let (ratio, exact) = (less as f64 / most as f64, b / a);
        prop_assert!((ratio - exact).abs() <= 1e-15 * exact + 1e-30, "{most} {less}: {ratio}, not {exact}");
    }

    #[test]
    fn a_division_bit_by_bit(len: u32, weight in 1u64.., more: u64) {
        let (len, weight, total) = (len as usize, u128::from(weight), u128::from(weight) + u128::from(more));
        let product = len as u128 * weight;
        prop_assert_eq!(divided(len, weight, total), ((product / total) as usize, product % total));
    }
}
