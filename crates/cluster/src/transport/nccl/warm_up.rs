//! The first calls of a rail.
//!
//! NCCL connects each algorithm, and each pair of hosts, at first use: it allocates memory then, and waits for the
//! other hosts. Between collectives that would hang (nccl#549), so it is done when the pool is built. NCCL chooses an
//! algorithm by call and size; small, middle and large calls reach those of one device per host (tree, ring, PAT).

use super::rail::{Rail, Until};
use super::{RailCall, RailMessage, failed};
use crate::runtime::{Address, DriverResult, Fault, RawStream};
use gpu_pool::{DType, ReduceOp, Result};
use std::{
    thread,
    time::{Duration, Instant},
};

const SIZES: [usize; 4] = [256, 64 << 10, 1 << 20, 16 << 20];

const MESSAGE: usize = 256;

impl Rail {
    /// Makes one call of each kind and size, and waits for the device. All hosts of the rail do so.
    pub(super) fn warm_up(&self, host: usize, until: Until<'_>) -> Result<()> {
        let driver = &self.driver;
        let stream = self.driver("create a stream", driver.stream_create(0))?;
        let bytes = SIZES[SIZES.len() - 1].max(2 * MESSAGE * self.hosts.len());
        let warmed = self.driver("allocate", driver.mem_alloc(bytes)).and_then(|at| {
            // SAFETY: the memory and the stream are this function's own, and live until `idle` has returned.
            let made = unsafe { self.first_calls(host, at, bytes, stream) };
            let made = made.and_then(|()| self.idle(stream, until));
            if made.is_ok() {
                // SAFETY: the stream is idle, so nothing names the memory.
                self.driver("free", unsafe { driver.mem_free(at) })?;
            }
            // After an error kernels may still wait in it; the cluster has failed then, and this is 16 MiB.
            made
        });
        // SAFETY: this function's own stream, not used again.
        let destroyed = self.driver("destroy a stream", unsafe { driver.stream_destroy(stream) });
        warmed.and(destroyed)
    }

    /// # Safety
    /// `bytes` bytes at `at` are this device's memory, unused by others until the stream is idle, or for ever.
    unsafe fn first_calls(&self, host: usize, at: Address, bytes: usize, stream: RawStream) -> Result<()> {
        let (reduce, dtype) = (ReduceOp::Sum, DType::F32);
        let ranks = self.hosts.len();
        let rank = self.hosts.iter().position(|&member| member == host).unwrap_or(0);
        // SAFETY: the caller's memory and stream.
        self.driver("fill", unsafe { self.driver.fill_u8(at, 0, bytes, stream) })?;
        // SAFETY: all ranges of these calls are in the caller's memory: in place, as NCCL defines it.
        let enqueue = |call: RailCall<'_>| unsafe { self.enqueue(stream, &call) };
        for size in SIZES {
            // Of one host, in whole elements.
            let part = (size / ranks).max(4) & !3;
            let own = at + (rank * part) as u64;
            enqueue(RailCall::AllReduce { source: at, destination: at, len: size / 4, dtype, reduce })?;
            if part * ranks <= bytes {
                let (len, parts) = (part / 4, ranks);
                enqueue(RailCall::ReduceScatter { source: at, destination: own, len, parts, dtype, reduce })?;
                enqueue(RailCall::AllGather { source: own, destination: at, bytes: part, parts })?;
            }
            enqueue(RailCall::Broadcast { at, bytes: size, root: self.hosts[0] })?;
        }
        let mut messages = Vec::with_capacity(2 * ranks);
        for (rank, &peer) in self.hosts.iter().enumerate() {
            let at = at + (2 * MESSAGE * rank) as u64;
            messages.push(RailMessage::send(peer, at, MESSAGE));
            messages.push(RailMessage::receive(peer, at + MESSAGE as u64, MESSAGE));
        }
        enqueue(RailCall::Messages(&messages))
    }

    fn idle(&self, stream: RawStream, until: Until<'_>) -> Result<()> {
        let start = Instant::now();
        while !self.driver("wait", self.driver.stream_query(stream))? {
            self.check("ncclCommGetAsyncError")?;
            until.check("warm up", start, self)?;
            thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn driver<T>(&self, what: &'static str, result: DriverResult<T>) -> Result<T> {
        result.map_err(|fault| {
            let colon = if fault.detail.is_empty() { "" } else { ": " };
            let detail = format!(": {what}{colon}{}", fault.detail);
            failed(self.device, "connect", Fault { detail, ..fault })
        })
    }
}
