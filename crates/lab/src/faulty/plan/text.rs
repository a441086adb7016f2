//! Fault plans as text: parser and `Display`. Invariant: the written text is read as an equal plan.

use super::{FaultOp, FaultPlan, FaultRule, Injected, InjectedFault, When};
use gpu_pool::display_as;
use std::{str::FromStr, time::Duration};

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

display_as!(FaultPlan, |self, f| {
    let seed = (self.seed != 0).then(|| format!("seed={}", self.seed));
    let parts = seed.into_iter().chain(self.rules.iter().map(ToString::to_string));
    f.write_str(&parts.collect::<Vec<_>>().join("; "))
});

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

display_as!(FaultRule, |self, f| {
    let ordinal = |device: Option<usize>| device.map_or_else(|| "*".to_owned(), |device| device.to_string());
    f.write_str(&ordinal(self.device))?;
    if self.peer.is_some() {
        write!(f, ">{}", ordinal(self.peer))?;
    }
    write!(f, ":{}:{}:{}", self.op.map_or("any", FaultOp::name), self.when, self.fault)
});

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

display_as!(When, |self, f| match self {
    When::Always => f.write_str("*"),
    When::Nth(n) => write!(f, "{n}"),
    When::From(n) => write!(f, "{n}+"),
    When::Chance(p) => write!(f, "p{p}"),
});

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

display_as!(Injected, |self, f| {
    if let Injected::Slow { per_copy, per_megabyte } = *self {
        return write!(f, "slow={}ns+{}ns/MB", per_copy.as_nanos(), per_megabyte.as_nanos());
    }
    PLAIN.iter().filter(|(fault, _)| fault == self).try_for_each(|(_, name)| f.write_str(name))
});

display_as!(InjectedFault, |self, f| {
    write!(f, "device {}, {} {}: {}", self.device, self.op.name(), self.count, self.fault)
});

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
#[path = "../../../tests/unit/faulty/plan/text_tests.rs"]
mod tests;
