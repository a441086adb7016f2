//! Memory of GPUs of several processes of one host that the kernels of all use: for kernels of crates above, which go
//! by the processes' [pads](crate::runtime::LonePad). The memory of each has a descriptor, which goes to all others.
//! Invariant: all members come to one answer, so that all go by such kernels, or none. A process that has another's
//! memory keeps it, also when that process has dropped it or has ended.

use super::{Hierarchical, values::exchange};
use crate::internals::*;
use crate::runtime::{AcrossProcesses, Call, ForeignMemory};
use crate::transport::shm::pass_on;
use gpu_pool::{DeviceBuffer, Group, Result, event};
use once_cell::unsync::OnceCell;
use std::{cell::Cell, os::fd::AsFd, sync::Arc, thread, time::Duration};

/// [`lend`] looks so often for a loss that explains a failure, and waits so long after each look.
const LOOKS: usize = 30;
const LOOK: Duration = Duration::from_millis(10);

pub(super) fn lend(group: &Group<'_>, call: &Call, bytes: usize) -> Result<Option<Vec<DeviceBuffer<u8>>>> {
    let (dev, pad) = (group.device(), Hierarchical.pad(group));
    let Some(across) = group.across().filter(|_| pad.is_some()) else { return Ok(None) };
    let hosts: Vec<_> = across.places.iter().map(|place| place.host).collect();
    let none = |why: &dyn std::fmt::Display| {
        event!(debug, "not_lent", "kernels of several processes have no common memory: {why}");
        Ok(None)
    };
    let (own, memory) = match dev.apart(call.op, bytes, &Arc::default()) {
        Ok(made) => made,
        Err(why) => {
            exchange(group, call, Vec::new())?;
            return none(&why);
        }
    };
    // The words of all members. An empty word: that member has no memory.
    let (told, asked) = (OnceCell::new(), Cell::new(false));
    let tell = |own: &[u8]| {
        asked.set(true);
        let told = told.get_or_try_init(|| exchange(group, call, own.to_vec()))?;
        let without = told.iter().position(Vec::is_empty);
        without.map_or(Ok(()), |rank| Err(cluster_error!(call.op, "rank {rank} has no memory to lend")))
    };
    let ask = |rank: usize| Ok(told.get().map_or_else(Vec::new, |told| told[rank].clone()));
    let lost = || dev.check().err();
    let theirs = pass_on(memory.as_fd(), (group.rank(), &hosts), &tell, &ask, &lost, dev.deadline());
    let theirs = match (theirs, told.get()) {
        (Ok(theirs), _) => theirs,
        // This process has no descriptor for a socket.
        (Err(why), None) if !asked.get() => {
            exchange(group, call, Vec::new())?;
            return none(&why);
        }
        (Err(error), None) => return Err(error),
        (Err(why), Some(told)) if told.iter().any(Vec::is_empty) => return none(&why),
        (Err(error), _) => {
            // A loss is known soon, and says more. Without one the others wait for this process's memory.
            for _ in 0..LOOKS {
                dev.check()?;
                thread::sleep(LOOK);
            }
            dev.own_gang().poison(dev.index(), error.clone());
            return Err(error);
        }
    };
    let (chunk, mut own) = (own.len(), Some(own));
    let mapped = theirs.into_iter().map(|theirs| match theirs {
        Some(theirs) => dev.import_memory(call.op, chunk, theirs.as_fd(), &Arc::default()),
        None => Ok(own.take().expect("one of them is this member")),
    });
    let mapped = mapped.collect::<Result<Vec<_>>>();
    let able = exchange(group, call, vec![u8::from(mapped.is_ok())])?;
    match (mapped, able.iter().position(|able| *able != [1])) {
        (Err(why), _) => none(&why),
        (_, Some(rank)) => none(&format_args!("rank {rank} has no access to it")),
        (Ok(mapped), None) => Ok(Some(mapped)),
    }
}
