//! The sizes of `bench`, and expected values against loops by hand.

use super::{
    bytes,
    number::{PERIOD, Reduction},
    op::{Case, Op},
};
use half::bf16;

#[test]
fn sizes_are_read_as_nccl_tests_does() {
    assert_eq!(["8", "1K", "64M", "1G", "2kb"].map(|text| bytes(text).unwrap()), [8, 1024, 64 << 20, 1 << 30, 2048]);
    for wrong in ["", "K", "1T", "-1", "99999999999G"] {
        assert!(bytes(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn reductions_are_those_of_a_loop() {
    let at = 17;
    let numbers: Vec<i64> = (0..3).map(|rank| Reduction::Sum.number(rank, at)).collect();
    let [a, b, c] = numbers[..] else { panic!("three members") };
    assert_eq!(Reduction::Sum.expected::<i64>(3, at), a + b + c);
    assert_eq!(Reduction::Min.expected::<i64>(3, at), a.min(b).min(c));
    assert_eq!(Reduction::Max.expected::<i64>(3, at), a.max(b).max(c));
    assert_eq!(Reduction::Avg.expected::<i64>(3, at), (a + b + c) / 3);
    let factors: Vec<u8> = (0..3).map(|rank| Reduction::Prod.number(rank, at)).collect();
    assert!(factors.iter().all(|factor| [1, 2].contains(factor)));
    assert_eq!(Reduction::Prod.expected::<u8>(3, at), factors.iter().product::<u8>());
    assert_eq!(Reduction::Avg.expected::<bf16>(3, at), bf16::from_f32((a + b + c) as f32 * (1.0 / 3.0)));
}

/// Each element of the data has a neighbour with another value: data in a wrong place is seen.
#[test]
fn the_data_differs_between_places_and_members() {
    for reduction in [Reduction::Sum, Reduction::Prod] {
        let row = |rank| (0..PERIOD).map(|at| reduction.number::<i32>(rank, at)).collect::<Vec<_>>();
        for shift in 1..PERIOD {
            assert!((0..PERIOD).any(|at| row(0)[at] != row(0)[(at + shift) % PERIOD]), "{shift}");
        }
        assert_ne!(row(0), row(1));
    }
}

#[test]
fn the_count_is_each_members_part() {
    let case = |op| Case { op, reduction: Reduction::Sum, root: 0, total: 12, members: 3 };
    assert_eq!(
        [Op::AllReduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll].map(|op| case(op).count()),
        [12, 4, 4, 4]
    );
    assert_eq!(case(Op::AllGather).lengths(), [4, 12]);
}
