//! Several devices of a pool on one GPU: for tests of GPU kernels that need more devices than there are GPUs.
//!
//! The builder asks it which ordinals to open, and which position each device has on its GPU ([`seats`]).
//!
//! **Kernels that wait for each other** must all get to run. Kernels on one GPU do if two conditions hold.
//!
//! * All their blocks fit on the GPU together (collectives divide its multiprocessors by the sharers).
//! * No such kernel is queued behind work that waits for it. The GPU serves streams through a few hardware queues
//!   (`CUDA_DEVICE_MAX_CONNECTIONS`: 8 by default, 32 at most), each in the order of submission
//!   (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars>). Consecutive kernels of different
//!   streams in one queue run side by side. But work that waits for a kernel, such as the next kernel of its stream,
//!   blocks everything behind it in the queue.
//!
//! So a device that shares its GPU submits nothing after such a kernel until all kernels of the meeting were launched.
//! Then the work in front of a kernel waits at most for kernels whose peers were all launched before this kernel: by
//! induction all kernels end. A graph is submitted as a whole, so its kernels need queues of their own.
//!
//! One case is left. A device that is no member of a meeting may wait for a member's stream (a copy from its buffer,
//! across groups) after that member's launch and before another member's launch. With three devices on a GPU and more
//! streams than queues, this wait may be in front of the other launch in a queue. Then the deadline ends it.

use super::Builder;
use crate::error::{Error, Result};
use std::collections::HashMap;

/// Most devices per GPU: a collective's kernel has no more peers.
const MOST: usize = crate::fabric::layout::MOST;

/// Whether one CUDA GPU may be several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    Never,
    /// If the list of devices repeats it.
    Listed,
    /// As `Listed`; and the list of devices is repeated this many times.
    Times(usize),
}

setters! { Builder;
    /// Allows one CUDA GPU to be several devices: `devices(&[0, 0, 0, 1, 1])` is a pool of five devices on two GPUs.
    /// Without this it is an error. **For tests** of code that needs more devices than there are GPUs, and for
    /// teaching. It is never faster.
    ///
    /// Each device has its own thread, streams, memory pool and part in collectives. Devices on one GPU share a
    /// context, so a fault that loses one of them loses all of them.
    /// * By default a device takes at most its part of the GPU's memory; [`memory_limit`](Self::memory_limit) changes
    ///   this. [`memory_limit_percent`](Self::memory_limit_percent) is relative to the device's part.
    /// * Kernels of collectives are small enough to run side by side.
    /// * Start the process with `CUDA_DEVICE_MAX_CONNECTIONS=32`. With fewer hardware queues, streams of several
    ///   devices share a queue, and graphs whose kernels wait for each other may then wait until the
    ///   [`timeout`](Self::timeout). The builder warns (by `tracing`). It cannot set the variable, since the driver
    ///   reads it once.
    ///
    /// One GPU can be at most 16 devices. Software GPUs are not shared: a software GPU that is listed twice is an
    /// error. This method overrides `GPU_POOL_SHARE`, which the page "Testing" of the guide explains.
    pub fn share_gpus(self, share: bool) { self.sharing = Some(if share { Sharing::Listed } else { Sharing::Never }); }
}

impl Builder {
    pub(super) fn shares(&self) -> bool {
        !matches!(self.sharing, None | Some(Sharing::Never))
    }

    #[track_caller]
    pub(super) fn crowd(&self, ordinals: Vec<usize>) -> Result<Vec<usize>> {
        let ordinals = match self.sharing {
            Some(Sharing::Times(times)) => ordinals.repeat(times),
            _ => ordinals,
        };
        let count = |ordinal: &usize| ordinals.iter().filter(|&other| other == ordinal).count();
        if let Some(crowded) = ordinals.iter().find(|ordinal| count(ordinal) > MOST) {
            let why =
                format_args!("`share_gpus`: GPU {crowded} would be {} devices, and {MOST} is the most", count(crowded));
            return Err(Error::invalid("build", why));
        }
        let shared = ordinals.iter().any(|ordinal| count(ordinal) > 1);
        let queues = crate::variables::os("CUDA_DEVICE_MAX_CONNECTIONS");
        if shared && !are_plenty(queues.as_deref().and_then(std::ffi::OsStr::to_str)) {
            event!(
                warn,
                "few_connections",
                ?ordinals,
                "GPUs are shared, and CUDA_DEVICE_MAX_CONNECTIONS is not 32: \
                 kernels that wait for each other may be in one queue"
            );
        }
        Ok(ordinals)
    }
}

fn are_plenty(queues: Option<&str>) -> bool {
    queues.and_then(|queues| queues.trim().parse().ok()).is_some_and(|queues: u32| queues >= 32)
}

pub(super) fn parse(text: &str) -> Option<Sharing> {
    let times = text.parse().ok()?;
    (1..=MOST).contains(&times).then_some(Sharing::Times(times))
}

/// A device's position on its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub place: usize,
    pub sharers: usize,
}

pub(super) fn seats(uuids: impl Iterator<Item = [u8; 16]>) -> Vec<Seat> {
    let mut counts = HashMap::<_, usize>::new();
    let places: Vec<_> = uuids
        .map(|uuid| {
            let count = counts.entry(uuid).or_default();
            *count += 1;
            (uuid, *count - 1)
        })
        .collect();
    places.into_iter().map(|(uuid, place)| Seat { place, sharers: counts[&uuid] }).collect()
}

#[cfg(test)]
#[path = "../../tests/unit/builder/share_tests.rs"]
mod tests;
