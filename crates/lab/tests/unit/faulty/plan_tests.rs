use super::*;

fn times(rule: FaultRule, calls: u64) -> Vec<u64> {
    let plan = FaultPlan::new().seed(5).on(rule);
    (1..=calls).filter(|_| !plan.decide(0, FaultOp::Alloc, &[]).is_empty()).for_each(drop);
    plan.fired().iter().map(|fired| fired.count).collect()
}

#[test]
fn when() {
    let rule = FaultRule::new(Injected::OutOfMemory);
    assert_eq!(times(rule, 3), [1, 2, 3]);
    assert_eq!(times(rule.nth(2), 5), [2]);
    assert_eq!(times(rule.from(4), 5), [4, 5]);
    assert_eq!(times(rule.chance(0.0), 50), [0u64; 0]);
    assert_eq!(times(rule.chance(1.0), 3), [1, 2, 3]);
    let some = times(rule.chance(0.1), 10_000);
    assert!((800..1200).contains(&some.len()), "{}", some.len());
    assert_eq!(some, times(rule.chance(0.1), 10_000));
}

#[test]
fn counts_are_by_rule_and_device() {
    let plan = FaultPlan::new()
        .on(FaultRule::new(Injected::Error).nth(2))
        .on(FaultRule::new(Injected::OutOfMemory).device(1).op(FaultOp::Alloc).nth(1));
    let met = |device, op| plan.decide(device, op, &[]).iter().map(|(fault, _)| *fault).collect::<Vec<_>>();
    assert_eq!(met(0, FaultOp::Alloc), []);
    assert_eq!(met(1, FaultOp::Launch), []);
    assert_eq!(met(1, FaultOp::Alloc), [Injected::Error, Injected::OutOfMemory]);
    assert_eq!(met(0, FaultOp::Record), [Injected::Error]);
    assert_eq!(met(0, FaultOp::Record), []);
    plan.pause();
    assert_eq!(met(1, FaultOp::Alloc), []);
    plan.resume();
    assert_eq!(met(1, FaultOp::Alloc), [Injected::OutOfMemory]);
    assert_eq!(plan.clone().fired().len(), 4);
}

#[test]
fn a_fault_meets_only_what_it_fits() {
    let slow = FaultRule::new(Injected::Slow { per_copy: Duration::ZERO, per_megabyte: Duration::ZERO });
    assert!(slow.concerns(0, FaultOp::CopyUp, &[]) && !slow.concerns(0, FaultOp::Launch, &[1]));
    let stuck = FaultRule::new(Injected::Stuck);
    assert!(stuck.concerns(0, FaultOp::Record, &[]) && !stuck.concerns(0, FaultOp::EventQuery, &[]));
    let lie = FaultRule::new(Injected::Drop).device(0).peer(2);
    assert!(lie.concerns(0, FaultOp::Launch, &[1, 2]) && lie.concerns(0, FaultOp::CopyFromPeer, &[2]));
    assert!(!lie.concerns(0, FaultOp::Launch, &[1]) && !lie.concerns(2, FaultOp::CopyToPeer, &[0]));
    assert!(lie.op(FaultOp::CopyPeer).concerns(0, FaultOp::CopyToPeer, &[2]));
    assert!(!lie.op(FaultOp::CopyToPeer).concerns(0, FaultOp::CopyFromPeer, &[2]));
}
