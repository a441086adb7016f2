//! What the environment says of a pool: for what the program has not set itself.

use super::{Backend, Builder, DEFAULT_SOFTWARE_GPUS, share};
use crate::{
    driver::{check::Check, host::Schedule},
    error::{Error, Result},
    memory::BackingChoice,
    testing::FaultPlan,
};
use std::{env, time::Duration};

impl Builder {
    /// Fills in what is not set.
    pub(super) fn read_environment(&mut self) -> Result<()> {
        if self.backend.is_none() {
            self.backend = variable("GPU_POOL_BACKEND", "cuda, host or host:8", parse_backend)?;
        }
        if self.devices.is_none() {
            self.devices = variable("GPU_POOL_DEVICES", "ordinals like 0,1", parse_devices)?;
        }
        if self.sharing.is_none() {
            self.sharing = variable("GPU_POOL_SHARE", "a number from 1 to 16", share::parse)?;
        }
        if self.check.is_none() {
            self.check = variable("GPU_POOL_CHECK", "races, memory or off", parse_check)?;
            // The crate's own unit tests all test the checker, too.
            if cfg!(test) && self.check.is_none() {
                self.check = Some(Check::Races);
            }
        }
        if self.machine.schedule == Schedule::Threaded {
            self.machine.schedule = seed()?.map_or(Schedule::Threaded, Schedule::Seeded);
        }
        if self.faults.is_none()
            && let Some(text) = text("GPU_POOL_FAULTS")
        {
            let misunderstood =
                |why| Error::invalid("GPU_POOL_FAULTS", format_args!("`{text}` is not understood: {why}"));
            // Faults are for the program, not for the pool's own probe: `build` lets go of it at its end.
            self.faults = Some(text.parse::<FaultPlan>().map_err(misunderstood)?.paused());
            self.faults_wait = true;
        }
        if self.memory.choice == BackingChoice::Auto {
            let choice = variable("GPU_POOL_MEMORY", "auto, vmm or malloc", parse_backing)?;
            self.memory.choice = choice.unwrap_or_default();
        }
        if self.memory.record.is_none() {
            self.memory.record = variable("GPU_POOL_RECORD_MEMORY", "1 or 0", parse_switch)?;
        }
        if self.algorithm.is_none() {
            self.algorithm =
                variable("GPU_POOL_ALGORITHM", "auto, direct, exchange, copies, staged, host or ring", |text| {
                    text.parse().ok()
                })?;
        }
        if self.tune.is_none() {
            self.tune = variable("GPU_POOL_TUNE", "auto, off, table or measure", |text| text.parse().ok())?;
        }
        if self.timeout.is_none() {
            self.timeout = variable("GPU_POOL_TIMEOUT", "a time above zero like 500ms, 30s or 10m", parse_duration)?;
        }
        Ok(())
    }
}

/// The seed in the environment.
pub(crate) fn seed() -> Result<Option<u64>> {
    variable("GPU_POOL_SEED", "a number", |text| text.parse().ok())
}

/// An environment variable; an empty one is none.
fn text(name: &str) -> Option<String> {
    let value = env::var_os(name)?;
    let text = value.to_string_lossy();
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// An environment variable, parsed; one that does not parse is an error, not a default.
fn variable<T>(name: &'static str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
    let Some(text) = text(name) else { return Ok(None) };
    let misunderstood = || Error::invalid(name, format_args!("`{text}` is not understood; expected {expected}"));
    parse(&text).map(Some).ok_or_else(misunderstood)
}

fn parse_backend(text: &str) -> Option<Backend> {
    match text.split_once(':') {
        None if text == "cuda" => Some(Backend::Cuda),
        None if text == "host" => Some(Backend::Host(DEFAULT_SOFTWARE_GPUS)),
        Some(("host", count)) => count.parse().ok().map(Backend::Host),
        _ => None,
    }
}

fn parse_backing(text: &str) -> Option<BackingChoice> {
    match text {
        "auto" => Some(BackingChoice::Auto),
        "vmm" => Some(BackingChoice::Vmm),
        "malloc" => Some(BackingChoice::Malloc),
        _ => None,
    }
}

fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "1" => Some(true),
        "0" => Some(false),
        _ => None,
    }
}

fn parse_check(text: &str) -> Option<Check> {
    match text {
        "races" => Some(Check::Races),
        "memory" => Some(Check::Memory),
        "off" => Some(Check::Off),
        _ => None,
    }
}

fn parse_devices(text: &str) -> Option<Vec<usize>> {
    text.split(',').map(|part| part.trim().parse().ok()).collect()
}

fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let value: f64 = digits.parse().ok()?;
    let unit = match &text[digits.len()..] {
        "ms" => 1e-3,
        "s" | "" => 1.0,
        "m" => 60.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(value * unit).ok().filter(|time| !time.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Tune, testing::texts};
    use proptest::prelude::*;

    #[test]
    fn environment_values() {
        assert_eq!(parse_backend("host:8"), Some(Backend::Host(8)));
        assert_eq!(parse_backend("cuda"), Some(Backend::Cuda));
        assert_eq!(parse_backend("host:x"), None);
        assert_eq!(parse_backend("gpu"), None);
        assert_eq!(parse_devices("0, 2,1"), Some(vec![0, 2, 1]));
        assert_eq!(parse_devices("0,,1"), None);
        assert_eq!(parse_duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parse_duration("2m"), Some(Duration::from_secs(120)));
        assert_eq!(parse_duration("-1s"), None);
        assert_eq!(parse_duration("1e300s"), None);
        assert_eq!(parse_duration("soon"), None);
        assert_eq!(parse_duration("0s"), None);
        assert_eq!(parse_duration("1e-300s"), None, "no time, too");
    }

    static VALUES: &[&str] =
        &["host:8", "cuda", "0, 2,1", "500ms", "1e-9s", "2m", "races", "vmm", "exchange", "measure"];

    proptest! {
        #![proptest_config(texts::cases(256))]

        #[test]
        fn any_text_is_a_value_or_none(text in texts::like(VALUES)) {
            if let Some(time) = parse_duration(&text) {
                prop_assert!(!time.is_zero());
            }
            if let Some(devices) = parse_devices(&text) {
                prop_assert_eq!(devices.len(), text.split(',').count());
            }
            let _ = (parse_backend(&text), parse_backing(&text), parse_switch(&text), parse_check(&text), share::parse(&text));
            let _ = (text.parse::<u64>(), text.parse::<Algorithm>(), text.parse::<Tune>());
        }

        #[test]
        fn a_value_that_is_written_is_read(devices: Vec<usize>, nanos in 1u64.., count: usize) {
            let list: Vec<String> = devices.iter().map(usize::to_string).collect();
            prop_assert_eq!(parse_devices(&list.join(",")), Some(devices).filter(|devices| !devices.is_empty()));
            prop_assert_eq!(parse_backend(&format!("host:{count}")), Some(Backend::Host(count)));
            let (time, seconds) = (Duration::from_nanos(nanos), nanos as f64 / 1e9);
            let read = parse_duration(&format!("{seconds}s")).unwrap();
            prop_assert!(read.abs_diff(time) <= time / 1_000_000_000 + Duration::from_nanos(1), "{read:?}, not {time:?}");
        }
    }
}
