//! Temporary.
use super::{block::ChunkKind, hazard::History, link::Link};
use crate::driver::{Address, DriverResult, check::Token};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};
/// Choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackingChoice {
    /// Auto.
    #[default]
    Auto,
}
pub(crate) struct Mapping {
    pub region: u32,
    pub home: Arc<Region>,
    pub address: Address,
    pub bytes: u64,
}
pub(crate) struct Region {
    link: Arc<Link>,
    id: u32,
    kind: ChunkKind,
    address: Address,
    state: Mutex<(bool, Option<Box<Token>>)>,
}
impl Region {
    pub(crate) fn id(&self) -> u32 {
        self.id
    }
    pub(crate) fn is_empty(&self) -> bool {
        !self.state.lock().0
    }
    pub(crate) fn managed(link: &Arc<Link>, address: Address, _bytes: usize) -> Arc<Self> {
        Arc::new(Region {
            link: link.clone(),
            id: 0,
            kind: ChunkKind::Managed,
            address,
            state: Mutex::new((true, None)),
        })
    }
    pub(crate) fn let_go(self: &Arc<Self>, history: &History, bytes: usize) {
        self.link.acquire(history.known());
        if !history.all_completed() && !self.link.planted(crate::plant::Bug::ChunkReleasedEarly) {
            tracing::warn!(device = self.link.device, bytes, "memory still in use was leaked");
            std::mem::forget(self.clone());
        } else {
            Token::add(&mut self.state.lock().1, self.link.release());
        }
    }
    unsafe fn free(&self) -> DriverResult {
        let mut state = self.state.lock();
        if !state.0 {
            return Ok(());
        }
        self.link.acquire(state.1.as_deref());
        let driver = &self.link.driver;
        // SAFETY: temporary
        let freed = unsafe {
            match self.kind {
                ChunkKind::Device => driver.mem_free(self.address),
                ChunkKind::Pinned => driver.host_free(self.address as *mut u8),
                ChunkKind::Managed => driver.managed_free(self.address as *mut u8),
            }
        };
        if freed.is_ok() {
            state.0 = false;
        }
        freed
    }
}
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: temporary
        if let Err(fault) = unsafe { self.free() } {
            tracing::warn!(device = self.link.device, %fault, "memory could not be given back");
            if let Some(report) = fault.report {
                self.link.refuse(report);
            }
        }
    }
}
pub(crate) trait Backing: Send {
    fn reserved(&self) -> u64;
    fn driver_calls(&self) -> u64;
    fn can_move(&self) -> bool;
    fn missing(&self, bytes: u64, free: &dyn Fn(u32, Address) -> (u64, u64)) -> u64;
    fn grow(
        &mut self,
        bytes: u64,
        unit: u64,
        budget: u64,
        free: &dyn Fn(u32, Address) -> (u64, u64),
    ) -> DriverResult<SmallVec<[Mapping; 4]>>;
    fn units_in(&self, region: u32, range: Range<Address>) -> Vec<Range<Address>>;
    fn units(&self) -> Vec<(Address, u64)>;
    unsafe fn unmap(&mut self, region: u32, unit: Range<Address>) -> DriverResult;
    #[allow(clippy::type_complexity)]
    unsafe fn move_units(
        &mut self,
        from: &[(u32, Range<Address>)],
        bytes: u64,
        free: &dyn Fn(u32, Address) -> (u64, u64),
    ) -> DriverResult<(SmallVec<[Mapping; 4]>, Vec<(u32, Range<Address>)>)>;
}
struct Malloc {
    link: Arc<Link>,
    kind: ChunkKind,
    all: Vec<(u32, Range<Address>, Arc<Region>)>,
    next: u32,
    calls: u64,
}
impl Backing for Malloc {
    fn reserved(&self) -> u64 {
        self.all.iter().map(|(_, r, _)| r.end - r.start).sum()
    }
    fn driver_calls(&self) -> u64 {
        self.calls
    }
    fn can_move(&self) -> bool {
        false
    }
    fn missing(&self, bytes: u64, _: &dyn Fn(u32, Address) -> (u64, u64)) -> u64 {
        bytes
    }
    fn grow(
        &mut self,
        bytes: u64,
        unit: u64,
        budget: u64,
        _: &dyn Fn(u32, Address) -> (u64, u64),
    ) -> DriverResult<SmallVec<[Mapping; 4]>> {
        let bytes = bytes.max(unit);
        if bytes > budget {
            return Err(crate::driver::Fault {
                kind: crate::driver::FaultKind::OutOfMemory,
                code: 2,
                name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
                detail: String::new(),
                report: None,
            });
        }
        self.calls += 1;
        let driver = &self.link.driver;
        let address = match self.kind {
            ChunkKind::Device => driver.mem_alloc(bytes as usize)?,
            _ => driver.host_alloc(bytes as usize)? as u64,
        };
        let id = self.next;
        self.next += 1;
        let home =
            Arc::new(Region { link: self.link.clone(), id, kind: self.kind, address, state: Mutex::new((true, None)) });
        self.all.push((id, address..address + bytes, home.clone()));
        Ok(SmallVec::from_iter([Mapping { region: id, home, address, bytes }]))
    }
    fn units_in(&self, region: u32, range: Range<Address>) -> Vec<Range<Address>> {
        self.all.iter().filter(|(id, r, _)| *id == region && *r == range).map(|(_, r, _)| r.clone()).collect()
    }
    fn units(&self) -> Vec<(Address, u64)> {
        self.all.iter().map(|(_, r, _)| (r.start, r.end - r.start)).collect()
    }
    unsafe fn unmap(&mut self, region: u32, _: Range<Address>) -> DriverResult {
        let at = self.all.iter().position(|a| a.0 == region).unwrap();
        self.calls += 1;
        // SAFETY: temporary
        unsafe { self.all[at].2.free()? };
        self.all.swap_remove(at);
        Ok(())
    }
    unsafe fn move_units(
        &mut self,
        _: &[(u32, Range<Address>)],
        _: u64,
        _: &dyn Fn(u32, Address) -> (u64, u64),
    ) -> DriverResult<(SmallVec<[Mapping; 4]>, Vec<(u32, Range<Address>)>)> {
        unreachable!()
    }
}
pub(crate) fn open(link: &Arc<Link>, kind: ChunkKind, _: BackingChoice) -> crate::Result<Box<dyn Backing>> {
    Ok(Box::new(Malloc { link: link.clone(), kind, all: Vec::new(), next: 1, calls: 0 }))
}
