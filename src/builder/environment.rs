//! Settings of a pool from environment variables, for settings that the program has not made itself.
//!
//! `Builder::build` calls it once per pool. A value that cannot be parsed is an error, not a default.

use super::{Builder, share};
use crate::{
    driver::host::Schedule,
    error::{Error, Result, Site, op_site::OpSite},
    log, variables,
};
use std::{fmt::Display, str::FromStr, sync::Once, time::Duration};

/// The prefix of all names.
const PREFIX: &str = "GPU_POOL_";

/// The names, without the prefix, of all variables that the crate, its tests, benches, examples or CI read. A unit test
/// compares the list with the sources.
const KNOWN: [&str; 39] = [
    "ALGORITHM",
    "BACKEND",
    "BEFORE",
    "BENCH_NCCL",
    "BENCH_NO_PEER",
    "CHECK",
    "DDP",
    "DEVICES",
    "FAULTS",
    "FUZZ_SEED",
    "FUZZ_STEPS",
    "HEAP_STEPS",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOG",
    "LONG",
    "LOOM",
    "MACHINE",
    "MASTER",
    "MEMORY",
    "MPI",
    "MUTANT",
    "NCCL",
    "NCCL_REGISTER",
    "PORT",
    "RANK",
    "RECORD_MEMORY",
    "SECRET",
    "SEED",
    "SHARE",
    "SILENCE",
    "SIZE",
    "TEST_PEERS",
    "TEST_TASK",
    "TEST_TOO_MANY_HANDLES",
    "TEST_TRANSPORT",
    "TIMEOUT",
    "TORCH",
    "TRANSPORT",
];

/// An unknown name is taken for a misspelt known one if at most this many letters differ.
const NEAR: usize = 2;

impl Builder {
    /// Fills in settings that the program has not made.
    #[track_caller]
    pub(super) fn read_environment(&mut self) -> Result<()> {
        // A program that builds many pools has one environment, so it warns once.
        static WARNED: Once = Once::new();
        WARNED.call_once(warn_of_unknown);
        // The process's log reads it, since there are events before any pool.
        variable("GPU_POOL_LOG", log::EXPECTED, log::parse)?;
        if self.backend.is_none() {
            self.backend = variable("GPU_POOL_BACKEND", "cuda, host or host:8", parsed)?;
        }
        if self.devices.is_none() {
            self.devices = variable("GPU_POOL_DEVICES", "ordinals like 0,1", parse_devices)?;
        }
        if self.sharing.is_none() {
            self.sharing = variable("GPU_POOL_SHARE", "a number from 1 to 16", share::parse)?;
        }
        if self.observer.is_none() {
            refuse_lab("GPU_POOL_CHECK", "off")?;
            refuse_lab("GPU_POOL_FAULTS", "")?;
        }
        if self.schedule.is_none() && self.machine.topology.is_none() {
            self.schedule = seed()?.map(Schedule::Seeded);
        }
        if self.backing.is_none() {
            self.backing = variable("GPU_POOL_MEMORY", "auto, vmm or malloc", parsed)?;
        }
        if self.memory.record.is_none() {
            self.memory.record = variable("GPU_POOL_RECORD_MEMORY", "1 or 0", parse_switch)?;
        }
        if self.algorithm.is_none() {
            let names = "auto, direct, inbox, exchange, copies, staged, host or ring";
            self.algorithm = variable("GPU_POOL_ALGORITHM", names, parsed)?;
        }
        if self.register_buckets.is_none() {
            self.register_buckets = variable("GPU_POOL_NCCL_REGISTER", "1 or 0", parse_switch)?;
        }
        if self.timeout.is_none() {
            self.timeout = variable("GPU_POOL_TIMEOUT", "a time above zero like 500ms, 30s or 10m", parse_duration)?;
        }
        Ok(())
    }
}

/// Refuses a variable of the laboratory in a program without it: what was asked for would not happen. The value
/// `nothing` asks for nothing.
#[track_caller]
fn refuse_lab(name: &'static str, nothing: &str) -> Result<()> {
    match text(name, OpSite::place())?.filter(|text| text != nothing) {
        Some(_) => Err(Error::invalid(
            name,
            "the crate `gpu-pool-lab` reads it, and this program has no observer of that crate: call \
             `gpu_pool_lab::install()` before the first pool is built",
        )),
        None => Ok(()),
    }
}

