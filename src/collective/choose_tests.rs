//! Each algorithm is the right one for some case, and what is asked for comes first.

use super::*;
use crate::{
    collective::case::{KernelBarrier, Machine},
    fabric::{
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
/// Software GPUs that are asked for inboxes.
const INBOXES: Machine =
    Machine { barrier: KernelBarrier::OnSoftware { inbox: 4 * KB, inbox_slot: 512 }, wish: Wish::Inbox, ..SOFTWARE };

fn chosen(machine: Machine, members: usize, direct: bool, shape: &Shape) -> &'static str {
    chosen_of(DType::F32, machine, members, direct, shape)
}

fn chosen_of(dtype: DType, machine: Machine, members: usize, direct: bool, shape: &Shape) -> &'static str {
    let limits = Limits::default_of(members);
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
        (GPUS, 2, true, sum(4 * MB), "slots"),
        (GPUS, 2, true, sum(16 * MB), "fused"),
        (GPUS, 2, true, gather(KB, 2), "ll"),
        (GPUS, 2, true, gather(MB, 2), "eager"),
        (GPUS, 4, true, sum(256 * KB), "inbox"),
        (GPUS, 4, true, sum(512 * KB), "slots"),
        (GPUS, 4, true, sum(8 * MB), "slots"),
        (GPUS, 4, true, sum(24 * MB), "exchange"),
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
        (INBOXES, 2, true, sum(KB), "inbox"),
        (INBOXES, 4, true, sum(MB), "slots"),
        (INBOXES, 2, true, gather(KB, 2), "fused_events"),
        (INBOXES, 17, true, sum(KB), "fused_events"),
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
    assert_eq!(chosen(Machine { barrier, ..GPUS }, 2, true, &sum(256 * KB)), "slots");
    for machine in [SOFTWARE, WITHOUT_PEERS] {
        let direct = machine.software;
        let how = |wish| chosen(Machine { wish, ..machine }, 2, direct, &sum(KB));
        assert_eq!(how(Wish::Inbox), how(Wish::Auto));
    }
}
