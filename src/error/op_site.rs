//! The public operation that the calling thread is in, and its call site in the user's code.
//!
//! Errors read it, and so do reports of the checker, of the memory pool and of software GPUs. Invariant: in nested
//! operations the outermost one stays, since only that call is in the user's code. An operation that calls a closure of
//! the user's leaves itself for that time ([`OpSite::outside`]).

use super::Site;
use std::{cell::Cell, marker::PhantomData, panic::Location};

/// An operation of the public API, and its call site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpSite {
    /// The operation.
    pub op: &'static str,
    /// Its call site.
    pub site: Site,
}

thread_local! {
    static CURRENT: Cell<Option<OpSite>> = const { Cell::new(None) };
}

impl OpSite {
    /// The operation of the calling thread, if it is in one.
    pub fn current() -> Option<OpSite> {
        CURRENT.get()
    }

    /// The call that an error names: the operation of the calling thread, or `op` at `site` if it is in none.
    pub fn outermost(op: &'static str, site: Site) -> OpSite {
        OpSite::current().unwrap_or(OpSite { op, site })
    }

    /// The place of the calling thread's operation, or of the caller.
    #[track_caller]
    pub fn place() -> Site {
        OpSite::outermost("", Location::caller()).site
    }

    /// Enters the operation `op`, called where this function's `#[track_caller]` callers are called.
    #[track_caller]
    pub fn here(op: &'static str) -> OpGuard {
        OpSite { op, site: Location::caller() }.enter()
    }

    /// Runs a closure of the user's: its calls have operations and places of their own.
    pub fn outside<R>(f: impl FnOnce() -> R) -> R {
        OpSite::revisit(None, f)
    }

    /// Within `f`, driver calls of this thread belong to the operation `place`, instead of the current one.
    pub fn revisit<R>(place: Option<OpSite>, f: impl FnOnce() -> R) -> R {
        let now = CURRENT.replace(place);
        let result = f();
        CURRENT.set(now);
        result
    }

    /// Until the guard is dropped, this thread's driver calls belong to this operation, unless it is in another one.
    pub fn enter(self) -> OpGuard {
        let outer = CURRENT.get();
        CURRENT.set(outer.or(Some(self)));
        OpGuard { outer, stays: PhantomData }
    }
}

/// Its drop leaves the operation.
pub struct OpGuard {
    outer: Option<OpSite>,
    stays: PhantomData<*const ()>,
}

impl Drop for OpGuard {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

/// Names the driver calls in `f` for the checker's reports: they show operation `op`, called here. For programs that
/// use drivers without a pool. Within an operation of the crate, or within another `annotate`, it changes nothing.
///
/// ```
/// # use gpu_pool::extend::{driver::host, lab::annotate};
/// let gpus = host::machine(&[Default::default()]);
/// let memory = annotate("weights", || gpus[0].mem_alloc(4096)).unwrap();
/// # unsafe { gpus[0].mem_free(memory) }.unwrap();
/// ```
#[track_caller]
pub fn annotate<R>(op: &'static str, f: impl FnOnce() -> R) -> R {
    let _here = OpSite { op, site: Location::caller() }.enter();
    f()
}
