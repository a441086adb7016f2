//! The operation in which the calling thread is, and its place in the user's code.
//!
//! Each operation of the public face enters its place. Reports of the checker, of the memory pool and of software GPUs
//! read it.
//!
//! Invariant: the outermost operation stays, since only that one is in the user's code.

use super::Site;
use std::{cell::Cell, marker::PhantomData, panic::Location};

/// An operation of the public face, and where it was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpSite {
    pub(crate) op: &'static str,
    pub(crate) site: Site,
}

thread_local! {
    static CURRENT: Cell<Option<OpSite>> = const { Cell::new(None) };
}

impl OpSite {
    /// Where the calling thread is, if it is in an operation.
    pub(crate) fn current() -> Option<OpSite> {
        CURRENT.get()
    }

    /// What the calling thread asks of a driver within `f` belongs to the operation that was there, whatever is there
    /// now.
    pub(crate) fn revisit<R>(place: Option<OpSite>, f: impl FnOnce() -> R) -> R {
        let now = CURRENT.replace(place);
        let result = f();
        CURRENT.set(now);
        result
    }

    /// Until the guard goes, what the calling thread asks of a driver belongs to this operation; unless it is within
    /// one already: the outermost is the user's.
    pub(crate) fn enter(self) -> OpGuard {
        let outer = CURRENT.get();
        CURRENT.set(outer.or(Some(self)));
        OpGuard { outer, stays: PhantomData }
    }
}

/// Leaves the operation when it is dropped.
pub(crate) struct OpGuard {
    outer: Option<OpSite>,
    stays: PhantomData<*const ()>,
}

impl Drop for OpGuard {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

/// What `f` asks of a driver is, for the checker's reports, operation `op` called here: for those who use drivers
/// without a pool. Within an operation of the crate, or another `annotate`, it changes nothing.
///
/// ```
/// # use gpu_pool::driver::{check, host};
/// let gpus = check::wrap(host::machine(&[Default::default()]));
/// let memory = check::annotate("weights", || gpus[0].mem_alloc(4096)).unwrap();
/// # unsafe { gpus[0].mem_free(memory) }.unwrap();
/// ```
#[track_caller]
pub fn annotate<R>(op: &'static str, f: impl FnOnce() -> R) -> R {
    let _here = OpSite { op, site: Location::caller() }.enter();
    f()
}
