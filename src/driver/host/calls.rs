//! Helpers that the calls of a software GPU (`gpu`) share: checks, submission, waits, host memory.

use super::{
    Block, Core, Engine, HostCall, HostConfig, HostGpu, HostKind, Op, Progress, Record, Work, fault,
    machine::{Owner, State},
    pages,
};
use crate::{
    driver::{Address, DeviceInfo, Driver, DriverResult, RawEvent, RawStream},
    sync::unique_id,
};
use parking_lot::MutexGuard;
use std::{sync::Arc, thread, time::Duration};

impl HostGpu {
    pub(super) fn new(owner: &Arc<Owner>, index: usize, config: &HostConfig) -> Self {
        let machine = owner.machine();
        let mut uuid = *b"software\0\0\0\0\0\0\0\0";
        uuid[8..].copy_from_slice(&unique_id().to_be_bytes());
        let uuid = super::one_gpu::here().unwrap_or(uuid);
        let info = DeviceInfo {
            ordinal: index,
            name: config.name.clone().unwrap_or_else(|| "software GPU".into()),
            uuid,
            total_memory: config.memory,
            compute_capability: (0, 0),
            pci_bus_id: String::new(),
            multiprocessors: machine.workers() as u32,
            stream_values: config.stream_values,
            concurrent_managed: true,
        };
        HostGpu { owner: owner.clone(), index, info, virtual_memory: config.virtual_memory && pages::SUPPORTED }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.owner.machine().lock()
    }

    pub(super) fn alive(&self) -> DriverResult<MutexGuard<'_, State>> {
        let state = self.lock();
        state.core.check_alive(self.index)?;
        Ok(state)
    }

    /// A refused operation is dropped after the lock is released (the guard is a local variable, the operation an
    /// argument): it may own a closure whose drop calls the driver.
    pub(super) fn submit(&self, stream: RawStream, engine: Engine, work: Work) -> DriverResult {
        let mut state = self.alive()?;
        let captures = state.core.stream(self.index, stream.0)?.capture.is_some();
        state.core.admit(self.index, &work)?;
        match captures {
            true => state.core.capture(self.index, stream.0, Op::new(engine, work)),
            false => self.owner.submit(&mut state, stream.0, Op::new(engine, work)),
        }
    }

    pub(super) fn copy(&self, dst: Address, src: Address, bytes: usize, s: RawStream, engine: Engine) -> DriverResult {
        self.submit(s, engine, Work::Copy { dst, src, bytes })
    }

    /// Refuses a word without memory behind it: streams read such words, also in a dry machine.
    pub(super) fn check_word(&self, address: Address) -> DriverResult {
        if !self.info.stream_values {
            return Err(fault::unsupported("this software GPU was made without stream memory operations"));
        }
        check_aligned(address, 8)?;
        match self.alive()?.core.memory.resolve(address, 8) {
            Ok(place) if !place.block.is_real() => Err(fault::invalid(format!(
                "the word at {address:#x} is in memory that this dry machine has no room for"
            ))),
            _ => Ok(()),
        }
    }

    pub(super) fn check_virtual(&self) -> DriverResult {
        fail_if!(!self.virtual_memory, fault::unsupported("this device has no virtual memory management"));
        Ok(())
    }

    pub(super) fn peer(&self, peer: &dyn Driver) -> Option<usize> {
        let peer = peer.as_any().downcast_ref::<HostGpu>()?;
        peer.owner.is(&self.owner).then_some(peer.index)
    }

    pub(super) fn record_of(state: &State, event: RawEvent) -> DriverResult<Option<Record>> {
        Ok(state.core.events.get(event.0).ok_or_else(|| fault::invalid_handle("event"))?.record)
    }

    pub(super) fn progress(state: &State, record: Record) -> DriverResult<bool> {
        match state.core.progress(record) {
            Progress::Pending => Ok(false),
            Progress::Done => Ok(true),
            Progress::Failed(lost) => Err(lost),
        }
    }

    /// A lost device is reported only after its running operations have ended, or after the limit.
    pub(super) fn wait(
        &self,
        record: Option<Record>,
        limit: Duration,
        state: &mut MutexGuard<'_, State>,
    ) -> DriverResult<bool> {
        if let Some(record) = record {
            self.owner.machine().wait(state, record.stream, record.seq, limit);
        }
        state.core.check_alive(self.index)?;
        let done = record.map_or(Ok(true), |record| Self::progress(state, record))?;
        if let Some(record) = record.filter(|_| done) {
            let time = state.core.streams.get(record.stream).map_or(0, |stream| stream.finish(record.seq));
            state.core.called(HostCall::Wake, time);
        }
        Ok(done)
    }

    /// If not, a stepped machine may take one step.
    pub(super) fn query(&self, record: Option<Record>, mut state: MutexGuard<'_, State>) -> DriverResult<bool> {
        let done = record.map_or(Ok(true), |record| Self::progress(&state, record))?;
        let me = thread::current().id();
        let time = match record {
            Some(record) if done => state.core.streams.get(record.stream).map_or(0, |s| s.finish(record.seq)),
            _ => 0,
        };
        state.core.called(HostCall::Query, time);
        if done {
            state.threads.acts(me)
        } else {
            state.threads.polls(me)
        }
        Ok(done)
    }

    pub(super) fn record_here(&self, state: &mut State, stream: RawStream) -> DriverResult<Record> {
        let found = state.core.stream(self.index, stream.0)?;
        Ok(Record { device: self.index, stream: stream.0, number: found.number, seq: found.submitted })
    }

    pub(super) fn host_memory(&self, bytes: usize, kind: HostKind) -> DriverResult<*mut u8> {
        check_size(bytes)?;
        drop(self.alive()?);
        // More pages than the computer has cannot be locked. The operating system would promise them and fail on use.
        if let Some(most) = pages::physical().filter(|&most| bytes as u64 > most) {
            return Err(fault::out_of_memory(bytes as u64, most));
        }
        let block = Block::zeroed(bytes).ok_or_else(|| fault::out_of_memory(bytes as u64, 0))?;
        Ok(self.alive()?.core.memory.host_insert(block, kind))
    }

    /// The call then reports the loss.
    pub(super) fn even_if_lost<R>(&self, call: impl FnOnce(&mut Core) -> DriverResult<R>) -> DriverResult<R> {
        let mut state = self.lock();
        let done = call(&mut state.core);
        state.core.check_alive(self.index).and(done)
    }
}

pub(super) fn check_size(bytes: usize) -> DriverResult {
    if bytes == 0 { Err(fault::invalid("0 bytes asked for")) } else { Ok(()) }
}

pub(super) fn check_aligned(address: Address, to: u64) -> DriverResult {
    fail_if!(!address.is_multiple_of(to), fault::invalid(format!("{address:#x} is not {to}-byte aligned")));
    Ok(())
}
