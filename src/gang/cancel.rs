//! [`CancelToken`]: a program ends scopes from outside.
//!
//! Invariant: a gang that is not registered any more is not poisoned any more, since both are under one lock.

use super::Gang;
use crate::{
    contain::Finally,
    error::{Error, Site},
};
use parking_lot::Mutex;
use std::{panic::Location, sync::Arc};

/// Cancels scopes from any thread: those that run with it, and those that begin later. Clones are the same token.
///
/// ```
/// use gpu_pool::{CancelToken, Error, GpuPool};
///
/// let pool = GpuPool::builder().host(2).build()?;
/// let token = CancelToken::new();
/// let stopped = std::thread::scope(|s| {
///     s.spawn(|| token.cancel()); // a signal handler's thread, say
///     pool.run_until(&token, |dev, _| loop {
///         dev.barrier()?; // an error after the cancellation
///     })
/// });
/// assert!(matches!(stopped, Err::<Vec<()>, _>(Error::Cancelled { op: "cancel", .. })));
/// assert_eq!(pool.run(|dev, _| Ok(dev.index()))?, [0, 1]); // the pool works on
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct CancelToken(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    site: Option<Site>,
    gangs: Vec<Arc<Gang>>,
}

impl CancelToken {
    /// A token of its own.
    pub fn new() -> Self {
        CancelToken::default()
    }

    /// Cancels. Scopes that run with this token fail with [`Error::Cancelled`], as if one of their devices had failed:
    /// each call of a device and each wait of a collective returns [`Error::Aborted`], and
    /// [`Device::cancelled`](crate::Device::cancelled) is true. Closures that make no such call go on until their ends.
    /// A scope that waits for its turn does not begin. It does not wait for the scopes. A second call does nothing.
    #[track_caller]
    pub fn cancel(&self) {
        let (mut state, site) = (self.0.lock(), Location::caller());
        if state.site.is_none() {
            state.site = Some(site);
            let gangs = state.gangs.clone();
            // Without the lock: other processes are told, and a subscriber of events may ask the token.
            drop(state);
            gangs.iter().for_each(|gang| poison(gang, site));
        }
    }

    /// Whether [`cancel`](Self::cancel) was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().site.is_some()
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.0.lock().site.map(error)
    }

    /// Poisons the gang when the token is cancelled, also if it already is, until the guard is dropped.
    pub(crate) fn register(&self, gang: &Arc<Gang>) -> Finally<impl FnMut()> {
        let mut state = self.0.lock();
        state.gangs.push(gang.clone());
        let site = state.site;
        drop(state);
        if let Some(site) = site {
            poison(gang, site);
        }
        let own = gang.clone();
        Finally(move || self.0.lock().gangs.retain(|gang| !Arc::ptr_eq(gang, &own)))
    }
}

fn error(site: Site) -> Error {
    Error::Cancelled { op: "cancel", site }
}

fn poison(gang: &Gang, site: Site) {
    gang.poison(gang.device(0), error(site));
}

debug_as!(CancelToken, |self| is_cancelled = self.is_cancelled());
