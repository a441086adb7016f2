//! Own kernels for small sums, where each process has one GPU and all are on one host: each process makes a
//! [`LonePad`], and the descriptors of its memory go to all others.
//!
//! `open_nccl` calls [`open`] when the rails are connected: other calls go by them. All processes come to
//! one answer, so each step ends with the word of all. Nothing here fails a start, but for the loss of a process.

use super::super::{control::Control, transport::shm::pass_on, wire::cut};
use crate::runtime::{DriverRef, LonePad, MOST, SetUp, blocking};
use gpu_pool::{Error, Result, event};
use std::{
    os::fd::{AsFd, OwnedFd},
    thread,
    time::Duration,
};

/// How long a kernel of the probe waits for the others, which have said that they are ready.
const PROBE: Duration = Duration::from_secs(5);

/// This process's pad; or why all go without. `one_machine`: all are on one. `alone`: this one is to use NCCL alone.
pub(super) fn open(
    control: &Control,
    drivers: &[DriverRef],
    (one_machine, alone): (bool, bool),
    limit: Duration,
) -> Result<SetUp<LonePad>> {
    if let Err(why) = fits(&control.devices, one_machine) {
        return Ok(Err(why.to_owned()));
    }
    // It allocates memory, and loads and runs kernels.
    let _blocking = blocking();
    let opened = carry_out(control, &drivers[0], alone, limit)?;
    match &opened {
        Ok(_) => event!(debug, "own_kernels", "small sums between processes go by own kernels"),
        Err(why) => event!(debug, "no_own_kernels", "no own kernels between processes: {why}"),
    }
    Ok(opened)
}

/// Whether processes with so many devices can have pads, as far as all know it alike.
fn fits(devices: &[usize], one_machine: bool) -> SetUp<()> {
    match () {
        () if !one_machine => Err("the processes are on several machines".into()),
        () if devices.iter().any(|count| *count != 1) => Err("a process has several devices".into()),
        () if devices.len() > MOST => Err(format!("there are more than {MOST} processes")),
        () => Ok(()),
    }
}

fn carry_out(control: &Control, driver: &DriverRef, alone: bool, limit: Duration) -> Result<SetUp<LonePad>> {
    let made = match alone {
        true => Err("NCCL alone was asked for".to_owned()),
        false => LonePad::new(driver, control.host, control.size()),
    };
    let word = word(&made, driver.info().uuid, driver.info().multiprocessors);
    let agreed = agreed(&control.gather("pads/made", &word)?);
    let ((mut pad, memory), multiprocessors) = match (made, agreed) {
        (Ok(made), Ok(multiprocessors)) => (made, multiprocessors),
        (_, Err(why)) | (Err(why), _) => return Ok(Err(why)),
    };
    let all = |name: &str, done: SetUp<()>| {
        Ok::<_, Error>(first(&control.gather(name, cut(done.err().unwrap_or_default()).as_bytes())?))
    };
    let laid_out = exchange(control, &memory, limit).and_then(|theirs| {
        for (process, theirs) in theirs.iter().enumerate() {
            let imported = theirs.as_ref().map_or(Ok(()), |theirs| pad.import(process, theirs.as_fd()));
            imported.map_err(|why| format!("no access to the memory of process {process}: {why}"))?;
        }
        pad.lay_out(multiprocessors)
    });
    if let Err(why) = all("pads/ready", laid_out)? {
        return Ok(Err(why));
    }
    Ok(all("pads/work", pad.probe(PROBE))?.map(|()| pad))
}

/// The descriptors of the others' pads. A process that fails here says so: the others must not wait for it.
fn exchange(control: &Control, memory: &OwnedFd, limit: Duration) -> SetUp<Vec<Option<OwnedFd>>> {
    let failed_by = |process: usize| format!("pads/failed/{process}");
    (0..control.size()).for_each(|process| control.local.ask(&failed_by(process)));
    let lost = || {
        let process = || (0..control.size()).find(|process| control.local.known(&failed_by(*process)).is_some());
        let failed = |process| cluster_error!("pads", "process {process} could not pass its memory on");
        control.lost().or_else(|| process().map(failed))
    };
    let key = |process: usize| format!("pads/memory/{process}");
    let ask = |process: usize| {
        control.local.ask(&key(process));
        loop {
            match (control.local.known(&key(process)), lost()) {
                (Some(value), _) => return Ok(value),
                (None, Some(error)) => return Err(error),
                (None, None) => thread::sleep(Duration::from_millis(1)),
            }
        }
    };
    let (tell, all) =
        (|own: &[u8]| control.local.set(&key(control.host), own), (0..control.size()).collect::<Vec<_>>());
    pass_on(memory.as_fd(), (control.host, &all), &tell, &ask, &lost, limit).map_err(|error| {
        let _ = control.local.set(&failed_by(control.host), b"!");
        error.to_string()
    })
}

fn word<T>(made: &SetUp<T>, uuid: [u8; 16], multiprocessors: u32) -> Vec<u8> {
    match made {
        Ok(_) => [&[1], &uuid[..], &multiprocessors.to_le_bytes()].concat(),
        Err(why) => [&[0], cut(why.clone()).as_bytes()].concat(),
    }
}

/// The least multiprocessors of any GPU, if each process has a pad and a GPU of its own.
fn agreed(told: &[Vec<u8>]) -> SetUp<u32> {
    let mut least = u32::MAX;
    for (process, word) in told.iter().enumerate() {
        match word.split_first() {
            Some((1, gpu)) if gpu.len() == 20 => {
                let (uuid, multiprocessors) = gpu.split_at(16);
                if let Some(other) = told[..process].iter().position(|other| other[1..17] == *uuid) {
                    return Err(format!("processes {other} and {process} have one GPU"));
                }
                least = least.min(u32::from_le_bytes(multiprocessors.try_into().expect("four bytes")));
            }
            word => {
                let why = String::from_utf8_lossy(word.map_or(&[], |(_, why)| why));
                return Err(format!("process {process}: {why}"));
            }
        }
    }
    Ok(least)
}

fn first(told: &[Vec<u8>]) -> SetUp<()> {
    let failed = told.iter().position(|why| !why.is_empty());
    let why = |process: usize| String::from_utf8_lossy(&told[process]).into_owned();
    failed.map_or(Ok(()), |process| Err(format!("process {process}: {}", why(process))))
}

#[cfg(test)]
#[path = "../../tests/unit/connect/pads_tests.rs"]
mod tests;
