//! Each algorithm is the right one for some case, and what is asked for comes first.

use super::*;
use crate::{
    collective::case::{KernelBarrier, Machine},
    fabric::{
        layout::PadLayout,
        limits::Limits,
        plan::{Counts, Shape},
        types::{Algorithm as Wish, DType, ReduceOp},
    },
};
use std::collections::BTreeSet;

const KB: usize = 1 << 10;
const MB: usize = 1 << 20;

const GPUS: Machine = Machine {
    software: false,
    virtual_time: false,
    barrier: KernelBarrier::OnDevices { ll: 256 * KB, eager: MB, inbox: 2 * MB, inbox_slot: 32 * KB },
    alone: true,
    wish: Wish::Auto,
    rank_order: false,
};
const WITHOUT_PEERS: Machine = Machine { barrier: KernelBarrier::InHost { ll: 256 * KB }, ..GPUS };
const SOFTWARE: Machine = Machine { software: true, barrier: KernelBarrier::None, ..GPUS };

fn chosen(machine: Machine, members: usize, direct: bool, shape: &Shape) -> &'static str {
    chosen_of(DType::F32, machine, members, direct, shape)
}

fn chosen_of(dtype: DType, machine: Machine, members: usize, direct: bool, shape: &Shape) -> &'static str {
    let limits = Limits::new(132);
    let what = (dtype, ReduceOp::Sum);
    choose(&Case::new((machine, &limits), (members, direct), what, Some(shape), false)).0.name()
}

fn sum(bytes: usize) -> Shape {
    Shape::AllReduce { len: bytes / 4 }
}

fn gather(bytes: usize, members: usize) -> Shape {
    Shape::AllGather { counts: Counts::Each(bytes / 4 / members), in_place: false }
}

#[test]
fn each_algorithm_is_chosen_for_some_case() {
    let rows = [
        (GPUS, 2, true, sum(KB), "inbox"),
        (GPUS, 2, true, sum(2 * MB), "inbox"),
        (GPUS, 2, true, sum(4 * MB), "fused"),
        (GPUS, 2, true, sum(16 * MB), "fused"),
        (GPUS, 2, true, gather(KB, 2), "ll"),
        (GPUS, 2, true, gather(MB, 2), "eager"),
        (GPUS, 4, true, sum(256 * KB), "inbox"),
        (GPUS, 4, true, sum(512 * KB), "fused"),
        (GPUS, 4, true, sum(8 * MB), "exchange"),
        (GPUS, 4, true, sum(24 * MB), "exchange"),
        (GPUS, 8, true, sum(8 * MB), "slots"),
        (GPUS, 4, true, sum(64 * MB), "ring"),
        (GPUS, 2, true, sum(128 * MB), "exchange_ce"),
        (GPUS, 2, true, gather(256 * MB, 2), "ce"),
        (GPUS, 17, true, sum(KB), "host_reduce"),
        (WITHOUT_PEERS, 2, false, sum(KB), "ll"),
        (WITHOUT_PEERS, 4, false, sum(128 * KB), "ll_two_shot"),
        (WITHOUT_PEERS, 2, false, sum(16 * MB), "shm"),
        (SOFTWARE, 2, true, sum(KB), "fused_events"),
        (SOFTWARE, 2, false, sum(KB), "ring_ce"),
        (SOFTWARE, 2, false, gather(KB, 2), "ce"),
        (Machine { wish: Wish::Staged, ..SOFTWARE }, 2, true, sum(KB), "shm_events"),
    ];
    for (machine, members, direct, shape, name) in &rows {
        assert_eq!(chosen(*machine, *members, *direct, shape), *name, "{machine:?}, {members} members, {shape:?}");
    }
    let named: BTreeSet<_> = rows.iter().map(|row| row.4).collect();
    assert_eq!(named, TABLE.iter().map(|algorithm| algorithm.name()).collect());
}

