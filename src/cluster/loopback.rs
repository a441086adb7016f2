//! Several processes within one, for tests: a hub under a lock instead of connections.

use super::{
    hub::{Hub, Limits},
    wire::ToHub,
    world::{Local, Members},
};
use crate::fabric::transport::{Transport, World};
use parking_lot::Mutex;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};

/// The hub, and who gets its answers.
pub(crate) struct Loopback {
    /// The lock orders the frames to each process.
    hub: Mutex<Hub>,
    locals: Mutex<Vec<Weak<Local>>>,
}

/// Says goodbye when the last handle of a process's world goes.
struct Leave(Arc<Loopback>, usize);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.tell(|hub| hub.frame(self.1, ToHub::Bye));
    }
}

impl Loopback {
    /// The worlds of processes with so many devices, which move their data by these transports.
    pub(crate) fn worlds(devices: &[usize], transports: Vec<Transport>) -> (Arc<Loopback>, Vec<Arc<dyn World>>) {
        let hour = Duration::from_secs(3600);
        let hub = Hub::new(Limits { size: devices.len(), silence: hour, patience: hour });
        let loopback = Arc::new(Loopback { hub: Mutex::new(hub), locals: Mutex::default() });
        let world = |(host, transport): (usize, Transport)| -> Arc<dyn World> {
            let hub = loopback.clone();
            let local = Local::new(
                host,
                Box::new(move |frame| {
                    hub.tell(|hub| hub.frame(host, frame));
                    Ok(())
                }),
            );
            loopback.locals.lock().push(Arc::downgrade(&local));
            loopback.tell(|hub| hub.joined(host));
            let ends = Box::new(Leave(loopback.clone(), host));
            Arc::new(Members { local, host, devices: devices.to_vec(), transport, ends })
        };
        let worlds = transports.into_iter().enumerate().map(world).collect();
        (loopback, worlds)
    }

    /// Tells the hub something, and the processes what it answers.
    fn tell(&self, told: impl FnOnce(&mut Hub) -> super::hub::Out) {
        let mut hub = self.hub.lock();
        let out = told(&mut hub);
        for (host, frame) in out {
            let local = self.locals.lock().get(host).and_then(Weak::upgrade);
            if let Some(local) = local {
                local.take(frame);
            }
        }
    }

    /// A process is lost.
    pub(crate) fn lose(&self, host: usize) {
        self.tell(|hub| hub.lost(host, "killed"));
    }

    /// Lets the hub look at its deadlines, as so long after its beginning. Progress is told first.
    pub(crate) fn tick(&self, clock: Duration) {
        let locals: Vec<_> = self.locals.lock().iter().map(Weak::upgrade).collect();
        for (host, local) in locals.into_iter().enumerate() {
            if let Some(local) = local {
                let beat = local.beat();
                self.tell(|hub| hub.frame(host, beat));
            }
        }
        self.tell(|hub| hub.tick(clock));
    }
}
