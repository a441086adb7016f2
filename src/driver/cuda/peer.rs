//! Peer access to another device's memory.
//!
//! CUDA keeps one right per ordered pair of contexts. Several [`CudaGpu`] objects of one device share it here; the last
//! holder revokes it, if this module has asked for it. Mapped memory (`vmm`) has separate rights, kept in step here.

use std::{collections::HashMap, ptr};

use cudarc::driver::sys::{self, CUdevice};
use once_cell::sync::Lazy;
use parking_lot::Mutex;

use super::fault::{self, PEER_ALREADY_ENABLED, SUCCESS};
use super::{CudaGpu, context::Context, vmm};
use crate::driver::{Driver, DriverResult};

struct Right {
    holders: usize,
    /// Another library may have enabled it first.
    ours: bool,
    /// Retained, so that the handle stays valid until the right is revoked.
    peer: Context,
}

/// By `(accessing device, owner of the memory)`.
static RIGHTS: Lazy<Mutex<HashMap<(CUdevice, CUdevice), Right>>> = Lazy::new(Mutex::default);

impl CudaGpu {
    pub(super) fn peer<'a>(&self, driver: &'a dyn Driver) -> DriverResult<&'a CudaGpu> {
        driver.as_any().downcast_ref().ok_or_else(|| fault::invalid("a device of another backend"))
    }

    pub(super) fn can_access_peer(&self, peer: &dyn Driver) -> DriverResult<bool> {
        self.alive()?;
        let peer = self.peer(peer)?;
        if peer.device == self.device {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: two devices of this driver; the pointer is to a live integer.
        self.check(unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.device, peer.device) })?;
        Ok(can != 0)
    }

    pub(super) fn enable_peer(&self, peer: &dyn Driver) -> DriverResult {
        self.enter()?;
        let peer = self.peer(peer)?;
        let mut mine = self.peers.lock();
        if peer.device == self.device || mine.contains(&peer.device) {
            return Ok(());
        }
        let mut rights = RIGHTS.lock();
        let key = (self.device, peer.device);
        if let Some(right) = rights.get_mut(&key) {
            right.holders += 1;
        } else {
            let mut context = ptr::null_mut();
            // SAFETY: a device of this driver; released in `give_back` or just below.
            self.check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, peer.device) })?;
            // SAFETY: our context is current, the peer's is retained.
            let ours = match fault::code(unsafe { sys::cuCtxEnablePeerAccess(context, 0) }) {
                SUCCESS => true,
                PEER_ALREADY_ENABLED => false,
                code => {
                    // SAFETY: balances the retain above.
                    let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(peer.device) };
                    return self.check_code(code, || format!("GPU {} to GPU {}", key.0, key.1));
                }
            };
            // `RIGHTS` stays locked, so no other thread sees a right without its `vmm` part.
            if let Err(code) = vmm::space(peer.device).lock().admit(self.device) {
                if ours {
                    // SAFETY: our context is current, the peer's is retained.
                    let _ = unsafe { sys::cuCtxDisablePeerAccess(context) };
                }
                // SAFETY: balances the retain above.
                let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(peer.device) };
                return self.check_code(code, || format!("GPU {} to what GPU {} has mapped", key.0, key.1));
            }
            rights.insert(key, Right { holders: 1, ours, peer: Context(context) });
        }
        mine.insert(peer.device);
        Ok(())
    }

    pub(super) fn disable_peer(&self, peer: &dyn Driver) -> DriverResult {
        self.enter()?;
        let peer = self.peer(peer)?;
        let mut mine = self.peers.lock();
        if mine.remove(&peer.device) { self.give_back(peer.device, true) } else { Ok(()) }
    }

    /// The last holder revokes the right; for that, its own context must be current.
    pub(super) fn give_back(&self, peer: CUdevice, current: bool) -> DriverResult {
        let mut rights = RIGHTS.lock();
        let key = (self.device, peer);
        let Some(right) = rights.get_mut(&key) else { return Ok(()) };
        right.holders -= 1;
        if right.holders > 0 {
            return Ok(());
        }
        let (ours, context) = (right.ours, right.peer.0);
        rights.remove(&key);
        let expelled = vmm::space(peer).lock().expel(self.device);
        let result = if ours && current {
            // SAFETY: our context is current, the peer's is retained; if the right is revoked, the call only fails.
            fault::code(unsafe { sys::cuCtxDisablePeerAccess(context) })
        } else {
            SUCCESS
        };
        // SAFETY: balances the retain in `enable_peer`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(peer) };
        // 705: another library has revoked it first.
        let result = if matches!(result, SUCCESS | 705) { expelled } else { result };
        self.check_code(result, String::new)
    }
}