#[test]
fn what_is_asked_for_comes_first_where_it_can_be_done() {
    let asked = |wish, machine, shape: &Shape| chosen(Machine { wish, ..machine }, 2, true, shape);
    let (small, moved) = (sum(KB), gather(KB, 2));
    assert_eq!(asked(Wish::Ring, GPUS, &small), "ring");
    assert_eq!(asked(Wish::Ring, SOFTWARE, &small), "ring_ce");
    assert_eq!(asked(Wish::Exchange, GPUS, &small), "exchange");
    assert_eq!(asked(Wish::Exchange, SOFTWARE, &small), "exchange_ce");
    assert_eq!(asked(Wish::Copies, GPUS, &small), "exchange_ce");
    assert_eq!(asked(Wish::Copies, GPUS, &moved), "ce");
    assert_eq!(asked(Wish::Host, GPUS, &small), "host_reduce");
    assert_eq!(asked(Wish::Staged, GPUS, &small), "shm_events");
    assert_eq!(asked(Wish::Staged, WITHOUT_PEERS, &small), "shm");
    // What cannot be done so goes as by default.
    assert_eq!(asked(Wish::Ring, GPUS, &moved), "ll");
    assert_eq!(asked(Wish::Exchange, GPUS, &moved), "ll");
    assert_eq!(asked(Wish::Direct, GPUS, &sum(128 * MB)), "fused");
    let in_rank_order = Machine { rank_order: true, ..GPUS };
    assert_eq!(asked(Wish::Ring, in_rank_order, &small), "inbox");
}

/// No limit is divided by the number of the others without regard to a group of one.
#[test]
fn a_group_of_one_has_an_algorithm_for_each_call() {
    for machine in [GPUS, WITHOUT_PEERS, SOFTWARE] {
        for bytes in [0, KB, MB, 256 * MB] {
            let counts = || Counts::Each(bytes / 4);
            let shapes = [
                sum(bytes),
                Shape::Reduce { len: bytes / 4, root: 0 },
                Shape::ReduceScatter { counts: counts(), in_place: false },
                Shape::AllGather { counts: counts(), in_place: false },
                Shape::Broadcast { len: bytes / 4, root: 0 },
            ];
            for (dtype, shape) in DType::ALL.into_iter().flat_map(|dtype| shapes.iter().map(move |s| (dtype, s))) {
                assert!(!chosen_of(dtype, machine, 1, true, shape).is_empty());
            }
        }
    }
}

#[test]
fn only_sums_of_floats_go_into_inboxes() {
    let of = |dtype, wish, shape: &Shape| chosen_of(dtype, Machine { wish, ..GPUS }, 2, true, shape);
    for dtype in DType::ALL {
        let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
        assert_eq!(of(dtype, Wish::Auto, &sum(KB)), if float { "inbox" } else { "ll" }, "{dtype:?}");
        // Whoever asks for it gets it at any size, and nobody who asks for another one.
        let large = Shape::AllReduce { len: (64 * MB) / dtype.size() };
        assert_eq!(of(dtype, Wish::Inbox, &large), if float { "slots" } else { "exchange_ce" }, "{dtype:?}");
        assert_eq!(of(dtype, Wish::Direct, &sum(KB)), "ll");
        assert_eq!(of(dtype, Wish::Exchange, &sum(KB)), "exchange");
    }
    let f32 = |wish, shape: &Shape| of(DType::F32, wish, shape);
    assert_eq!(f32(Wish::Inbox, &gather(KB, 2)), "ll");
    let reduce = |bytes| Shape::Reduce { len: bytes / 4, root: 1 };
    assert_eq!(f32(Wish::Inbox, &reduce(KB)), "inbox");
    assert_eq!(f32(Wish::Inbox, &reduce(4 * MB)), "fused");
    // Parts that differ go by slots. Where there is nothing to wait for, no kernel of theirs runs.
    let scatter = |counts| Shape::ReduceScatter { counts, in_place: false };
    assert_eq!(f32(Wish::Inbox, &scatter(Counts::By([3, 0].into()))), "slots");
    assert_eq!(f32(Wish::Inbox, &scatter(Counts::Each(0))), "fused");
    assert_eq!(f32(Wish::Inbox, &sum(0)), "fused");
    // A small group of a large pool has small rooms.
    let barrier = KernelBarrier::OnDevices { ll: 16 * KB, eager: 64 * KB, inbox: 128 * KB, inbox_slot: 2 * KB };
    assert_eq!(chosen(Machine { barrier, ..GPUS }, 2, true, &sum(256 * KB)), "fused");
    for machine in [SOFTWARE, WITHOUT_PEERS] {
        let direct = machine.software;
        let how = |wish| chosen(Machine { wish, ..machine }, 2, direct, &sum(KB));
        assert_eq!(how(Wish::Inbox), how(Wish::Auto));
    }
}

