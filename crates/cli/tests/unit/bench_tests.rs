//! The sizes of `bench`, and expected values against loops by hand.

use super::{
    Places, Row, Timed, bytes, head,
    number::{PERIOD, Reduction},
    op::{Case, Op},
    shown,
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

/// NCCL's columns stand behind ours, which are those of nccl-tests; each number ends where its header ends.
#[test]
fn the_columns_of_nccl_are_beside_ours() {
    let timed = |us, wrong| Some(Timed { us, algbw: 1.5, busbw: 2.25, wrong });
    let mut row = Row {
        op: "all_reduce".to_owned(),
        size: 1024,
        count: 256,
        r#type: "float".to_owned(),
        redop: "sum".to_owned(),
        root: -1,
        devices: 2,
        own: Places { out_of_place: timed(10.0, Some(0)), in_place: timed(8.0, Some(0)) },
        nccl: Some(Places { out_of_place: timed(25.0, None), in_place: timed(6.0, Some(3)) }),
    };
    let own = "        1024           256     float    sum     -1    10.00   1.50   2.25      0     8.00   1.50   2.25";
    let own = format!("{own}      0");
    let nccl = "    25.00   1.50   2.25    N/A   2.50     6.00   1.50   2.25      3   0.75";
    assert_eq!(shown(&row), format!("{own}{nccl}"));
    let ends = |line: &str| -> Vec<usize> {
        let is_there = |at: usize| line.as_bytes().get(at).is_some_and(|byte| *byte != b' ');
        (0..line.len()).filter(|&at| is_there(at) && !is_there(at + 1)).collect()
    };
    assert_eq!(ends(&shown(&row)), ends(head(true).lines().nth(1).unwrap())[1..]);
    let json = serde_json::to_value(&row).unwrap();
    assert_eq!((&json["in_place"]["us"], &json["nccl"]["in_place"]["us"]), (&8.0.into(), &6.0.into()));
    row.nccl = None;
    assert_eq!((shown(&row), head(false)), (own, super::HEAD.to_owned()));
    assert!(serde_json::to_value(&row).unwrap().get("nccl").is_none());
}
