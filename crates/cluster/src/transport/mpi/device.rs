//! Memory of devices between processes, by an MPI that takes its addresses ("CUDA-aware"): nothing is staged.
//!
//! MPI knows no streams. So a call waits on the caller's thread until the stream has reached it, and returns when its
//! messages are done; later work comes behind them. MPI never reduces here: the caller sends messages, and this crate's
//! kernels add them up. Each process makes the calls of one rail in the order of commits, so the messages of two
//! processes on a rail need no number to be told apart.

use super::super::failed;
use super::super::host::Part;
use super::{Mpi, TICK};
use crate::runtime::{Address, DriverRef, RawStream};
use crate::traits::{DeviceTransport, Failure, RailCall, RailMessage, Tag, Tell};
use gpu_pool::{DType, Error, ReduceOp, Result};
use std::{ptr::with_exposed_provenance_mut, sync::Arc};

/// A tag has room for so many rails; its phase tells more of them apart.
const RAILS: usize = 64;

pub(crate) struct DeviceMpi {
    mpi: Arc<Mpi>,
    drivers: Vec<DriverRef>,
    lost: Box<dyn Fn() -> Option<Error> + Send + Sync>,
    failure: Failure,
}

impl DeviceMpi {
    /// For these devices of this process. `lost` tells why the cluster has ended, once it has.
    pub(crate) fn new(
        mpi: Arc<Mpi>,
        drivers: &[DriverRef],
        lost: impl Fn() -> Option<Error> + Send + Sync + 'static,
    ) -> DeviceMpi {
        DeviceMpi { mpi, drivers: drivers.to_vec(), lost: Box::new(lost), failure: Failure::default() }
    }

    /// Waits until the stream has done all that was submitted before the call.
    fn reach(&self, device: usize, stream: RawStream) -> Result<()> {
        let driver = &*self.drivers[device];
        while !driver.stream_wait_idle(stream, TICK).map_err(|fault| failed(device, "message", fault))? {
            (self.lost)().map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`DeviceTransport::submit`].
    unsafe fn carry(&self, device: usize, stream: RawStream, messages: &[RailMessage]) -> Result<()> {
        self.reach(device, stream)?;
        let tag = Tag { number: 0, phase: (device / RAILS) as u32, rail: (device % RAILS) as u32 };
        let part = |&RailMessage { sends, peer, at, bytes: len }: &RailMessage| {
            let at = pointer(&self.drivers[device], at, len);
            if sends { Part::Send { to: peer, tag, at, len } } else { Part::Receive { from: peer, tag, at, len } }
        };
        // The library may want the device's context.
        let _ = self.drivers[device].bind();
        // SAFETY: the caller's promise; and the stream is idle.
        unsafe { self.mpi.exchange_parts(messages.iter().map(part).collect(), &*self.lost) }
    }
}

/// An address as MPI takes it. Tests have software GPUs, whose addresses are none of this process.
#[cfg_attr(not(any(test, feature = "extend")), expect(unused_variables, reason = "a GPU's address is one"))]
fn pointer(driver: &DriverRef, at: Address, bytes: usize) -> *mut u8 {
    #[cfg(any(test, feature = "extend"))]
    if let Some(here) = crate::runtime::driver::in_process(&**driver, at, bytes) {
        return here;
    }
    with_exposed_provenance_mut(at as usize)
}

impl DeviceTransport for DeviceMpi {
    fn name(&self) -> &'static str {
        "mpi between devices"
    }

    fn can(&self, _: DType, _: ReduceOp) -> bool {
        false
    }

    fn copies(&self) -> bool {
        false
    }

    unsafe fn submit(&self, device: usize, stream: RawStream, call: &RailCall<'_>) -> Result<()> {
        self.failure.cause().map_or(Ok(()), Err)?;
        let RailCall::Messages(messages) = call else {
            let why = format!("{call:?}: only messages go between devices by MPI");
            return Err(Error::Transport { library: "mpi", op: "submit", code: 0, why });
        };
        // SAFETY: the caller's promise.
        let carried = unsafe { self.carry(device, stream, messages) };
        carried.map_err(|error| self.failure.set(&error))
    }

    fn broken(&self, error: Error) -> Error {
        self.failure.set(&error)
    }

    fn failed(&self, _: usize) -> Option<Error> {
        self.failure.cause()
    }

    fn when_failed(&self, tell: &Arc<Tell>) {
        self.failure.when(tell);
    }
}