/// Whether a call is captured, and whether it overlaps with other work.
type When = (bool, bool);
const CALLED: When = (false, false);
const GRAPH: When = (true, false);
const OVERLAPPED: When = (false, true);

/// What carries collectives of so many H200s out, with peer access: the algorithms from 1 KB to 1 GB, each but the last
/// with the largest size that goes so.
#[test]
fn the_choice_by_size_on_h200s() {
    let rows = [
        (2, "all_reduce", DType::F32, CALLED, "inbox 2M fused 48M exchange_ce"),
        (2, "all_reduce", DType::F32, GRAPH, "inbox 2M fused 96M slots"),
        (2, "all_reduce", DType::F32, OVERLAPPED, "inbox 2M fused 6M exchange_ce"),
        (2, "all_reduce", DType::BF16, CALLED, "inbox 2M fused 48M exchange_ce"),
        (2, "all_reduce", DType::I32, CALLED, "ll 256K eager 1M fused 48M exchange_ce"),
        (2, "all_reduce", DType::I32, GRAPH, "ll 256K eager 1M fused"),
        (2, "reduce_scatter", DType::F32, CALLED, "inbox 4M slots 8M fused 384M exchange_ce"),
        (2, "reduce_scatter", DType::I32, CALLED, "ll 512K eager 2M fused 384M exchange_ce"),
        (2, "reduce_scatter", DType::BF16, OVERLAPPED, "inbox 4M slots 8M fused 12M exchange_ce"),
        (2, "all_gather", DType::F32, CALLED, "ll 512K eager 2M fused 96M ce"),
        (2, "all_gather", DType::BF16, OVERLAPPED, "ll 512K eager 2M fused 12M ce"),
        (2, "all_gather", DType::F32, GRAPH, "ll 512K eager 2M fused"),
        (2, "broadcast", DType::F32, CALLED, "ll 256K eager 1M fused 96M ce"),
        (2, "reduce", DType::F32, CALLED, "inbox 2M fused"),
        (2, "all_to_all", DType::F32, CALLED, "ll 512K eager 2M fused 96M ce"),
        (4, "all_reduce", DType::F32, CALLED, "inbox 256K fused 6M exchange 24M ring"),
        (4, "all_reduce", DType::F32, GRAPH, "inbox 256K fused 6M exchange 24M ring"),
        (4, "all_reduce", DType::F32, OVERLAPPED, "inbox 256K fused 6M exchange 24M ring"),
        (4, "all_reduce", DType::BF16, CALLED, "inbox 256K fused 6M exchange"),
        (4, "all_reduce", DType::I32, CALLED, "ll 128K eager 256K fused 6M exchange"),
        (4, "all_reduce", DType::I32, GRAPH, "ll 128K eager 256K fused 6M exchange"),
        (4, "reduce_scatter", DType::F32, CALLED, "inbox 2M slots 8M fused"),
        (4, "reduce_scatter", DType::I32, CALLED, "ll 512K eager 4M fused"),
        (4, "reduce_scatter", DType::BF16, OVERLAPPED, "inbox 2M slots 8M fused"),
        (4, "all_gather", DType::F32, CALLED, "ll 512K eager 4M fused 96M ce"),
        (4, "all_gather", DType::BF16, OVERLAPPED, "ll 512K eager 4M fused 96M ce"),
        (4, "all_gather", DType::F32, GRAPH, "ll 512K eager 4M fused"),
        (4, "broadcast", DType::F32, CALLED, "ll 128K eager 256K fused"),
        (4, "reduce", DType::F32, CALLED, "inbox 256K fused"),
        (4, "all_to_all", DType::F32, CALLED, "ll 512K eager 4M fused 96M ce"),
        (8, "all_reduce", DType::F32, CALLED, "inbox 96K slots 16M exchange 24M ring"),
        (8, "all_reduce", DType::F32, GRAPH, "inbox 96K slots 16M exchange 24M ring"),
        (8, "all_reduce", DType::F32, OVERLAPPED, "inbox 96K slots 16M exchange 24M ring"),
        (8, "all_reduce", DType::BF16, CALLED, "inbox 96K slots 16M exchange"),
        (8, "all_reduce", DType::I32, CALLED, "ll 96K eager 128K fused 12M exchange"),
        (8, "all_reduce", DType::I32, GRAPH, "ll 96K eager 128K fused 12M exchange"),
        (8, "reduce_scatter", DType::F32, CALLED, "inbox 2M slots 16M fused"),
        (8, "reduce_scatter", DType::I32, CALLED, "ll 768K eager 2M fused"),
        (8, "all_gather", DType::F32, CALLED, "ll 768K eager 2M fused"),
        (8, "all_gather", DType::F32, GRAPH, "ll 768K eager 2M fused"),
        (8, "broadcast", DType::F32, CALLED, "ll 96K eager 128K fused"),
        (8, "reduce", DType::F32, CALLED, "inbox 96K eager 128K fused"),
        (8, "all_to_all", DType::F32, CALLED, "ll 768K eager 2M fused"),
    ];
    for (members, kind, dtype, when, expected) in rows {
        let found = by_size(members, kind, dtype, when);
        assert_eq!(found, expected, "{kind} of {members}, {dtype:?}, {when:?}");
    }
}

