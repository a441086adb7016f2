use super::super::super::super::texts;
use super::*;
use proptest::prelude::*;

#[test]
fn texts_that_are_understood() {
    let plan: FaultPlan =
        "seed=7; 1:alloc:3:oom ;*:launch:p0.01:error; 2>0:copy-peer:4+:slow=1ms+10us/MB;0>1:any:*:drop;"
            .parse()
            .unwrap();
    let slow = Injected::Slow { per_copy: Duration::from_millis(1), per_megabyte: Duration::from_micros(10) };
    let rules = [
        FaultRule::new(Injected::OutOfMemory).device(1).op(FaultOp::Alloc).nth(3),
        FaultRule::new(Injected::Error).op(FaultOp::Launch).chance(0.01),
        FaultRule::new(slow).device(2).peer(0).op(FaultOp::CopyPeer).from(4),
        FaultRule::new(Injected::Drop).device(0).peer(1),
    ];
    assert_eq!((plan.seed, &plan.rules[..]), (7, &rules[..]));
    assert_eq!("".parse::<FaultPlan>().unwrap().to_string(), "");
    let text =
        "seed=7; 1:alloc:3:oom; *:launch:p0.01:error; 2>0:copy-peer:4+:slow=1000000ns+10000ns/MB; 0>1:any:*:drop";
    assert_eq!(plan.to_string(), text);
}

#[test]
fn texts_that_are_not() {
    for (text, part) in [
        ("1:alloc:3", "1:alloc:3"),
        ("x:alloc:3:oom", "x"),
        ("1:alloca:3:oom", "alloca"),
        ("1:alloc:0:oom", "0"),
        ("1:alloc:p1.5:oom", "p1.5"),
        ("1:alloc:pNaN:oom", "pNaN"),
        ("1:alloc:3:ooms", "ooms"),
        ("1:copy-up:*:slow=3", "3"),
        ("1:copy-up:*:slow=20000000000s", "20000000000s"),
        ("1:launch:*:slow=3ms", "1:launch:*:slow=3ms"),
        ("0>1:alloc:*:drop", "0>1:alloc:*:drop"),
        ("0>1:copy-up:*:corrupt", "0>1:copy-up:*:corrupt"),
        ("0:event-query:*:stuck", "0:event-query:*:stuck"),
        ("seed=x", "seed=x"),
        ("1:alloc:3:oom, 2:alloc:3:oom", "1:alloc:3:oom, 2:alloc:3:oom"),
    ] {
        let error = text.parse::<FaultPlan>().unwrap_err();
        assert!(error.to_string().starts_with(&format!("`{part}` is no part")), "{text}: {error}");
    }
}

#[test]
fn what_there_is_instead() {
    let said = |text: &str| text.parse::<FaultPlan>().unwrap_err().to_string();
    let faults = "oom, error, launch-failed, lost, stuck, drop, corrupt, slow=1ms+10us/MB";
    assert_eq!(said("1:alloc:3:ooms"), format!("`ooms` is no part of a fault plan: expected a fault: {faults}"));
    let unknown = said("1:alloca:3:oom");
    assert!(FaultOp::ALL.iter().all(|op| unknown.contains(op.name())), "{unknown}");
    assert_eq!(
        said("0>1:fill:*:drop"),
        "`0>1:fill:*:drop` is no part of a fault plan: fill never meets drop, only these do: vm-map, copy-peer, \
         copy-to-peer, copy-from-peer, launch"
    );
}

static PLANS: &[&str] = &[
    "seed=7; 1:alloc:3:oom ;*:launch:p0.01:error;",
    "2>0:copy-peer:4+:slow=1ms+10us/MB;0>1:any:*:drop",
    "*>*:any:18446744073709551615+:stuck; 0:copy-up:*:slow=18446744073709551615ns+3s/MB",
];

fn rule() -> impl Strategy<Value = FaultRule> {
    let when = prop_oneof![
        Just(When::Always),
        (1u64..).prop_map(When::Nth),
        (1u64..).prop_map(When::From),
        (0.0f64..=1.0).prop_map(When::Chance),
    ];
    let slow = (0u64.., 0u64..)
        .prop_map(|(a, b)| Injected::Slow { per_copy: Duration::from_nanos(a), per_megabyte: Duration::from_nanos(b) });
    let fault = prop_oneof![(0..PLAIN.len()).prop_map(|i| PLAIN[i].0), slow];
    let op = proptest::option::of((0..FaultOp::ALL.len()).prop_map(|i| FaultOp::ALL[i]));
    let device = || proptest::option::of(0usize..100);
    (device(), device(), op, when, fault).prop_map(|(device, peer, op, when, fault)| FaultRule {
        device,
        peer,
        op: op.filter(|&op| fault.fits(op)),
        when,
        fault,
    })
}

proptest! {
    #![proptest_config(texts::cases(256))]

    #[test]
    fn any_text_is_a_plan_or_none(text in texts::like(PLANS)) {
        if let Ok(plan) = text.parse::<FaultPlan>() {
            let again: FaultPlan = plan.to_string().parse().unwrap();
            prop_assert_eq!((again.seed, again.rules), (plan.seed, plan.rules));
        }
    }

    #[test]
    fn what_is_written_is_read_as_the_same(seed: u64, rules in proptest::collection::vec(rule(), 0..5)) {
        let plan = rules.iter().fold(FaultPlan::new().seed(seed), |plan, rule| plan.on(*rule));
        let again: FaultPlan = plan.to_string().parse().unwrap();
        prop_assert_eq!((again.seed, &again.rules[..]), (seed, &rules[..]));
    }
}
