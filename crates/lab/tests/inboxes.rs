//! The host kernels of inboxes under the race checker, in many orders: right, and with bugs that it must find.

use gpu_pool::error::Kind;
use gpu_pool::extend::lab::DeviceInternals;
use gpu_pool::{
    Builder, DType, Device, Element, Error, GpuPool, ReduceOp, Result, collective::Algorithm, host::Schedule,
};
use gpu_pool_lab::{Check, FailPoint, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use half::{bf16, f16};
use proptest::prelude::*;
use std::{collections::HashMap, sync::Mutex};

fn builder(n: usize) -> Builder {
    GpuPool::builder().host(n).algorithm(Algorithm::Inbox)
}

fn watched(n: usize, seed: u64) -> GpuPool {
    weakened(n, seed, FaultPlan::new())
}

fn weakened(n: usize, seed: u64, plan: FaultPlan) -> GpuPool {
    builder(n).check(Check::Races).schedule(Schedule::Seeded(seed)).faults(plan).build().unwrap()
}

/// Elements of f32 for one trip, for a piece of each block and more, and for slots that come in turn.
fn lengths(n: usize) -> [usize; 4] {
    let room = 1024 / (n - 1) / 64 * 64;
    [3, room, room + 1, 2500]
}

/// Sums in turn of all sizes and kinds, with nothing waited for. Whether all of them are right.
fn sums(dev: &Device, lengths: &[usize], rounds: usize) -> Result<bool> {
    let n = dev.count();
    let mut found = Vec::new();
    for k in 0..rounds {
        let len = lengths[k % lengths.len()];
        let own: Vec<f32> = (0..len * n).map(|i| (((i % len) + k) % 97 * (dev.rank() + 1)) as f32).collect();
        let (all, mut part) = (dev.upload(&own)?, dev.zeros::<f32>(len)?);
        let mut x = dev.upload(&own[..len])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.reduce_scatter(&all, &mut part, ReduceOp::Sum)?;
        dev.all_reduce(&mut part, ReduceOp::Max)?;
        dev.reduce(&mut part, ReduceOp::Avg, k % n)?;
        found.push((k, x, part));
    }
    let mut right = true;
    for (k, x, part) in found {
        for x in [dev.download(&x)?, dev.download(&part)?] {
            right &= x.iter().enumerate().all(|(i, x)| *x == ((i + k) % 97 * n * (n + 1) / 2) as f32);
        }
    }
    Ok(right)
}

#[test]
fn no_order_of_steps_is_a_race_or_changes_a_sum() {
    for (n, seeds) in [(2, 6), (3, 3), (5, 1)] {
        for seed in 0..seeds {
            let pool = watched(n, seed);
            let how = |bytes| pool.explain(DType::F32, ReduceOp::Sum, bytes);
            assert_eq!(
                [4, 1 << 20].map(|bytes| (how(bytes).algorithm, how(bytes).meets)),
                [(Algorithm::Inbox, "data"); 2]
            );
            let right = pool.run(|dev, _| sums(dev, &lengths(n), 4)).unwrap();
            assert!(right.iter().all(|right| *right), "{n} members, seed {seed}");
            pool.close().unwrap();
        }
    }
}

/// As threads interleave, with blocks that wait at any time.
#[test]
fn threads_under_the_checker_are_right_too() {
    let pool = builder(4).check(Check::Memory).build().unwrap();
    assert!(pool.run(|dev, _| sums(dev, &lengths(4), 8)).unwrap().iter().all(|right| *right));
    let groups = pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f64; 300])?;
        for round in 0..8 {
            if dev.rank() > 0 {
                dev.group(&[3, 1, 2])?.all_reduce(&mut x, ReduceOp::Avg)?;
            }
            if round % 3 == 0 {
                dev.all_reduce(&mut x.slice_mut(..round + 1), ReduceOp::Max)?;
            }
        }
        Ok(dev.download(&x)? == [1.0; 300])
    });
    assert_eq!(groups.unwrap(), [true; 4]);
    let in_graphs = pool.run(|dev, _| {
        let (mut few, mut many) = (dev.upload(&[1.0f32; 5])?, dev.upload(&[bf16::ONE; 3000])?);
        let (graph, ()) = dev.capture(|dev| {
            dev.all_reduce(&mut few, ReduceOp::Avg)?;
            dev.all_reduce(&mut many, ReduceOp::Max)
        })?;
        for _ in 0..3 {
            dev.launch_graph(&graph)?;
            dev.all_reduce(&mut few, ReduceOp::Avg)?;
        }
        Ok(dev.download(&few)? == [1.0; 5] && dev.download(&many)? == [bf16::ONE; 3000])
    });
    assert_eq!(in_graphs.unwrap(), [true; 4]);
    pool.close().unwrap();
}

