use super::*;
use std::collections::HashSet;

/// Whatever the numbers are, no kind is taken for another.
#[test]
fn origins_are_told_apart() {
    let exchange = Origin::exchange(7, 3);
    let graph = Origin::graph(u64::MAX, u64::MAX).then(u64::MAX);
    let of = |origin: Origin| Call::new("all_reduce").from(origin);
    let pairs = [
        (exchange, Origin::exchange(7, 4), Some("exchange")),
        (exchange, Origin::exchange(8, 3).in_step(1), Some("exchange")),
        (exchange, Origin::default(), Some("exchange")),
        (exchange, graph, Some("exchange")),
        (exchange, Origin::CAPTURE, Some("capture")),
        (exchange.in_step(1), exchange.in_step(2), Some("step")),
        (exchange.in_step(2).in_step(0), exchange, None),
        (exchange.in_step(2).of_bucket(1), exchange.in_step(2), Some("bucket")),
        (exchange.in_step(2).of_bucket(1), exchange.in_step(1).of_bucket(1), Some("step")),
        (exchange.in_step(2).of_bucket(9).in_step(2), exchange.in_step(2), None),
        (graph, Origin::default(), Some("graph")),
    ];
    for (a, b, what) in pairs {
        assert_eq!((of(a).differs(&of(b)), of(b).differs(&of(a))), (what, what), "{a:?} {b:?}");
    }
    assert_eq!(of(exchange.in_step(5)).to_string(), "all_reduce() in exchange 5 of a GradientExchange");
    let bucket = exchange.in_step(5).of_bucket(0);
    assert_eq!(of(bucket).to_string(), "all_reduce() of bucket 0 in exchange 5 of a GradientExchange");
}

/// Of all that a process is likely to have.
#[test]
fn exchanges_have_numbers_of_their_own() {
    let places = (1..200u64).map(|place| place * 1009);
    let all: Vec<_> = places.flat_map(|place| (1..200).map(move |number| Origin::exchange(place, number).0)).collect();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
}