/// Warns of unknown variables: a misspelt variable has no effect.
fn warn_of_unknown() {
    for variable in variables::names().filter(|name| is_unknown(name)) {
        match nearest(&variable) {
            Some(known) => event!(warn, "{variable} has no effect: gpu-pool does not know it; {known} is meant?"),
            None => event!(warn, "{variable} has no effect: gpu-pool does not know it"),
        }
    }
}

/// Whether a name has the prefix of this crate's variables but is not one of them. Names are case-sensitive.
fn is_unknown(name: &str) -> bool {
    let own = name.get(..PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(PREFIX));
    own && !name.strip_prefix(PREFIX).is_some_and(|rest| KNOWN.contains(&rest))
}

/// The known variable that the program most likely meant.
fn nearest(name: &str) -> Option<String> {
    let rest = name[PREFIX.len()..].to_ascii_uppercase();
    let all = KNOWN.iter().map(|known| (distance(known, &rest), known));
    all.min().filter(|(distance, _)| *distance <= NEAR).map(|(_, known)| format!("{PREFIX}{known}"))
}

/// The number of letters to insert, remove or replace to turn one text into the other (Levenshtein distance).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.chars().count()]
}

#[track_caller]
pub(crate) fn seed() -> Result<Option<u64>> {
    variable("GPU_POOL_SEED", "a number", |text| text.parse().ok())
}

/// An environment variable. An empty value counts as unset.
fn text(name: &'static str, site: Site) -> Result<Option<String>> {
    match variables::text(name) {
        Ok(text) => Ok(text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(not) => Err(Error::invalid_at(site, name, not)),
    }
}

#[track_caller]
fn variable<T>(name: &'static str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
    let parse = |text: &str| parse(text).ok_or_else(|| format!("; expected {expected}"));
    variable_at(name, OpSite::place(), parse)
}

/// An environment variable, parsed. An error says why not, and names `site`.
pub(crate) fn variable_at<T, E: Display>(
    name: &'static str,
    site: Site,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>> {
    let Some(text) = text(name, site)? else { return Ok(None) };
    let misunderstood = |why| Error::invalid_at(site, name, format_args!("`{text}` is not understood{why}"));
    parse(&text).map(Some).map_err(misunderstood)
}

fn parsed<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "1" => Some(true),
        "0" => Some(false),
        _ => None,
    }
}

fn parse_devices(text: &str) -> Option<Vec<usize>> {
    text.split(',').map(|part| part.trim().parse().ok()).collect()
}