/// How a pool with a bug fares: whether the checker reports a race, or a sum is wrong.
fn is_caught(bug: FailPoint, n: usize, seed: u64, lengths: &[usize]) -> (bool, bool) {
    let pool = weakened(n, seed, FaultPlan::new().at(bug));
    match pool.run(|dev, _| sums(dev, lengths, 4)) {
        Err(Error::Misuse { report, .. }) => {
            assert_eq!((report.kind, report.now.op.is_empty()), (Kind::Race, false), "{report}");
            (true, false)
        }
        Err(error) => panic!("{bug:?}: {error}"),
        Ok(right) => (false, right.contains(&false)),
    }
}

#[test]
fn weakened_kernels_are_reported_as_races() {
    for (bug, n, of) in [
        (FailPoint::DatumTakenEarly, 2, 0..1),
        (FailPoint::DatumTakenEarly, 3, 3..4),
        (FailPoint::SlotWithoutCredit, 2, 3..4),
        (FailPoint::SlotWithoutCredit, 3, 3..4),
        (FailPoint::OneRoom, 2, 0..1),
        (FailPoint::OneRoom, 3, 0..2),
        (FailPoint::SlotsLeftFull, 2, 3..4),
        (FailPoint::SlotsLeftFull, 3, 3..4),
        (FailPoint::DatumKept, 2, 0..1),
        (FailPoint::DatumKept, 3, 3..4),
    ] {
        for seed in 0..3 {
            let (reported, wrong) = is_caught(bug, n, seed, &lengths(n)[of.clone()]);
            assert!(reported, "{bug:?}, {n} members, seed {seed}: not reported; wrong: {wrong}");
        }
    }
}

/// Both halves are NaNs, and a larger one takes the place of the second: what is left of the word is not reserved.
#[test]
fn a_sender_that_keeps_its_own_nan_has_other_bits() {
    let bits = |pool: GpuPool| {
        let found = pool.run(|dev, _| {
            let own = [[0xffff, 0xffff], [0x3c00, 0x7e01]][dev.rank()];
            let mut x = dev.upload(&own.map(f16::from_bits))?;
            dev.all_reduce(&mut x, ReduceOp::Max)?;
            Ok(dev.download(&x)?[0].to_bits())
        });
        found.unwrap()
    };
    assert_eq!(bits(builder(2).build().unwrap()), [0x7fff; 2]);
    assert_eq!(bits(builder(2).faults(FaultPlan::new().at(FailPoint::OwnNanKept)).build().unwrap()), [0xffff, 0x7fff]);
}

/// One launch fails when all have agreed: the others have sent already, to it and to each other.
#[test]
fn what_a_failed_call_leaves_is_removed_or_found() {
    for len in [lengths(3)[0], lengths(3)[3]] {
        for kept in [false, true] {
            let rule = FaultRule::new(Injected::Error).device(1).op(FaultOp::Launch).nth(1);
            let plan = FaultPlan::new().on(rule).paused();
            let plan = if kept { plan.at(FailPoint::InboxKept) } else { plan };
            let pool = weakened(3, 5, plan.clone());
            let failed = pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; len])?;
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.barrier()?;
                if dev.rank() == 1 {
                    plan.resume();
                }
                let called = dev.all_reduce(&mut x, ReduceOp::Sum);
                if dev.rank() == 1 {
                    plan.pause();
                }
                called.and_then(|()| dev.synchronize())
            });
            assert!(matches!(failed, Err(Error::Driver { device: 1, .. })), "{failed:?}");
            let after = pool.run(|dev, _| sums(dev, &lengths(3), 4));
            match after {
                Err(Error::Misuse { report, .. }) => assert!(kept && report.kind == Kind::Race, "{report}"),
                Err(error) => panic!("{len} elements, kept: {kept}: {error}"),
                Ok(right) => assert_eq!(right.contains(&false), kept, "{len} elements"),
            }
        }
    }
}

/// A kernel's peer does not come: it gives up at its deadline, and names it. When the peer is let go, its kernel comes
/// late: while others empty their inboxes, or when they work already.
#[test]
fn a_kernel_gives_up_at_its_deadline() {
    let [few, .., many] = lengths(2);
    for (len, alone) in [(few, false), (few, true), (many, false), (many, true)] {
        let plan: FaultPlan = "1:fill:1:stuck".parse().unwrap();
        let plan = plan.paused();
        let timeout = std::time::Duration::from_millis(300);
        let built = builder(2).check(Check::Races).timeout(timeout).faults(plan.clone()).build();
        let pool = built.unwrap();
        plan.resume();
        let failed = pool.run(|dev, _| {
            let mut x = dev.upload(&vec![1.0f32; len])?;
            if dev.rank() == 1 {
                dev.fill(&mut x, 2.0)?;
            }
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            // So that the kernel's deadline is over before those of the host's waits.
            std::thread::sleep(timeout / 2);
            dev.synchronize()
        });
        assert!(
            matches!(&failed, Err(Error::Timeout { device: 0, missing, .. }) if *missing == [1]),
            "{len} elements: {failed:?}"
        );
        plan.pause();
        let works_alone = || pool.on(&[0]).run(|dev, _| dev.download(&dev.upload(&[1.0f32; 9])?)).unwrap();
        if alone {
            works_alone();
        }
        plan.release();
        if alone {
            works_alone();
        }
        for round in 0..3 {
            let right = pool.run(|dev, _| sums(dev, &lengths(2), 4)).unwrap();
            assert_eq!(right, [true; 2], "{len} elements, alone: {alone}, round {round}");
        }
        pool.close().unwrap();
    }
}

