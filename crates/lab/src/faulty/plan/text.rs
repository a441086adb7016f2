//! Fault plans as text: parser and `Display`. Invariant: the written text is read as an equal plan.

use super::{FaultOp, FaultPlan, FaultRule, Fired, Injected, When};
use std::{fmt, str::FromStr, time::Duration};

/// The error of a text that is no [`FaultPlan`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{part}` is no part of a fault plan: {why}")]
pub struct BadFaultPlan {
    part: String,
    why: String,
}

const RULE: &str = "expected device[>peer]:operation:when:fault, like 1:alloc:3:oom";
const DEVICE: &str = "expected a device's ordinal, or *";
const WHEN: &str = "expected 3 (the third time), 3+ (from then on), * (always) or p0.01 (a probability)";
const TIME: &str = "expected a time like 500ns, 10us, 3ms or 2s";
const SEED: &str = "expected seed=7";

fn bad(part: &str, why: impl Into<String>) -> BadFaultPlan {
    BadFaultPlan { part: part.to_owned(), why: why.into() }
}

fn bad_operation(part: &str) -> BadFaultPlan {
    bad(part, format!("expected an operation: any, {}", names(|_| true)))
}

fn bad_fault(part: &str) -> BadFaultPlan {
    let plain: Vec<&str> = PLAIN.iter().map(|(_, name)| *name).collect();
    bad(part, format!("expected a fault: {}, slow=1ms+10us/MB", plain.join(", ")))
}

/// The names of the operations that satisfy `of`.
fn names(of: impl Fn(FaultOp) -> bool) -> String {
    FaultOp::ALL.iter().filter(|op| of(**op)).map(|op| op.name()).collect::<Vec<_>>().join(", ")
}

impl FromStr for FaultPlan {
    type Err = BadFaultPlan;

    fn from_str(text: &str) -> Result<Self, BadFaultPlan> {
        let mut plan = FaultPlan::new();
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            plan = match part.strip_prefix("seed=") {
                Some(seed) => plan.seed(seed.parse().map_err(|_| bad(part, SEED))?),
                None => plan.on(part.parse()?),
            };
        }
        Ok(plan)
    }
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seed = (self.seed != 0).then(|| format!("seed={}", self.seed));
        let parts = seed.into_iter().chain(self.rules.iter().map(ToString::to_string));
        f.write_str(&parts.collect::<Vec<_>>().join("; "))
    }
}

impl FromStr for FaultRule {
    type Err = BadFaultPlan;

    fn from_str(text: &str) -> Result<Self, BadFaultPlan> {
        let parts: Vec<&str> = text.split(':').map(str::trim).collect();
        let &[devices, op, when, fault] = &parts[..] else { return Err(bad(text, RULE)) };
        let (device, peer) = devices.split_once('>').map_or((devices, "*"), |(from, to)| (from.trim(), to.trim()));
        let ordinal = |text: &str| match text {
            "*" => Ok(None),
            text => text.parse().map(Some).map_err(|_| bad(devices, DEVICE)),
        };
        let op = match op {
            "any" | "*" => None,
            name => Some(FaultOp::ALL.iter().copied().find(|op| op.name() == name).ok_or_else(|| bad_operation(op))?),
        };
        let (device, peer, when, injected) =
            (ordinal(device)?, ordinal(peer)?, when.parse()?, fault.parse::<Injected>()?);
        if let Some(op) = op
            && !injected.fits(op)
        {
            let (op, those) = (op.name(), names(|op| injected.fits(op)));
            return Err(bad(text, format!("{op} never meets {fault}, only these do: {those}")));
        }
        Ok(FaultRule { device, peer, op, when, fault: injected })
    }
}

impl fmt::Display for FaultRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ordinal = |device: Option<usize>| device.map_or_else(|| "*".to_owned(), |device| device.to_string());
        f.write_str(&ordinal(self.device))?;
        if self.peer.is_some() {
            write!(f, ">{}", ordinal(self.peer))?;
        }
        write!(f, ":{}:{}:{}", self.op.map_or("any", FaultOp::name), self.when, self.fault)
    }
}

impl FromStr for When {
    type Err = BadFaultPlan;

    fn from_str(text: &str) -> Result<Self, BadFaultPlan> {
        let number = |text: &str| text.parse().ok().filter(|&n: &u64| n > 0);
        let when = match text {
            "*" => Some(When::Always),
            _ if text.starts_with('p') => text[1..].parse().ok().filter(|p| (0.0..=1.0).contains(p)).map(When::Chance),
            _ => match text.strip_suffix('+') {
                Some(text) => number(text).map(When::From),
                None => number(text).map(When::Nth),
            },
        };
        when.ok_or_else(|| bad(text, WHEN))
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            When::Always => f.write_str("*"),
            When::Nth(n) => write!(f, "{n}"),
            When::From(n) => write!(f, "{n}+"),
            When::Chance(p) => write!(f, "p{p}"),
        }
    }
}

impl FromStr for Injected {
    type Err = BadFaultPlan;

    fn from_str(text: &str) -> Result<Self, BadFaultPlan> {
        if let Some(slow) = text.strip_prefix("slow=") {
            let (mut per_copy, mut per_megabyte) = (Duration::ZERO, Duration::ZERO);
            for term in slow.split('+') {
                match term.strip_suffix("/MB") {
                    Some(time) => per_megabyte = duration(time)?,
                    None => per_copy = duration(term)?,
                }
            }
            return Ok(Injected::Slow { per_copy, per_megabyte });
        }
        PLAIN.iter().find(|(_, name)| *name == text).map(|(fault, _)| *fault).ok_or_else(|| bad_fault(text))
    }
}

const PLAIN: [(Injected, &str); 7] = [
    (Injected::OutOfMemory, "oom"),
    (Injected::Error, "error"),
    (Injected::LaunchFailed, "launch-failed"),
    (Injected::DeviceLost, "lost"),
    (Injected::Stuck, "stuck"),
    (Injected::Drop, "drop"),
    (Injected::Corrupt, "corrupt"),
];

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Injected::Slow { per_copy, per_megabyte } = *self {
            return write!(f, "slow={}ns+{}ns/MB", per_copy.as_nanos(), per_megabyte.as_nanos());
        }
        PLAIN.iter().filter(|(fault, _)| fault == self).try_for_each(|(_, name)| f.write_str(name))
    }
}

impl fmt::Display for Fired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}, {} {}: {}", self.device, self.op.name(), self.count, self.fault)
    }
}

fn duration(text: &str) -> Result<Duration, BadFaultPlan> {
    let text = text.trim();
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let number = text[..text.len() - unit.len()].parse().map_err(|_| bad(text, TIME))?;
    let time = match unit {
        "ns" => Duration::from_nanos(number),
        "us" => Duration::from_micros(number),
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        _ => return Err(bad(text, TIME)),
    };
    // `Display` writes a number of nanoseconds, which must fit into 64 bits.
    if u64::try_from(time.as_nanos()).is_ok() { Ok(time) } else { Err(bad(text, TIME)) }
}

#[cfg(test)]
mod tests {
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
        let slow = (0u64.., 0u64..).prop_map(|(a, b)| Injected::Slow {
            per_copy: Duration::from_nanos(a),
            per_megabyte: Duration::from_nanos(b),
        });
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
}
