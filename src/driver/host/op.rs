//! Operations: the content of a stream's queue.

use super::{Key, Record, Time};
#[cfg(feature = "blas")]
use crate::driver::Gemm;
use crate::{
    contain::contain,
    driver::{Address, HostKernel, KernelArg, LaunchDims},
    error::op_site::OpSite,
};

pub(super) struct Op {
    pub engine: Engine,
    pub work: Work,
    /// The user's call that submitted it, for reports.
    pub place: Option<OpSite>,
    pub submitted: Time,
}

impl Op {
    /// A copy of the operation for a graph's launch; `None` for host functions and others that run only once.
    pub fn again(&self) -> Option<Self> {
        let Op { engine, place, .. } = *self;
        Some(Op { engine, work: self.work.again()?, place, submitted: 0 })
    }

    pub fn new(engine: Engine, work: Work) -> Self {
        Op { engine, work, place: OpSite::current(), submitted: 0 }
    }

    /// Whether it is soon over: waits for nothing, calls no user code, and has at most `most` bytes of operands.
    pub fn is_brief(&self, most: usize) -> bool {
        let known = match &self.work {
            Work::Copy { .. } | Work::FillU8 { .. } | Work::FillU32 { .. } | Work::WriteValue { .. } => true,
            Work::Kernel { own, .. } => *own,
            #[cfg(feature = "blas")]
            Work::Gemm(_) => false,
            Work::HostFunction(_) | Work::WaitEvent(_) | Work::Stamp { .. } | Work::WaitValue { .. } => false,
        };
        let mut bytes = 0usize;
        self.work.operands(&mut |operand| bytes = bytes.saturating_add(operand.bytes));
        known && bytes <= most
    }
}

pub(super) struct Graph {
    pub device: usize,
    pub ops: Vec<Op>,
}

/// The part of the device that an operation occupies. Each but `Compute` and `None` runs one operation at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    Up,
    Down,
    Peer,
    /// Host functions. CUDA, too, runs them on one thread per context.
    HostThread,
    /// Kernels, fills and copies inside a device. Operations of different streams may run at the same time.
    Compute,
    /// Bookkeeping that the scheduler does without a worker.
    None,
}

impl Engine {
    /// They come first in the enum.
    pub const EXCLUSIVE: usize = 4;

    pub fn exclusive(self) -> Option<usize> {
        ((self as usize) < Self::EXCLUSIVE).then_some(self as usize)
    }
}

pub(super) enum Work {
    Copy {
        dst: Address,
        src: Address,
        bytes: usize,
    },
    FillU8 {
        dst: Address,
        value: u8,
        bytes: usize,
    },
    FillU32 {
        dst: Address,
        value: u32,
        count: usize,
    },
    Kernel {
        name: &'static str,
        kernel: HostKernel,
        dims: LaunchDims,
        args: Box<[KernelArg]>,
        own: bool,
    },
    #[cfg(feature = "blas")]
    Gemm(Gemm),
    HostFunction(HostFunction),
    WaitEvent(Record),
    /// Unless the event was recorded again since.
    Stamp {
        event: Key,
        seq: u64,
    },
    WriteValue {
        address: Address,
        value: u64,
    },
    WaitValue {
        address: Address,
        value: u64,
    },
}

/// A user's function. Its drop runs user code, on a worker or in a driver call; a panic there is caught in the drop.
pub(super) struct HostFunction(Option<Box<dyn FnOnce() + Send>>);

impl HostFunction {
    pub fn new(f: Box<dyn FnOnce() + Send>) -> Self {
        HostFunction(Some(f))
    }

    pub fn call(mut self) {
        if let Some(f) = self.0.take() {
            f();
        }
    }
}

impl Drop for HostFunction {
    fn drop(&mut self) {
        let f = self.0.take();
        contain(|| drop(f));
    }
}

#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub address: Address,
    pub bytes: usize,
    pub write: bool,
}

impl Work {
    pub fn again(&self) -> Option<Work> {
        Some(match self {
            &Work::Copy { dst, src, bytes } => Work::Copy { dst, src, bytes },
            &Work::FillU8 { dst, value, bytes } => Work::FillU8 { dst, value, bytes },
            &Work::FillU32 { dst, value, count } => Work::FillU32 { dst, value, count },
            &Work::Kernel { name, kernel, dims, ref args, own } => {
                Work::Kernel { name, kernel, dims, args: args.clone(), own }
            }
            #[cfg(feature = "blas")]
            Work::Gemm(gemm) => Work::Gemm(*gemm),
            Work::HostFunction(_)
            | Work::WaitEvent(_)
            | Work::Stamp { .. }
            | Work::WriteValue { .. }
            | Work::WaitValue { .. } => return None,
        })
    }

    /// Calls `each` with the operands, in the order that [`exec`](super::exec) relies on, empty ranges included.
    pub fn operands(&self, each: &mut dyn FnMut(Operand)) {
        let mut range = |address, bytes, write| each(Operand { address, bytes, write });
        match self {
            Work::Copy { dst, src, bytes } => {
                range(*dst, *bytes, true);
                range(*src, *bytes, false);
            }
            Work::FillU8 { dst, bytes, .. } => range(*dst, *bytes, true),
            Work::FillU32 { dst, count, .. } => range(*dst, 4 * *count, true),
            Work::Kernel { args, .. } => {
                for arg in args {
                    match *arg {
                        KernelArg::Slice { address, bytes, write } => range(address, bytes, write),
                        KernelArg::Value(_) => {}
                    }
                }
            }
            #[cfg(feature = "blas")]
            Work::Gemm(g) => {
                // Also what lies between the rows: only products that could share a matrix wait for each other.
                let [a, b, c] = g.spans();
                range(a.address, a.bytes(), false);
                range(b.address, b.bytes(), false);
                range(c.address, c.bytes(), true);
            }
            Work::WriteValue { address, .. } => range(*address, 8, true),
            Work::WaitValue { address, .. } => range(*address, 8, false),
            Work::HostFunction(_) | Work::WaitEvent(_) | Work::Stamp { .. } => {}
        }
    }
}
