//! Memory that a rail's communicator knows, so that its calls need no copies through NCCL's own buffers.
//!
//! `ncclCommRegister` notes pages, and NCCL's transports take them when a call names them first. The rules of
//! registration follow from that (NCCL 2.19 to 2.30, `register.cc`, `transport/p2p.cc`, and the user guide):
//!
//! * **A chunk of its own.** NCCL rounds to pages of 4 KiB, in which the pool may have other blocks; and it takes the
//!   physical memory behind the first byte for all of it, while a block of the pool may lie in several.
//! * **All ranks, or none.** A call with registered memory on some ranks only is undefined in NCCL. The callers see to
//!   that ([`DeviceTransport::register`]).
//! * **Once.** A chunk that is registered again has one registration, which is counted here: `ncclCommDeregister` of
//!   one that NCCL counts leaves another device current on the thread (nccl#2259).
//! * **Until all uses are over**, and not after the communicator: its end, orderly or by an abort, ends all of them.
//!   Until then the rail keeps their memory, also after an abort that hangs.
//!
//! [`DeviceTransport::register`]: crate::traits::DeviceTransport::register

use super::rail::{Rail, pointer};
use crate::runtime::{Access, Address, BlockRef, blocking};
use gpu_pool::{Error, Result, event};
use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::Arc,
    time::{Duration, Instant},
};

/// How often a wait for the last uses looks whether the communicator has ended.
const TICK: Duration = Duration::from_millis(20);

pub(super) struct Registration {
    chunk: BlockRef,
    handle: *mut c_void,
    users: usize,
}

// SAFETY: NCCL's handles belong to no thread; calls with one take turns by the rail's lock.
unsafe impl Send for Registration {}

impl Rail {
    /// The distance from the beginning of its chunk, if the communicator knows this memory.
    pub(super) fn registered_at(&self, at: Address) -> Option<u64> {
        let inside =
            |of: &Registration| (of.chunk.address()..of.chunk.address() + of.chunk.size() as u64).contains(&at);
        self.registered.lock().iter().find(|of| inside(of)).map(|of| at - of.chunk.address())
    }

    /// The communicator has ended, and with it all registrations.
    pub(super) fn forget_registered(&self) {
        self.registered.lock().clear();
    }

    /// Waits until no use of the chunk is in flight. False: it does not end, or the communicator has.
    fn is_at_rest(&self, chunk: &BlockRef, limit: Duration) -> bool {
        let start = Instant::now();
        loop {
            match chunk.wait_host("ncclCommDeregister", Access::Write, TICK) {
                Ok(()) => return true,
                Err(Error::Timeout { .. }) if !self.has_ended() && start.elapsed() < limit => {}
                Err(_) => return false,
            }
        }
    }
}

/// One user of a registration.
pub(super) struct Registered {
    rail: Arc<Rail>,
    at: Address,
    limit: Duration,
}

impl Registered {
    /// None if NCCL was told to register nothing (`NCCL_LOCAL_REGISTER=0`).
    pub(super) fn new(rail: &Arc<Rail>, chunk: &BlockRef, limit: Duration) -> Result<Option<Self>> {
        let mut all = rail.registered.lock();
        // An end, or an error, is one here, too.
        rail.check("ncclCommRegister")?;
        match all.iter_mut().find(|known| known.chunk.address() == chunk.address()) {
            Some(known) => known.users += 1,
            None => {
                let mut handle = null_mut();
                rail.call("ncclCommRegister", |comm| {
                    // SAFETY: a live communicator and a live chunk, which the rail keeps until this is undone; the
                    // pointer is to a live value.
                    unsafe { (rail.library.f.register)(comm, pointer(chunk.address()), chunk.size(), &mut handle) }
                })?;
                if handle.is_null() {
                    return Ok(None);
                }
                all.push(Registration { chunk: chunk.clone(), handle, users: 1 });
            }
        }
        Ok(Some(Registered { rail: rail.clone(), at: chunk.address(), limit }))
    }
}

impl Drop for Registered {
    /// On the device's thread, between its calls: so it may wait for kernels.
    fn drop(&mut self) {
        let rail = &*self.rail;
        let mut all = rail.registered.lock();
        // None: the communicator has ended.
        let Some(at) = all.iter().position(|known| known.chunk.address() == self.at) else { return };
        all[at].users = all[at].users.saturating_sub(1);
        if all[at].users > 0 {
            return;
        }
        let chunk = all[at].chunk.clone();
        let kept = |why: &dyn std::fmt::Display| {
            let text = "memory stays registered with NCCL, and is kept, until";
            event!(warn, "registration_kept", "{text} {rail} ends: {why}");
        };
        if !rail.is_at_rest(&chunk, self.limit) {
            return kept(&"its uses do not end");
        }
        let handle = all[at].handle;
        // It may unmap memory of peers, and for that wait for kernels.
        let _blocking = blocking();
        // It takes the device's context, and sets the one back that it has found.
        let _ = rail.driver.bind();
        // SAFETY: a live communicator, whose registration this is; it leaves the list, so this is its last use.
        let undone = rail.call("ncclCommDeregister", |comm| unsafe { (rail.library.f.deregister)(comm, handle) });
        match undone {
            Ok(()) => drop(all.swap_remove(at)),
            // The communicator is about to end, and with it the registration.
            Err(error) => kept(&error),
        }
    }
}
