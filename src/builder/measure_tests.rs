use super::*;
use crate::lab::prelude::*;
use crate::lab::{FaultOp, FaultPlan, FaultRule, Injected, check::Check};
use crate::{Algorithm, DType, GpuPool, ReduceOp, ReduceOrder};
use proptest::prelude::*;
use std::convert::Infallible;

proptest! {
    /// On a clock of its own: one side costs a fixed time and a steep slope, the other more at first.
    #[test]
    fn bisection_finds_where_two_lines_cross(first in 0u32..20, len in 0u32..20, crosses in 0u32..50) {
        let (mut asked, last) = (0, first + len);
        let found = crossing(first..=last, |step| {
            asked += 1;
            let (ll, spin) = (f64::from(step) * 2.0, f64::from(step) + f64::from(crosses));
            Ok::<_, Infallible>(Some(ll <= spin))
        });
        let expected = if crosses < first { Crossing::Never } else { Crossing::UpTo(crosses.min(last)) };
        prop_assert_eq!(found.unwrap(), expected);
        prop_assert!(asked <= (len + 1).ilog2() + 1);
    }

    /// Whatever a clock says, and whenever the time is up: an answer among the steps, or none.
    #[test]
    fn bisection_of_nonsense_ends(wins in prop::collection::vec(any::<bool>(), 21), time in 0usize..10) {
        let mut left = time;
        let found = crossing(0..=20, |step| {
            if left == 0 {
                return Ok::<_, Infallible>(None);
            }
            left -= 1;
            Ok(Some(wins[step as usize]))
        });
        match found.unwrap() {
            Crossing::UpTo(step) => prop_assert!(step <= 20 && wins[step as usize]),
            Crossing::Never => prop_assert!(!wins[0]),
            Crossing::Unknown => prop_assert!(time < 5),
        }
    }

    /// What was measured of all is kept by some, as far as a device sends no more than was found good.
    #[test]
    fn groups_send_as_much_in_all_as_the_pool(devices in 2usize..16, members in 2usize..16, log in 0u32..20) {
        let members = members.min(devices);
        let measured = Measured { ll: Some(1 << log), large_blocks: Some(32), barriers: log % 2 == 0 };
        let limits = measured.limits(devices, members);
        prop_assert!(limits.ll * (members - 1) <= (devices - 1) << log);
        prop_assert_eq!(measured.limits(devices, devices).ll, 1 << log);
        let default = Limits::default_of(members);
        prop_assert_eq!(limits.eager, if log % 2 == 0 { 0 } else { default.eager });
        prop_assert_eq!(limits.large_blocks, if (members > 2) == (devices > 2) { 32 } else { default.large_blocks });
        // It is a question of bits, and not of time.
        prop_assert_eq!(limits.ring, default.ring);
    }
}

#[test]
fn an_error_ends_the_bisection() {
    let mut asked = 0;
    let found = crossing(0..=20, |_| {
        asked += 1;
        Err("lost")
    });
    assert_eq!((found, asked), (Err("lost"), 1));
}

#[test]
fn nothing_measured_is_the_default() {
    for members in 1..=8 {
        assert_eq!(Measured::default().limits(8, members), Limits::default_of(members));
    }
}

#[test]
fn the_first_of_equals_is_the_best() {
    assert_eq!(best([(16, 10.0), (64, 9.9), (32, 9.0), (8, 9.1)].into_iter()), (32, 9.0));
    assert_eq!(best([(16, 10.0), (64, 9.8)].into_iter()).0, 16, "a tie");
    assert_eq!(best([(16, f64::NAN), (64, 9.8)].into_iter()).0, 16, "nonsense");
}

/// What software GPUs do must not depend on time, whatever is asked for.
#[test]
fn software_gpus_are_not_measured() {
    for tune in [Tune::Auto, Tune::Off, Tune::Table, Tune::Measure] {
        let pool = GpuPool::builder().host(3).tune(tune).build().unwrap();
        let how = pool.explain(DType::F32, ReduceOp::Sum, 1 << 20);
        assert!(how.limits.starts_with("default: pushed up to 128 KB"), "{how:?}");
        assert!(pool.report().to_string().contains("collectives: default"), "{}", pool.report());
    }
}

#[test]
fn tunes_by_name() {
    let all = [("auto", Tune::Auto), ("off", Tune::Off), ("table", Tune::Table), ("measure", Tune::Measure)];
    for (name, tune) in all {
        assert_eq!(name.parse(), Ok(tune));
    }
    assert!("fast".parse::<Tune>().is_err());
}

/// The same steps on software GPUs, where events order what spins on others: every device finds the same, and nothing
/// is left.
#[test]
fn all_devices_find_the_same_and_leave_nothing_behind() {
    let pool = GpuPool::builder().host(3).build().unwrap();
    let found = measure(&pool, Duration::from_secs(60), 100_000).unwrap();
    assert!(found[0].large_blocks.is_some() && found == vec![found[0]; 3], "{found:?}");
    assert_eq!(found[0].ll, None, "software GPUs push nothing");
    // What would take longer is not begun.
    assert_eq!(measure(&pool, Duration::ZERO, 100_000).unwrap(), [Measured::default(); 3]);
    assert!(
        pool.memory_stats().iter().all(|stats| stats.in_use == 0 && stats.reserved == 0),
        "{:?}",
        pool.memory_stats()
    );
    // But for what was reserved.
    let pool = GpuPool::builder().host(2).memory_reserve(4 << 20).build().unwrap();
    measure(&pool, Duration::from_secs(60), 1000).unwrap();
    assert!(pool.memory_stats().iter().all(|stats| stats.reserved >= 4 << 20), "{:?}", pool.memory_stats());
}

/// Measuring that fails is an error here and defaults there, and the pool is as it was.
#[test]
fn a_failure_while_measuring_harms_nobody() {
    for (op, n) in [(FaultOp::Launch, 1), (FaultOp::Launch, 9), (FaultOp::Record, 3), (FaultOp::CopyUp, 1)] {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).device(1).op(op).nth(n)).paused();
        let pool = GpuPool::builder().host(3).check(Check::Off).faults(plan.clone()).build().unwrap();
        plan.resume();
        let failed = measure(&pool, Duration::from_secs(60), 100_000);
        plan.pause();
        assert_eq!((failed.is_err(), plan.fired().len()), (true, 1), "{op:?}: {failed:?}");
        let sums = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; 99])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        });
        assert_eq!(sums.unwrap(), [[3.0; 99]; 3]);
    }
}

#[test]
fn survivors_keep_how_collectives_are_carried_out() {
    let builder =
        GpuPool::builder().host(3).algorithm(Algorithm::Copies).reduce_order(ReduceOrder::Rank).tune(Tune::Off);
    let pool = builder.build().unwrap().survivors().unwrap();
    assert_eq!(pool.explain(DType::F32, ReduceOp::Sum, 1 << 20).algorithm, Algorithm::Copies);
    assert_eq!((pool.shared.reduce_order, pool.shared.tune), (ReduceOrder::Rank, Tune::Off));
}