/// A time above zero, like `500ms`, `30s` or `10m`.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let value: f64 = digits.parse().ok()?;
    let unit = match &text[digits.len()..] {
        "ms" => 1e-3,
        "s" | "" => 1.0,
        "m" => 60.0,
        _ => return None,
    };
    // A positive time may be shorter than a nanosecond, the smallest `Duration`.
    Duration::try_from_secs_f64(value * unit).ok().filter(|deadline| !deadline.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, collective::Algorithm, lab::texts, memory::BackingChoice};
    use proptest::prelude::*;

    #[test]
    fn a_misspelt_variable_is_found_with_the_name_that_was_meant() {
        let named = |rest: &str| format!("{PREFIX}{rest}");
        for (wrong, meant) in [
            ("TIMOUT", Some("TIMEOUT")),
            ("TIMEOUTS", Some("TIMEOUT")),
            ("ALGORTIHM", Some("ALGORITHM")),
            ("DEVICE", Some("DEVICES")),
            ("timeout", Some("TIMEOUT")),
            ("COLOUR", None),
            ("", None),
        ] {
            assert!(is_unknown(&named(wrong)), "{wrong}");
            assert_eq!(nearest(&named(wrong)), meant.map(named), "{wrong}");
        }
        assert!(KNOWN.iter().all(|known| !is_unknown(&named(known))));
        assert!(!is_unknown("GPU") && !is_unknown("gpu_poolside") && !is_unknown("GPU_PÖÖL_X"));
        assert!(is_unknown(&named("TIMEOUT").to_lowercase()));
        assert_eq!(distance("kitten", "sitting"), 3);
    }

    /// Each variable of a pool is in both tables, and each value of those that have a list is in both, too.
    #[test]
    fn the_documentation_names_all_variables_and_values() {
        let sources = [include_str!("../builder.rs"), include_str!("../../docs/src/guide/environment.md")];
        let this = include_str!("environment.rs").split("#[cfg(test)]").next().unwrap();
        let read: Vec<_> = this.split("\"GPU_POOL_").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        assert!(read.len() >= 11, "{read:?}");
        for name in read.into_iter().filter(|name| !name.is_empty()) {
            for source in sources {
                assert!(source.contains(&format!("GPU_POOL_{name}")), "{name} is not documented");
            }
        }
        let line = |source: &'static str, name: &str| {
            source.lines().find(|line| line.contains(&format!("`GPU_POOL_{name}"))).unwrap_or_else(|| panic!("{name}"))
        };
        for (name, values) in [
            ("ALGORITHM", &["auto", "direct", "exchange", "copies", "staged", "host", "ring"][..]),
            ("MEMORY", &["vmm", "malloc"]),
            ("CHECK", &["races", "memory"]),
            ("BACKEND", &["cuda", "host"]),
        ] {
            for source in sources {
                let missing = values.iter().find(|value| !line(source, name).contains(**value));
                assert_eq!(missing, None, "{name}: {}", line(source, name));
            }
        }
    }

    /// Names in the sources that are not variables: kinds of faults, and the wrong names in tests.
    const NO_VARIABLES: [&str; 3] = ["MISUSE", "DEADLOCK", "TIMOUT"];

    #[test]
    fn the_list_of_variables_is_complete() {
        fn look(path: &std::path::Path, found: &mut std::collections::BTreeMap<String, String>) {
            if path.is_dir() {
                std::fs::read_dir(path).unwrap().for_each(|entry| look(&entry.unwrap().path(), found));
                return;
            }
            let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
            for after in text.split(PREFIX).skip(1) {
                let end = after.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
                let name = &after[..end.unwrap_or(after.len())];
                if !name.is_empty() {
                    found.insert(name.to_owned(), path.display().to_string());
                }
            }
        }
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut found = std::collections::BTreeMap::new();
        // A published crate lacks some of them.
        let places = [
            "src",
            "crates",
            "tests",
            "loom_tests",
            "benches",
            "examples",
            "docs",
            "nccl",
            ".ci",
            ".cargo",
            "README.md",
        ];
        places.map(|place| root.join(place)).iter().filter(|place| place.exists()).for_each(|at| look(at, &mut found));
        assert!(found.len() > 20, "{found:?}");
        found.retain(|name, _| !KNOWN.contains(&&**name) && !NO_VARIABLES.contains(&&**name));
        assert!(found.is_empty(), "`KNOWN` lacks these, here with a file that names each: {found:#?}");
        assert!(KNOWN.is_sorted());
    }

    #[test]
    fn environment_values() {
        assert_eq!(parsed("host:8"), Some(Backend::Host(8)));
        assert_eq!(parsed("cuda"), Some(Backend::Cuda));
        assert_eq!(parsed::<Backend>("host:x"), None);
        assert_eq!(parsed::<Backend>("gpu"), None);
        assert_eq!(parse_devices("0, 2,1"), Some(vec![0, 2, 1]));
        assert_eq!(parse_devices("0,,1"), None);
        assert_eq!(parse_duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parse_duration("2m"), Some(Duration::from_secs(120)));
        assert_eq!(parse_duration("-1s"), None);
        assert_eq!(parse_duration("0"), None);
        assert_eq!(parse_duration("1e-12s"), None, "it would be zero");
        assert_eq!(parse_duration("1e300s"), None);
        assert_eq!(parse_duration("soon"), None);
        assert_eq!(parse_duration("0s"), None);
        assert_eq!(parse_duration("1e-300s"), None, "no time, too");
    }

    static VALUES: &[&str] = &["host:8", "cuda", "0, 2,1", "500ms", "1e-9s", "2m", "vmm", "exchange", "ring"];

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
            let _ = (parsed::<Backend>(&text), parsed::<BackingChoice>(&text), parse_switch(&text));
            let _ = (share::parse(&text), text.parse::<u64>(), text.parse::<Algorithm>());
        }

        #[test]
        fn a_value_that_is_written_is_read(devices: Vec<usize>, nanos in 1u64.., count: usize) {
            let list: Vec<String> = devices.iter().map(usize::to_string).collect();
            prop_assert_eq!(parse_devices(&list.join(",")), Some(devices).filter(|devices| !devices.is_empty()));
            prop_assert_eq!(parsed(&format!("host:{count}")), Some(Backend::Host(count)));
            let (time, seconds) = (Duration::from_nanos(nanos), nanos as f64 / 1e9);
            let read = parse_duration(&format!("{seconds}s")).unwrap();
            let tolerance = time / 1_000_000_000 + Duration::from_nanos(1);
            prop_assert!(read.abs_diff(time) <= tolerance, "{read:?}, not {time:?}");
        }
    }
}
