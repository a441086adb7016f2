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
