//! Several devices of a pool on one GPU: for tests of what needs more devices than there are GPUs, with the kernels of
//! GPUs.
//!
//! Where the crate would take one for the other, it goes by these: the object of the driver and not the UUID (fault
//! plans); a place on the GPU ([`GpuOrder`](crate::gang::gpu_order::Turns)); how many share it
//! ([`DeviceHandle::sharers`](crate::memory::handle::DeviceHandle)).
//!
//! **Kernels that wait for each other** must all get to run. Those of one GPU do, if all their blocks fit on it at once
//! ([`multiprocessors`](crate::fabric::limits::multiprocessors)), and if none is behind something that waits for
//! it. Streams are served through a few hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`: 8 unless set, 32 at most), each
//! in the order of submission (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars>). Kernels of
//! different streams that follow each other in a queue run side by side all the same
//! (<https://github.com/NVIDIA/Megatron-LM/issues/533> relies on it); but what waits for a kernel, such as the next one
//! of its stream, holds up all that is behind it. So a device that shares its GPU submits nothing after such a kernel
//! before all that are to be launched have been (`LaunchWindow` of `collective/commit.rs`).
//! Then what a kernel is behind of waits at most for kernels whose peers were all launched before this one, and so, the
//! earliest first, all of them end. A launch that waits for room in a queue with the context's lock held stops nobody
//! either, for the same reason. A graph is submitted as a whole: its kernels need queues of their own.
//!
//! What is left: a device that is no member of a meeting may wait for a member's stream (a copy from its buffer, across
//! groups) after that one's launch and before another's. With three devices on a GPU and more streams than queues, that
//! wait may be in front of the other launch; then the deadline ends it.
//!
//! **Driver calls that wait for all kernels of a context**, now those of several devices: the [launch
//! gate](crate::sync::LaunchGate) is the process's, and lets such a call begin only when the peers of every kernel that
//! waits are launched. That is enough for one context as for several.

use super::Builder;
use crate::error::{Error, Result};
use std::collections::HashMap;

/// The most that a GPU is opened: no kernel meets more.
const MOST: usize = crate::fabric::layout::MOST;

/// Whether a CUDA GPU may be several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    Never,
    /// If it is listed several times.
    Listed,
    /// The same, and all that is listed is opened so many times.
    Times(usize),
}

impl Builder {
    /// Lets one CUDA GPU be several devices: `devices(&[0, 0, 0, 1, 1])` is a pool of five on two GPUs, where it would
    /// be an error. **For tests** of code that needs more devices than there are GPUs, and for teaching. It is never
    /// faster.
    ///
    /// Each device has its thread, its streams, its memory pool and its part in collectives. They have one context, so
    /// what loses one loses all.
    /// * A device takes at most its part of the GPU's memory, unless [`memory_limit`](Self::memory_limit) says
    ///   otherwise; [`memory_limit_percent`](Self::memory_limit_percent) is of its part.
    /// * Kernels of collectives are small enough to run side by side, and go by the default limits, whatever
    ///   [`tune`](Self::tune) says.
    /// * Start the process with `CUDA_DEVICE_MAX_CONNECTIONS=32`: with fewer hardware queues streams of several devices
    ///   share one, and graphs whose kernels wait for each other may then wait until the [`timeout`](Self::timeout).
    ///   The builder warns (by `tracing`); it cannot set the variable, which the driver reads once.
    ///
    /// `GPU_POOL_SHARE=4` does it for a program as it is: every device that would be opened is opened four times, in
    /// the order `0,1,0,1,..`. With `GPU_POOL_SHARE=1` the list in `GPU_POOL_DEVICES` may name a GPU several times.
    /// What is said here wins.
    ///
    /// One GPU can be 16 devices at most. Of software GPUs there can be as many as one likes; one that is listed twice
    /// is an error, as ever.
    ///
    /// ```
    /// # use gpu_pool::{Error, GpuPool};
    /// let crowd = GpuPool::builder().cuda().devices(&[0; 8]).share_gpus(true).build();
    /// if let Ok(pool) = crowd {
    ///     assert_eq!(pool.devices(), 8);
    ///     assert!(pool.report().shares_gpus());
    /// } // else there is no GPU here
    ///
    /// let software = GpuPool::builder().host(2).devices(&[0, 0]).share_gpus(true).build();
    /// assert!(matches!(software, Err(Error::InvalidArgument { .. })));
    /// ```
    pub fn share_gpus(mut self, share: bool) -> Self {
        self.sharing = Some(if share { Sharing::Listed } else { Sharing::Never });
        self
    }

    /// Whether the list of CUDA devices may name one several times.
    pub(super) fn shares(&self) -> bool {
        !matches!(self.sharing, None | Some(Sharing::Never))
    }

    /// The ordinals of CUDA devices to open for these.
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
        let queues = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
        if shared && !are_plenty(queues.as_deref()) {
            event!(
                warn,
                ?ordinals,
                "GPUs are shared, and CUDA_DEVICE_MAX_CONNECTIONS is not 32: kernels that wait for each other may be in one queue"
            );
        }
        Ok(ordinals)
    }
}

/// Whether there are as many hardware queues as there can be.
fn are_plenty(queues: Option<&str>) -> bool {
    queues.and_then(|queues| queues.trim().parse().ok()).is_some_and(|queues: u32| queues >= 32)
}

/// `GPU_POOL_SHARE`.
pub(super) fn parse(text: &str) -> Option<Sharing> {
    let times = text.parse().ok()?;
    (1..=MOST).contains(&times).then_some(Sharing::Times(times))
}

/// Where a device is on its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// How many devices of the pool before it are there, too,
    pub place: usize,
    /// and how many there are in all.
    pub sharers: usize,
}

/// The seats of devices, by the UUIDs of their GPUs.
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
#[path = "share_tests.rs"]
mod tests;
