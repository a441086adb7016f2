//! The crate's own modules, which all pools of a process have in common on a GPU.
//!
//! To load one takes half a millisecond on each GPU, behind a lock that all GPUs of the process share: on two H200s
//! that was more than half of what a further pool took (`gpu/setup/2` in `benches/results`: 17.8 ms before, 7.8 now).
//! They have no variables (`kernels/build.py` checks that), so nobody can tell whether others use them, too. Users'
//! modules may have some, which another pool's kernels must not change: each pool loads its own.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use cudarc::driver::sys::CUdevice;
use parking_lot::Mutex;

use crate::driver::{DriverResult, ModuleImage, RawModule};

/// Those of one primary context.
#[derive(Default)]
pub(super) struct Shared(Mutex<HashMap<Key, Loaded>>);

/// Where the forms of the image are, which live for ever.
type Key = (usize, usize);

struct Loaded {
    module: RawModule,
    users: usize,
}

fn key(image: &ModuleImage) -> Key {
    (image.ptx.map_or(0, |ptx| ptx.as_ptr().addr()), image.cubins.as_ptr().addr())
}

impl Shared {
    /// Of all that have this device's primary context open. The caller has retained it, and lets go of what it gets
    /// here first: so whoever has it at the same time has retained the same context.
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

    /// The module of an image that pools share, loaded if nobody has it; who comes meanwhile waits for that.
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

    /// One user less. What nobody uses any more, or was not shared, is unloaded.
    pub(super) fn unload(&self, module: RawModule, unload: impl FnOnce() -> DriverResult) -> DriverResult {
        let mut all = self.0.lock();
        if let Some((&key, loaded)) = all.iter_mut().find(|(_, loaded)| loaded.module == module) {
            loaded.users -= 1;
            if loaded.users > 0 {
                return Ok(());
            }
            all.remove(&key);
        }
        // Under the lock: what is loaded next may get the same handle.
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

    /// A user's own module has a handle that is in no list.
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

    /// The forms of one module are not taken for those of another that has some of them.
    #[test]
    fn every_form_counts() {
        let shared = Shared::default();
        let only_ptx = ModuleImage { cubins: &[], ..PUSH.image };
        let all = shared.load(&PUSH.image, || Ok(RawModule(1))).unwrap();
        assert_ne!(all, shared.load(&only_ptx, || Ok(RawModule(2))).unwrap());
    }

    #[test]
    fn a_context_that_nobody_has_open_is_forgotten() {
        // No ordinals of real devices.
        let (first, second) = (Shared::of(-1), Shared::of(-2));
        assert!(Arc::ptr_eq(&first, &Shared::of(-1)) && !Arc::ptr_eq(&first, &second));
        first.load(&PUSH.image, || Ok(RawModule(1))).unwrap();
        drop(first);
        // Its modules went with it, though nobody unloaded them.
        assert_eq!(Shared::of(-1).load(&PUSH.image, || Ok(RawModule(2))).unwrap(), RawModule(2));
    }
}
