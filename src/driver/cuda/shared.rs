//! The crate's own modules: all pools of a process share them on a GPU.
//!
//! Loading a module takes half a millisecond on each GPU, under a lock that all GPUs of the process share. On two H200s
//! that was more than half of the set-up of a second pool (`gpu/setup/2` in `benches/results`: 17.8 ms before, 7.8 ms
//! now). The crate's modules have no variables (`kernels/build.py` checks that), so users cannot affect each other.
//! Users' modules may have variables, which another pool's kernels must not change: so each pool loads them separately.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use cudarc::driver::sys::CUdevice;
use parking_lot::Mutex;

use crate::driver::{DriverResult, ModuleImage, RawModule};

/// The shared modules of one primary context.
#[derive(Default)]
pub(super) struct Shared(Mutex<HashMap<Key, Loaded>>);

/// The addresses of the image's PTX and cubins, which are `'static`.
type Key = (usize, usize);

struct Loaded {
    module: RawModule,
    users: usize,
}

fn key(image: &ModuleImage) -> Key {
    (image.ptx.map_or(0, |ptx| ptx.as_ptr().addr()), image.cubins.as_ptr().addr())
}

impl Shared {
    /// The value that all users of this device's primary context share. The caller has retained the context, and drops
    /// the value before it releases the context. So all holders of the value have retained the same context.
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

    /// The module of a shared image. The first caller loads it; other callers wait for that.
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

    /// Removes one user. A module without users, or one that was not shared, is unloaded.
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
mod tests {
    use super::*;
    use crate::{
        driver::{Fault, FaultKind},
        kernel::builtin::{PUSH, RING},
    };
    use std::cell::Cell;

    fn fault() -> Fault {
        crate::driver::cuda::fault::fault(2, "none left")
    }

    #[test]
    fn loaded_once_and_unloaded_by_the_last() {
        let shared = Shared::default();
        let handles = Cell::new(0);
        let load = |image: &ModuleImage| {
            shared.load(image, || {
                handles.set(handles.get() + 1);
                Ok(RawModule(handles.get()))
            })
        };
        let [first, again, other] = [&PUSH, &PUSH, &RING].map(|module| load(&module.image).unwrap());
        assert!(first == again && first != other);
        let unloaded = Cell::new(0);
        let unload = |module| {
            shared.unload(module, || {
                unloaded.set(unloaded.get() + 1);
                Ok(())
            })
        };
        let counts = [first, other, again].map(|module| {
            unload(module).unwrap();
            unloaded.get()
        });
        assert_eq!(counts, [0, 1, 2]);
        assert_eq!(load(&PUSH.image).unwrap(), RawModule(3), "a module that has gone is loaded again");
    }

    /// The handle of a user's module is in no list.
    #[test]
    fn what_is_not_shared_is_unloaded() {
        let unloaded = Cell::new(false);
        let unload = || {
            unloaded.set(true);
            Ok(())
        };
        Shared::default().unload(RawModule(7), unload).unwrap();
        assert!(unloaded.get());
    }

    #[test]
    fn what_could_not_be_loaded_is_tried_again() {
        let shared = Shared::default();
        let failed = shared.load(&PUSH.image, || Err(fault())).unwrap_err();
        assert_eq!(failed.kind, FaultKind::OutOfMemory);
        assert_eq!(shared.load(&PUSH.image, || Ok(RawModule(1))).unwrap(), RawModule(1));
    }

    /// Two images that share some forms but not all are different modules.
    #[test]
    fn every_form_counts() {
        let shared = Shared::default();
        let only_ptx = ModuleImage { cubins: &[], ..PUSH.image };
        let all = shared.load(&PUSH.image, || Ok(RawModule(1))).unwrap();
        assert_ne!(all, shared.load(&only_ptx, || Ok(RawModule(2))).unwrap());
    }

    #[test]
    fn a_context_that_nobody_has_open_is_forgotten() {
        // Ordinals that no real device has.
        let (first, second) = (Shared::of(-1), Shared::of(-2));
        assert!(Arc::ptr_eq(&first, &Shared::of(-1)) && !Arc::ptr_eq(&first, &second));
        first.load(&PUSH.image, || Ok(RawModule(1))).unwrap();
        drop(first);
        // The modules were dropped together with the shared value, without an unload.
        assert_eq!(Shared::of(-1).load(&PUSH.image, || Ok(RawModule(2))).unwrap(), RawModule(2));
    }
}