/// All members empty inboxes at the begin of a scope, one after the other, also where operations run one at a time.
#[test]
fn all_members_may_be_late_at_once() {
    for seed in 0..3 {
        let pool = watched(3, seed);
        for _ in 0..3 {
            pool.run(|dev, _| {
                dev.spoil();
                Ok(())
            })
            .unwrap();
            let right = pool.run(|dev, _| Ok((dev.is_spoiled(), sums(dev, &lengths(3), 2)?)));
            assert_eq!(right.unwrap(), [(false, true); 3], "seed {seed}");
        }
        pool.close().unwrap();
    }
}

/// Floats as bits.
trait Bits: Element {
    fn of(bits: u64) -> Self;
    fn bits(self) -> Option<u64>;
}
macro_rules! bits {
    ($($T:ty, $U:ty;)+) => {$(
        impl Bits for $T {
            fn of(bits: u64) -> Self { <$T>::from_bits(bits as $U) }
            // Which NaN it is, is not promised.
            fn bits(self) -> Option<u64> { (!self.is_nan()).then(|| self.to_bits().into()) }
        }
    )+};
}
bits! { f32, u32; f64, u64; f16, u16; bf16, u16; }

/// Pools by the number of devices: by inboxes, and by another way.
static POOLS: Mutex<Option<HashMap<usize, [GpuPool; 2]>>> = Mutex::new(None);

fn same<T: Bits + std::fmt::Debug>(n: usize, own: &[Vec<u64>], op: ReduceOp, kind: usize) {
    let mut pools = POOLS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let pools = pools.get_or_insert_default().entry(n).or_insert_with(|| {
        [builder(n).build().unwrap(), GpuPool::builder().host(n).algorithm(Algorithm::Direct).build().unwrap()]
    });
    let [by_data, by_events] = pools.each_ref().map(|pool| {
        let found = pool.run(|dev, _| {
            let own: Vec<T> = own[dev.rank()].iter().map(|&bits| T::of(bits)).collect();
            let mut x = dev.upload(&own)?;
            match kind {
                0 => dev.all_reduce(&mut x, op)?,
                1 => dev.reduce(&mut x, op, n - 1)?,
                _ => {
                    let mut part = dev.zeros::<T>(own.len() / n)?;
                    dev.reduce_scatter(&x.slice(..own.len() / n * n), &mut part, op)?;
                    return dev.download(&part);
                }
            }
            dev.download(&x)
        });
        found.unwrap()
    });
    for (rank, (x, y)) in by_data.iter().zip(&by_events).enumerate() {
        if kind != 1 || rank == n - 1 {
            let bits = |x: &[T]| x.iter().map(|x| x.bits()).collect::<Vec<_>>();
            assert!(bits(x) == bits(y), "{n} members, rank {rank}, {op}, kind {kind}");
        }
    }
}

/// What an inbox could mistake, and anything else.
fn word() -> impl Strategy<Value = u64> {
    let one_less = 0x3fef_ffff_ffff_ffff;
    prop_oneof![
        any::<u64>(),
        prop::sample::select(vec![u64::MAX, u64::MAX << 32, u64::MAX >> 32, 1 << 63, 0x8000_8000, one_less, 0]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn bits_are_those_of_the_other_algorithms(
        n in 2usize..6,
        words in prop::collection::vec(word(), 1..600),
        repeat in 1usize..6,
        op in prop::sample::select(vec![
            ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Scaled(0.3),
        ]),
        (kind, dtype) in (0usize..3, 0..4),
    ) {
        let own: Vec<Vec<u64>> = (0..n)
            .map(|rank| (0..words.len() * repeat).map(|i| words[(i * (rank + 1) + rank) % words.len()]).collect())
            .collect();
        match dtype {
            0 => same::<f32>(n, &own, op, kind),
            1 => same::<f64>(n, &own, op, kind),
            2 => same::<f16>(n, &own, op, kind),
            _ => same::<bf16>(n, &own, op, kind),
        }
    }
}
