//! Calls of rails in NCCL's words.

use super::library::{Comm, code, misuse};
use super::operation::{self, Reduction};
use super::rail::{Rail, pointer};
use super::{RailCall, RailMessage};
use crate::runtime::RawStream;
use gpu_pool::{DType, ReduceOp, Result};
use std::ffi::{c_int, c_void};

impl Rail {
    /// Submits a call to the stream, and returns when it is launched.
    ///
    /// # Safety
    /// As [`DeviceTransport::submit`](super::DeviceTransport::submit).
    pub(super) unsafe fn enqueue(&self, stream: RawStream, call: &RailCall<'_>) -> Result<()> {
        let (f, stream) = (&self.library.f, pointer(stream.0));
        let byte = operation::dtype(DType::U8);
        match *call {
            RailCall::AllReduce { source, destination, len, dtype, reduce }
            | RailCall::ReduceScatter { source, destination, len, dtype, reduce, .. } => {
                let (name, sum) = match call {
                    RailCall::AllReduce { .. } => ("ncclAllReduce", f.all_reduce),
                    _ => ("ncclReduceScatter", f.reduce_scatter),
                };
                self.reduce(name, dtype, reduce, |comm, op| {
                    let dtype = operation::dtype(dtype);
                    // SAFETY: the caller's promise; a live communicator.
                    unsafe { sum(pointer(source), pointer(destination), len, dtype, op, comm, stream) }
                })
            }
            RailCall::AllGather { source, destination, bytes, .. } => self.call("ncclAllGather", |comm| {
                // SAFETY: the caller's promise; a live communicator.
                unsafe { (f.all_gather)(pointer(source), pointer(destination), bytes, byte, comm, stream) }
            }),
            RailCall::Broadcast { at, bytes, root } => {
                let root = self.rank("ncclBroadcast", root)?;
                self.call("ncclBroadcast", |comm| {
                    // SAFETY: the caller's promise; a live communicator.
                    unsafe { (f.broadcast)(pointer(at), pointer(at), bytes, byte, root, comm, stream) }
                })
            }
            RailCall::Messages(messages) => {
                let ranked = |message: &RailMessage| {
                    let op = if message.sends { "ncclSend" } else { "ncclRecv" };
                    Ok((self.rank(op, message.peer)?, *message))
                };
                let messages = messages.iter().map(ranked).collect::<Result<Vec<_>>>()?;
                // SAFETY: the caller's promise; a live communicator.
                self.call("ncclGroupEnd", |comm| unsafe { self.messages(comm, &messages, stream) })
            }
        }
    }

    /// A call that combines elements. The operator of a factor lives as long as the call.
    fn reduce(
        &self,
        name: &'static str,
        dtype: DType,
        reduce: ReduceOp,
        call: impl FnOnce(Comm, c_int) -> c_int,
    ) -> Result<()> {
        match operation::reduction(dtype, reduce) {
            Some(Reduction::Known(op)) => self.call(name, |comm| call(comm, op)),
            Some(Reduction::Scaled(mut factor)) => {
                /// `ncclScalarHostImmediate`: the factor is read before the call returns.
                const HOST_IMMEDIATE: c_int = 1;
                let mut op = 0;
                self.call("ncclRedOpCreatePreMulSum", |comm| {
                    let factor = factor.as_mut_ptr().cast();
                    let dtype = operation::dtype(dtype);
                    // SAFETY: the pointers are to live values, the factor's of this type; a live communicator.
                    unsafe { (self.library.f.scaled_create)(&mut op, factor, dtype, HOST_IMMEDIATE, comm) }
                })?;
                self.call(name, |comm| call(comm, op))?;
                self.call("ncclRedOpDestroy", |comm| {
                    // SAFETY: an operator of this live communicator, whose only call has been launched.
                    unsafe { (self.library.f.scaled_destroy)(op, comm) }
                })
            }
            None => Err(misuse(name, format!("NCCL has no {reduce} of {dtype:?} by this crate's rules, on {self}"))),
        }
    }

    /// All messages in one group, by rank: the first error, else the code of its end. Both ends leave empty ones out.
    ///
    /// # Safety
    /// As [`enqueue`](Self::enqueue); the communicator is live.
    unsafe fn messages(&self, comm: Comm, messages: &[(c_int, RailMessage)], stream: *mut c_void) -> c_int {
        let f = &self.library.f;
        let byte = operation::dtype(DType::U8);
        let failed = |code: &c_int| *code != code::SUCCESS;
        // SAFETY: starts a group of this thread, which the call below ends.
        let start = unsafe { (f.group_start)() };
        if failed(&start) {
            return start;
        }
        let mut codes = messages.iter().map(|&(rank, RailMessage { sends, at, bytes, .. })| match sends {
            _ if bytes == 0 => code::SUCCESS,
            // SAFETY: the caller's promise.
            true => unsafe { (f.send)(pointer(at), bytes, byte, rank, comm, stream) },
            // SAFETY: the caller's promise.
            false => unsafe { (f.recv)(pointer(at), bytes, byte, rank, comm, stream) },
        });
        let error = codes.find(failed);
        // SAFETY: ends this thread's group, also after an error.
        let end = unsafe { (f.group_end)() };
        error.unwrap_or(end)
    }

    fn rank(&self, op: &'static str, host: usize) -> Result<c_int> {
        match self.hosts.iter().position(|&member| member == host) {
            Some(rank) => Ok(rank as c_int),
            None => Err(misuse(op, format!("host {host} has no device on this rail, on {self}"))),
        }
    }
}