fn by_size(n: usize, kind: &str, dtype: DType, (captured, overlapped): When) -> String {
    let PadLayout { packets, slot, inbox, inbox_slot, .. } = PadLayout::direct(n);
    let barrier = KernelBarrier::OnDevices { ll: packets * 8, eager: slot, inbox, inbox_slot };
    let limits = Limits::new(132);
    let limits = if overlapped { limits.overlapping() } else { limits };
    // Powers of two, and what is in the middle of two.
    let sizes = (10..=30).flat_map(|log| [1 << log, 3 << (log - 1)]);
    let of = |bytes: usize| {
        let len = bytes / dtype.size();
        let each = Counts::Each(len / n);
        let shape = match kind {
            "all_reduce" => Shape::AllReduce { len },
            "reduce_scatter" => Shape::ReduceScatter { counts: each, in_place: false },
            "all_gather" => Shape::AllGather { counts: each, in_place: false },
            "broadcast" => Shape::Broadcast { len, root: 0 },
            "reduce" => Shape::Reduce { len, root: 0 },
            "all_to_all" => Shape::AllToAll { send: vec![each.clone(); n], receive: vec![each; n] },
            _ => unreachable!("a kind of the table"),
        };
        let machine = Machine { barrier, ..GPUS };
        let case = Case::new((machine, &limits), (n, true), (dtype, ReduceOp::Sum), Some(&shape), captured);
        choose(&case).0.name()
    };
    let mut text = String::new();
    let mut last = None;
    for (bytes, name) in sizes.map(|bytes| (bytes, of(bytes))) {
        if let Some((before, earlier)) = last.filter(|&(_, earlier)| earlier != name) {
            let size = if before % MB == 0 { format!("{}M", before / MB) } else { format!("{}K", before / KB) };
            text += &format!("{earlier} {size} ");
        }
        last = Some((bytes, name));
    }
    text + last.expect("there are sizes").1
}
