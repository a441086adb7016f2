//! NCCL between the devices of one process, for `gpu-pool bench`, which times it beside this crate's collectives: a
//! communicator with one rank on each device's thread. Nothing watches it: a rank that does not come holds the others.

use super::{
    library::{Comm, Config, Library, UniqueId, code},
    operation,
    rail::pointer,
};
use crate::{internals::*, runtime::driver::blocking};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, Element, ReduceOp, Result};
use std::{ffi::c_int, ptr::null_mut};

/// An operation of all ranks, with its reduction and its root.
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's names")]
pub enum Op {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast(usize),
    Reduce(ReduceOp, usize),
    AllToAll,
    /// To the next rank, from the one before.
    SendRecv,
}

/// The ranks of a communicator find each other by it.
#[derive(Clone, Copy)]
pub struct Id {
    pub(super) library: &'static Library,
    pub(super) id: UniqueId,
}

impl Id {
    /// A new identifier. `Error::Cluster` if no usable library is found.
    pub fn new() -> Result<Id> {
        let library = Library::get()?;
        Ok(Id { library, id: library.unique_id()? })
    }

    /// The library's version.
    pub fn version(&self) -> String {
        self.library.version()
    }
}

/// A rank of a communicator. It stays on its device's thread.
pub struct Peer {
    library: &'static Library,
    pub(super) comm: Comm,
}

impl Peer {
    /// Joins as the device's rank. All devices of the scope do so, and wait for each other.
    pub fn join(dev: &Device, Id { library, id }: Id) -> Result<Peer> {
        // NCCL takes the device from the thread's context. It allocates memory and loads kernels.
        let (_bound, _blocking) = (dev.handle().driver.bind(), blocking());
        let (mut comm, size, rank) = (null_mut(), dev.count() as c_int, dev.rank() as c_int);
        // SAFETY: the pointers are to live values, and the configuration is initialised as the header does.
        let code = unsafe { (library.f.init_rank)(&mut comm, size, id, rank, &mut Config::blocking()) };
        let peer = Peer { library, comm };
        peer.check(dev, "ncclCommInitRankConfig", code).map(|()| peer)
    }

    /// Submits so many calls to the device's stream, from `src` to `dst` or within `dst`. All ranks do so. For an
    /// all-gather or a reduce-scatter within `dst` the rank's part is in its place.
    ///
    /// # Errors
    /// `Error::Transport`: NCCL's; for lengths that do not fit, or a reduction that NCCL does not have.
    pub fn submit<T: Element>(
        &self,
        dev: &Device,
        op: Op,
        src: Option<&DeviceBuffer<T>>,
        dst: &mut DeviceBuffer<T>,
        calls: u32,
    ) -> Result<()> {
        let (rank, size) = (dev.rank(), dev.count());
        let total = src.map_or(0, |src| src.len()).max(dst.len());
        let part = total / size;
        let lengths = match op {
            Op::AllGather if src.is_some() => [part, total],
            Op::ReduceScatter(_) if src.is_some() => [total, part],
            _ => [total, total],
        };
        let fits = part * size == total && lengths == [src.map_or(total, |src| src.len()), dst.len()];
        let reduction = match op {
            Op::AllReduce(reduce) | Op::ReduceScatter(reduce) | Op::Reduce(reduce, _) => known(reduce),
            _ => Some(0),
        };
        let (true, Some(reduction)) = (fits, reduction) else { return self.check(dev, "submit", code::INVALID_USAGE) };
        let mut uses = dev.op("nccl")?;
        src.map_or(Ok(()), |src| uses.reads(&src.view()))?;
        uses.writes(&dst.view_mut())?;
        let (at, bytes) = (dst.address(), part * size_of::<T>());
        let own = at + (rank * bytes) as u64;
        let [from, to] = match (src, op) {
            (Some(src), _) => [src.address(), at],
            (None, Op::AllGather) => [own, at],
            (None, Op::ReduceScatter(_)) => [at, own],
            (None, _) => [at, at],
        };
        let (from, to, stream) = (pointer(from), pointer(to), pointer(dev.core().raw.0));
        let (f, comm, dtype) = (&self.library.f, self.comm, operation::dtype(T::DTYPE));
        let [before, next] = [size - 1, 1].map(|further| ((rank + further) % size) as c_int);
        // SAFETY: a live communicator on its thread. Buffers are this device's, ordered on this stream and long enough.
        let call = || unsafe {
            match op {
                Op::AllReduce(_) => (f.all_reduce)(from, to, total, dtype, reduction, comm, stream),
                Op::ReduceScatter(_) => (f.reduce_scatter)(from, to, part, dtype, reduction, comm, stream),
                Op::Reduce(_, root) => (f.reduce)(from, to, total, dtype, reduction, root as c_int, comm, stream),
                Op::AllGather => (f.all_gather)(from, to, part, dtype, comm, stream),
                Op::Broadcast(root) => (f.broadcast)(from, to, total, dtype, root as c_int, comm, stream),
                // The end of a group returns the first error in it.
                Op::AllToAll => {
                    (f.group_start)();
                    for other in 0..size {
                        let at = other * bytes;
                        (f.send)(from.byte_add(at), part, dtype, other as c_int, comm, stream);
                        (f.recv)(to.byte_add(at), part, dtype, other as c_int, comm, stream);
                    }
                    (f.group_end)()
                }
                Op::SendRecv => {
                    (f.group_start)();
                    (f.send)(from, total, dtype, next, comm, stream);
                    (f.recv)(to, total, dtype, before, comm, stream);
                    (f.group_end)()
                }
            }
        };
        let done = (0..calls).try_for_each(|_| self.check(dev, "submit", call()));
        // Also after an error: other calls are in the stream.
        uses.submitted();
        done
    }

    fn check(&self, dev: &Device, op: &'static str, code: c_int) -> Result<()> {
        let place = || format!("device {} of {}", dev.index(), dev.count());
        if code == code::SUCCESS { Ok(()) } else { Err(self.library.error(op, code, &place())) }
    }
}

/// `ncclRedOp_t`.
fn known(reduce: ReduceOp) -> Option<c_int> {
    let all = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg];
    all.iter().position(|known| *known == reduce).map(|at| at as c_int)
}

impl Drop for Peer {
    fn drop(&mut self) {
        if !self.comm.is_null() {
            // SAFETY: the last use, on the thread that made it.
            unsafe { (self.library.f.destroy)(self.comm) };
        }
    }
}
