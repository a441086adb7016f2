//! One scope of all processes, for the device threads of this one: meetings, failures, the end.
//!
//! [`Members`](super::Members) begins it. It uses [`Local`], the state of this process towards the hub.

use super::Local;
use crate::process::{Class, Key};
use crate::runtime::{ErrorInternals, Place, sync::site::flag};
use crate::traits::{Arrival, Commit, WorldScope};
use crate::wire::{self, Arrive, Member, cut, text};
use gpu_pool::{Error, Result, error::Site};
use std::{cell::RefCell, ptr, sync::Arc};

pub(super) struct Scope {
    pub local: Arc<Local>,
    pub id: u64,
}

/// The members, call and place, for other processes. Most calls are like the thread's last one, and take its texts.
fn told(places: &[Place], call: &str, site: Site) -> (Arc<[Member]>, Arc<str>, Arc<str>) {
    type Last = (Arc<[Member]>, Arc<str>, Arc<str>, Site);
    thread_local!(static LAST: RefCell<Option<Last>> = const { RefCell::new(None) });
    let member = |place: &Place| (place.host as u32, place.device as u32);
    LAST.with_borrow_mut(|last| {
        let known = last.take().filter(|(members, text, _, at)| {
            members.iter().copied().eq(places.iter().map(member)) && **text == *call && ptr::eq(*at, site)
        });
        let new = || (places.iter().map(member).collect(), cut(call.to_owned()).into(), text(&site).into(), site);
        let (members, call, text, _) = last.insert(known.unwrap_or_else(new)).clone();
        (members, call, text)
    })
}

impl WorldScope for Scope {
    fn meet(&self, arrival: Arrival<'_>) -> Result<Commit> {
        let Arrival { members, number, place, call, site, leads, proxied, note } = arrival;
        if members.len() > wire::MOST_MEMBERS {
            let why = format_args!("a group of {} devices; at most {}", members.len(), wire::MOST_MEMBERS);
            return Err(Error::invalid_at(site, "a collective", why));
        }
        let (members, call, site) = told(members, call, site);
        let key: Key = (self.id, members.clone(), number);
        let (arrival, scope, device) = (0, self.id, place.device as u32);
        let (known, behind) = (None, None);
        let arrive = Arrive { arrival, scope, members, number, device, known, behind, proxied, call, site, note };
        self.local.post(|inner| ((), inner.process.arrive(&key, leads.then_some(arrive))));
        let committed = self.local.wait("a collective", |process| process.committed(&key))?;
        let window = self.local.window(Class::Collective, committed.window);
        let (numbers, notes) = committed.notes.into_iter().unzip();
        Ok(Commit { numbers, notes, window })
    }

    fn fail(&self, device: Option<usize>, cause: &Error) {
        let device = device.map(|device| device as u32);
        let cause = text(cause);
        self.local.post(|inner| ((), inner.process.fail(self.id, device, cause)));
    }

    fn when_failed(&self, tell: Box<dyn FnOnce(Error) + Send>) {
        let mut inner = self.local.inner.lock();
        match inner.process.failure_elsewhere(self.id) {
            Some(failure) => {
                drop(inner);
                tell(failure.error("a scope"));
            }
            None => inner.tells.entry(self.id).or_default().push(tell),
        }
    }

    fn end(&self) -> Result<()> {
        self.local.post(|inner| ((), inner.process.end(self.id)));
        self.local.wait("the end of a scope", |process| process.ended(self.id))
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let unused = self.local.post(|inner| {
            let told = inner.process.forget(self.id);
            // A turn that is over may be another one's.
            if !flag("world.forget.silent") {
                self.local.changed.notify_all();
            }
            ((inner.tells.remove(&self.id), inner.progress.remove(&self.id)), told)
        });
        drop(unused);
    }
}
