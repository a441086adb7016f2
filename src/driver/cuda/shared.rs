//! The crate's own modules: all pools of a process share them on a GPU.
//!
//! Loading a module takes half a millisecond on each GPU, under a lock that all GPUs of the process share: on two H200s
//! more than half of the set-up of a second pool. The crate's modules have no variables (`kernels/build.py` checks
//! that), so users cannot affect each other. Users' modules may have some, so each pool loads those separately.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use cudarc::driver::sys::CUdevice;
use parking_lot::Mutex;

use crate::driver::{DriverResult, ModuleImage, RawModule};

#[derive(Default)]
pub(super) struct Shared(Mutex<HashMap<Key, Loaded>>);

type Key = (usize, usize);

struct Loaded {
    module: RawModule,
    users: usize,
}

fn key(image: &ModuleImage) -> Key {
    (image.ptx.map_or(0, |ptx| ptx.as_ptr().addr()), image.cubins.as_ptr().addr())
}

impl Shared {
    /// The caller has retained the device's primary context, and drops the value before it releases the context. So all
    /// holders of the value have retained the same context.
    pub(super) fn of(device: CUdevice) -> Arc<Shared> {
        static ALL: Mutex<Vec<(CUdevice, Weak<Shared>)>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        if let Some(shared) = all.iter().filter(|(of, _)| *of == device).find_map(|(_, shared)| shared.upgrade()) {
            return shared;
        }
        let shared = Arc::default();
        all.retain(|(_, shared)| shared.strong_count() > 0);
        all.push((device, Arc::downgrade(&shared)));
        shared
    }

    /// The first caller loads it; other callers wait for that.
    pub(super) fn load(
        &self,
        image: &ModuleImage,
        load: impl FnOnce() -> DriverResult<RawModule>,
    ) -> DriverResult<RawModule> {
        let mut all = self.0.lock();
        if let Some(loaded) = all.get_mut(&key(image)) {
            loaded.users += 1;
            return Ok(loaded.module);
        }
        let module = load()?;
        all.insert(key(image), Loaded { module, users: 1 });
        Ok(module)
    }

    /// A module without users, or one that was not shared, is unloaded.
    pub(super) fn unload(&self, module: RawModule, unload: impl FnOnce() -> DriverResult) -> DriverResult {
        let mut all = self.0.lock();
        if let Some((&key, loaded)) = all.iter_mut().find(|(_, loaded)| loaded.module == module) {
            loaded.users -= 1;
            if loaded.users > 0 {
                return Ok(());
            }
            all.remove(&key);
        }
        // Under the lock, since the next loaded module may get the same handle.
        unload()
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/shared_tests.rs"]
mod tests;
