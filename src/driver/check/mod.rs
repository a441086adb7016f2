//! The checker: a driver around a driver that keeps account of who touched what, and which edges order it.

mod place;
mod report;

pub use report::{Allocation, Deed, Kind, Report};

pub(crate) use place::{Entered, Place};

use super::{Address, DriverRef, RawEvent, RawStream};
use std::sync::Arc;

/// What a pool's checker looks for; see [`Builder::check`](crate::Builder::check).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Check {
    /// Nothing; costs nothing.
    #[default]
    Off,
    /// Accesses that no stream, event or wait of the host orders, and their kin.
    Races,
}

/// Puts one checker around all of these devices.
pub fn wrap(drivers: Vec<DriverRef>) -> Vec<DriverRef> {
    drivers
}

/// What the devices of one [`wrap`] have done.
pub struct Checker(());

/// What one host thread knows, on its way to another.
#[derive(Clone, Default)]
pub struct Token(());

#[allow(unused_variables)]
impl Checker {
    pub(crate) fn allocated(&self, address: Address, bytes: usize, device: Option<usize>, zeroed: bool) {}
    pub(crate) fn freed(&self, address: Address) {}
    pub(crate) fn host_access(&self, address: Address, bytes: usize, write: bool) -> Result<(), Arc<Report>> {
        Ok(())
    }
    pub(crate) fn lent(
        &self,
        device: usize,
        stream: RawStream,
        address: Address,
        bytes: usize,
        write: bool,
    ) -> Result<(), Arc<Report>> {
        Ok(())
    }
    pub(crate) fn publish(&self, device: usize, stream: RawStream) {}
    pub(crate) fn observe(&self, device: usize, stream: RawStream) {}
    pub(crate) fn forget_event(&self, device: usize, event: RawEvent) {}
    /// What the calling host thread knows: for handing work to another thread by means the crate cannot see.
    pub fn release(&self) -> Token {
        Token(())
    }
    /// The calling host thread comes to know what another one has [released](Self::release).
    pub fn acquire(&self, token: &Token) {}
}
