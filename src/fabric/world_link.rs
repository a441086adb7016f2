//! A gang's part in a scope of all processes: whether it has joined one, and how the two fail together.
//!
//! A scope of a pool in a cluster makes a [`WorldLink`]. It joins the others when it begins, if it has a name, or else
//! at the first call that needs other processes. Tokens share it; `collective/world` meets through it.
//!
//! Invariant: once joined, a failure of the gang is told to the other processes, and one of theirs fails the gang. So
//! does a failure of a transport between devices.

use super::transport::{Tell, Transport, Window, World, WorldScope};
use crate::{
    error::{Error, Result, Site},
    gang::{Gang, Outside},
};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::{sync::Arc, thread::JoinHandle, time::Duration};

/// The name that all scopes have in common that were given none.
const UNNAMED: &str = "";

type Progress = Arc<dyn Fn() -> u64 + Send + Sync>;

/// A gang's link to the other processes.
pub(crate) struct WorldLink {
    pub(crate) world: Arc<dyn World>,
    deadline: Duration,
    progress: Progress,
    site: Site,
    joined: OnceCell<Arc<dyn WorldScope>>,
    /// Fails the gang with the transport.
    tell: OnceCell<Arc<Tell>>,
    /// Threads that carry messages to other processes.
    carriers: Mutex<Vec<JoinHandle<()>>>,
}

impl WorldLink {
    pub(crate) fn new(world: &Arc<dyn World>, deadline: Duration, progress: Progress, site: Site) -> Arc<Self> {
        Arc::new(WorldLink {
            world: world.clone(),
            deadline,
            progress,
            site,
            joined: OnceCell::new(),
            tell: OnceCell::new(),
            carriers: Mutex::default(),
        })
    }

    /// Begins a scope with a name, and waits for its turn among the scopes of all processes.
    pub(crate) fn begin(&self, name: &str, gang: &Arc<Gang>) -> Result<Window> {
        let mut window = None;
        self.joined.get_or_try_init(|| {
            let (scope, turn) = self.world.begin(name, true, self.deadline, self.progress.clone(), self.site)?;
            window = Some(turn);
            Ok::<_, Error>(scope)
        })?;
        self.listen(gang);
        Ok(window.expect("a gang begins once"))
    }

    /// The scope of all processes, which the gang joins with the first call.
    pub(crate) fn join(&self, gang: &Arc<Gang>) -> Result<&Arc<dyn WorldScope>> {
        if let Some(joined) = self.joined.get() {
            return Ok(joined);
        }
        let mut first = false;
        let joined = self.joined.get_or_try_init(|| {
            first = true;
            Ok::<_, Error>(self.world.begin(UNNAMED, false, self.deadline, self.progress.clone(), self.site)?.0)
        })?;
        if first {
            self.listen(gang);
        }
        Ok(joined)
    }

    /// From now on the gang and the scope fail together.
    fn listen(&self, gang: &Arc<Gang>) {
        let Some(joined) = self.joined.get() else { return };
        let (failing, by) = (Arc::downgrade(gang), gang.device(0));
        joined.when_failed(Box::new(move |error| {
            if let Some(gang) = failing.upgrade() {
                gang.poison(by, error);
            }
        }));
        // Streams may go on behind a call that has failed, with memory that was never written.
        if let Transport::Device(transport) = self.world.transport() {
            let failing = Arc::downgrade(gang);
            let tell: Arc<Tell> = Arc::new(move |error| {
                if let Some(gang) = failing.upgrade() {
                    gang.poison(by, error);
                }
            });
            transport.when_failed(&tell);
            let _ = self.tell.set(tell);
        }
        // It may have failed before it joined.
        if let Some((by, cause)) = gang.cause() {
            self.failed(by, &cause);
        }
    }

    /// Runs `carry` on a thread of its own. The end of the scope waits for it.
    pub(crate) fn carry(&self, carry: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name("gpu-pool:send".to_owned()).spawn(carry);
        let thread = thread.map_err(|e| Error::custom(format!("a thread for a message could not be started: {e}")))?;
        let mut carriers = self.carriers.lock();
        carriers.retain(|thread| !thread.is_finished());
        carriers.push(thread);
        Ok(())
    }

    /// Ends the scope, if the gang has joined one, when all messages are on their way.
    pub(crate) fn end(&self) -> Result<()> {
        let carriers = std::mem::take(&mut *self.carriers.lock());
        // What a carrier has found has failed the gang.
        carriers.into_iter().for_each(|thread| drop(thread.join()));
        self.joined.get().map_or(Ok(()), |joined| joined.end())
    }
}

impl Outside for WorldLink {
    fn failed(&self, by: usize, cause: &Error) {
        // What all processes hear, or find out by themselves.
        let known = matches!(cause, Error::AbortedByHost { .. } | Error::HostLost { .. } | Error::WorldMismatch { .. });
        if let Some(joined) = self.joined.get().filter(|_| !known) {
            joined.fail(Some(by), cause);
        }
    }
}
