//! Settings of a pool from environment variables, for settings that the program has not made itself.
//!
//! `Builder::build` calls it once per pool. A value that cannot be parsed is an error, not a default.

use super::{Builder, share};
use crate::{
    driver::ExecutionOrder,
    error::{Error, Result, Site, op_site::OpSite},
    log, variables,
};
use std::{fmt::Display, str::FromStr, sync::Once, time::Duration};

const PREFIX: &str = "GPU_POOL_";

/// All variables, without the prefix, that crate, tests, benches, examples or CI read. A test compares the sources.
#[rustfmt::skip]
const KNOWN: [&str; 44] = [
    "ALGORITHM", "BACKEND", "BEFORE", "BENCH_NCCL", "BENCH_NO_PEER", "CHECK", "DDP", "DEVICES", "FAULTS",
    "FLIGHT_RECORD", "FLIGHT_RECORD_SIGNAL", "FUZZ_SEED", "FUZZ_STEPS", "HEAP_STEPS", "LOCAL_RANK", "LOCAL_SIZE",
    "LOG", "LONG", "LOOM", "MACHINE", "MASTER", "MEETING", "MEMORY", "MPI", "MUTANT", "NCCL", "NCCL_REGISTER", "PORT",
    "RANK", "RECORD_MEMORY", "SECRET", "SEED", "SHARE", "SILENCE", "SIZE", "SOAK", "TEST_PEERS", "TEST_TASK",
    "TEST_TOO_MANY_HANDLES", "TEST_TRANSPORT", "TIMEOUT", "TORCH", "TRACE", "TRANSPORT",
];

/// An unknown name is taken for a misspelt known one if at most this many letters differ.
const NEAR: usize = 2;

impl Builder {
    #[track_caller]
    pub(super) fn read_environment(&mut self) -> Result<()> {
        // A program that builds many pools has one environment, so it warns once.
        static WARNED: Once = Once::new();
        WARNED.call_once(warn_of_unknown);
        // The process's log reads it, since there are events before any pool.
        variable("GPU_POOL_LOG", log::EXPECTED, log::parse)?;
        unless_set(&mut self.backend, "GPU_POOL_BACKEND", "cuda, host or host:8", parsed)?;
        unless_set(&mut self.devices, "GPU_POOL_DEVICES", "ordinals like 0,1", parse_devices)?;
        unless_set(&mut self.sharing, "GPU_POOL_SHARE", "a number from 1 to 16", share::parse)?;
        if self.observer.is_none() {
            refuse_lab("GPU_POOL_CHECK", "off")?;
            refuse_lab("GPU_POOL_FAULTS", "")?;
        }
        if self.schedule.is_none() && self.machine.topology.is_none() {
            self.schedule = seed()?.map(ExecutionOrder::Seeded);
        }
        unless_set(&mut self.backing, "GPU_POOL_MEMORY", "auto, vmm or malloc", parsed)?;
        unless_set(&mut self.memory.record, "GPU_POOL_RECORD_MEMORY", "1 or 0", parse_switch)?;
        let names = "auto, direct, inbox, exchange, copies, staged, host or ring";
        unless_set(&mut self.algorithm, "GPU_POOL_ALGORITHM", names, parsed)?;
        unless_set(&mut self.register_buckets, "GPU_POOL_NCCL_REGISTER", "1 or 0", parse_switch)?;
        if self.trace.is_none() {
            self.trace = variables::os("GPU_POOL_TRACE").filter(|path| !path.is_empty()).map(Into::into);
        }
        unless_set(&mut self.flight_record, "GPU_POOL_FLIGHT_RECORD", "a path", parsed)?;
        unless_set(&mut self.flight_record_on_signal, "GPU_POOL_FLIGHT_RECORD_SIGNAL", "1 or 0", parse_switch)?;
        let time = "a time above zero like 500ms, 30s or 10m";
        unless_set(&mut self.timeout, "GPU_POOL_TIMEOUT", time, parse_duration)
    }
}

/// Refuses a variable of the laboratory in a program without it (no effect), unless its value is `nothing`.
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
    for (variable, near) in unknown() {
        let meant = near.map_or_else(String::new, |known| format!("; {known} is meant?"));
        event!(warn, "unknown_variable", "{variable} has no effect: gpu-pool does not know it{meant}");
    }
}

/// The unknown variables that are set, each with the known name that it may be a misspelling of.
pub fn unknown() -> impl Iterator<Item = (String, Option<String>)> {
    variables::names().filter(|name| is_unknown(name)).map(|name| (name.clone(), nearest(&name)))
}

/// Whether a name has the prefix of this crate's variables but is not one of them. Names are case-sensitive.
fn is_unknown(name: &str) -> bool {
    let own = name.get(..PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(PREFIX));
    own && !name.strip_prefix(PREFIX).is_some_and(|rest| KNOWN.contains(&rest))
}

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

fn text(name: &'static str, site: Site) -> Result<Option<String>> {
    match variables::text(name) {
        Ok(text) => Ok(text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(not) => Err(Error::invalid_at(site, name, not)),
    }
}

/// Reads a setting that the program has not made.
#[track_caller]
fn unless_set<T>(
    setting: &mut Option<T>,
    name: &'static str,
    expected: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<()> {
    if setting.is_none() {
        *setting = variable(name, expected, parse)?;
    }
    Ok(())
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
#[path = "../../tests/unit/builder/environment_tests.rs"]
mod tests;
