//! The modules that a device has loaded, and their functions.
//!
//! The worker owns a [`Modules`]: it loads modules when it starts, and launches look functions up.
//!
//! Invariant: a module stays loaded until the device has drained for the last time.

use super::worker::Worker;
use crate::{
    driver::{FaultKind, RawFunction, RawModule, module::Module},
    error::{Error, Result, op_site::OpSite},
    memory::DeviceHandle,
};
use std::{cell::RefCell, collections::HashMap, panic::Location};

/// A device's modules, by their addresses.
#[derive(Default)]
pub(super) struct Modules {
    loaded: RefCell<HashMap<*const Module, RawModule>>,
    functions: RefCell<HashMap<(*const Module, &'static str), RawFunction>>,
}

impl Modules {
    pub(super) fn load(&self, handle: &DeviceHandle, module: &'static Module) -> Result<()> {
        let loaded = handle.check("load module", handle.driver.module_load(&module.image))?;
        self.loaded.borrow_mut().insert(module, loaded);
        Ok(())
    }

    /// Unloads all modules.
    ///
    /// # Safety
    /// No kernel of these modules is in flight, and none is launched from now on.
    pub(super) unsafe fn unload(&mut self, handle: &DeviceHandle) {
        for &module in self.loaded.get_mut().values() {
            // SAFETY: passed on to the caller.
            let _ = unsafe { handle.driver.module_unload(module) };
        }
    }
}

impl Worker {
    #[track_caller]
    pub(crate) fn function(&self, module: &'static Module, name: &'static str) -> Result<RawFunction> {
        let key = (module as *const Module, name);
        if let Some(&function) = self.modules.functions.borrow().get(&key) {
            return Ok(function);
        }
        let OpSite { op, site } = OpSite::outermost("launch", Location::caller());
        let not_found =
            |why: String| Error::KernelNotFound { op, device: self.handle.device, kernel: name.to_owned(), why, site };
        // A module of the crate's own that set-up does not need is loaded at its first launch.
        if module.image.shared && !self.modules.loaded.borrow().contains_key(&key.0) {
            self.modules.load(&self.handle, module)?;
        }
        let Some(&loaded) = self.modules.loaded.borrow().get(&key.0) else {
            return Err(not_found("its module was not given to the pool's builder (`Builder::module`)".to_owned()));
        };
        let function = self.handle.driver.function(loaded, name).map_err(|fault| match fault.kind {
            FaultKind::NotFound => not_found(fault.to_string()),
            _ => self.handle.error(op, fault),
        })?;
        self.modules.functions.borrow_mut().insert(key, function);
        Ok(function)
    }
}
