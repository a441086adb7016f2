//! Connecting a process: where rank 0 is, who is there, and the transport that all of them can open.

use super::client::Client;
use super::connect::Ends;
use super::hub::{Limits, OPENED};
use super::server::Server;
use super::transport::cause;
use super::world::{Local, Members};
use super::{Cluster, greet, mesh, wire};
use crate::traits::{Transport, World};
use gpu_pool::{Error, Result, event};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs},
    sync::Arc,
    time::{Duration, Instant},
};

/// Sends rank 0's bytes to all processes: `MPI_Bcast`.
pub(crate) type Bcast<'a> = &'a dyn Fn(&mut [u8]) -> Result<()>;

/// The length of what rank 0 tells by [`Bcast`].
const NOTE: usize = 512;

type Note = Option<(String, u16, [u8; 32])>;

/// Rank 0's server, the name of its machine, and the secret.
type Listening = (Server, String, [u8; 32]);

#[derive(Clone)]
pub(crate) struct Control {
    /// The table of all processes: `set`, `get`, and `known` for values that were asked for.
    pub local: Arc<Local>,
    pub host: usize,
    pub devices: Arc<[usize]>,
}

debug_as!(Control, |self| host = self.host, devices = self.devices, ..);

impl Control {
    pub(crate) fn size(&self) -> usize {
        self.devices.len()
    }

    pub(crate) fn gather(&self, name: &str, value: &[u8]) -> Result<Vec<Vec<u8>>> {
        gather(&self.local, (self.host, self.size()), name, value)
    }

    /// `Err` once a process is lost.
    pub(crate) fn check(&self) -> Result<()> {
        self.local.check("check")
    }

    pub(crate) fn lost(&self) -> Option<Error> {
        self.local.check("connect").err().or_else(|| failed_elsewhere(&self.local, self.size()))
    }
}

fn opened_by(host: usize) -> String {
    format!("{OPENED}{host}")
}

/// The word of a process that could not open the transport.
fn failed_elsewhere(local: &Local, size: usize) -> Option<Error> {
    let failed = |host: usize| local.known(&opened_by(host)).filter(|why| !why.is_empty());
    let (host, why) = (0..size).find_map(|host| Some((host, failed(host)?)))?;
    Some(cluster_error!("transport", "rank {host} could not open it: {}", String::from_utf8_lossy(&why)))
}

fn gather(local: &Local, (host, size): (usize, usize), name: &str, value: &[u8]) -> Result<Vec<Vec<u8>>> {
    local.set(&format!("{name}/{host}"), value)?;
    (0..size).map(|host| local.get(&format!("{name}/{host}"))).collect()
}

impl Cluster {
    /// Whether this cluster's processes need a [`Bcast`] to find rank 0.
    pub(crate) fn needs_bcast(&self) -> bool {
        self.launch.master.is_none()
    }

    /// Connects this process, which has so many devices: a pool is being built. `open` opens the transport, in all
    /// processes at once; with it comes what ends with the cluster. If it fails in one process, it has failed in all.
    pub(crate) fn join(
        &self,
        devices: usize,
        bcast: Option<Bcast<'_>>,
        open: impl FnOnce(&Control) -> Result<(Transport, Ends)>,
    ) -> Result<Arc<dyn World>> {
        let start = Instant::now();
        let (host, size, by) = (self.launch.rank, self.launch.size, self.launch.by);
        event!(debug, "cluster_joined", "rank {host} of {size} joins its cluster, as said by {by:?}");
        let limits = Limits { size, heartbeat_timeout: self.heartbeat_timeout, connect_timeout: self.connect_timeout };
        let (server, at, secret) = match (&self.launch.master, bcast) {
            (Some((name, port)), _) => {
                let at = self.resolve(name, *port, start)?;
                // Each machine may find another address for the name. Without a secret, other machines may not connect.
                let all = !self.secret.is_empty() && name != "localhost" && name.parse::<IpAddr>().is_err();
                let any = if at.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
                let listens = if all { SocketAddr::new(any, *port) } else { at };
                let start = || Server::start(listens, limits, self.secret.clone());
                let server = (host == 0).then(start).transpose()?;
                // A port 0 is chosen by the system; only one process can know it then.
                let at = server.as_ref().filter(|_| *port == 0).map_or(at, |server| server.address);
                (server, at, self.secret.clone())
            }
            (None, Some(bcast)) => self.by_bcast(limits, bcast, start)?,
            (None, None) => {
                let why = "where is rank 0? Set GPU_POOL_MASTER and GPU_POOL_PORT, or let MPI tell (GPU_POOL_MPI)";
                return Err(cluster_error!("environment", "{why}"));
            }
        };
        let connect_timeout = self.connect_timeout.saturating_sub(start.elapsed());
        let client = Client::connect(at, host, size, &secret, self.heartbeat_timeout, connect_timeout)?;
        let local = client.local.clone();
        // Asked for first: a process fails only after all told their devices, so its word is here before it is missed.
        (0..size).for_each(|other| local.ask(&opened_by(other)));
        let told = gather(&local, (host, size), "devices", &(devices as u64).to_le_bytes());
        let number = |value: Vec<u8>| value.try_into().map_or(0, u64::from_le_bytes) as usize;
        let opened = told.and_then(|told| {
            let devices: Arc<[usize]> = told.into_iter().map(number).collect();
            let control = Control { local: local.clone(), host, devices: devices.clone() };
            let (transport, ends) = open(&control).map_err(|e| cause(e, &|| control.lost()))?;
            #[cfg(all(target_os = "linux", not(loom)))]
            let near = super::near::open(&control, &local, limits).map_err(|e| cause(e, &|| control.lost()))?;
            #[cfg(not(all(target_os = "linux", not(loom))))]
            let near = None::<()>;
            if near.is_none() {
                let own = server.as_ref().map_or_else(|| client.address(), |server| Some(server.address.ip()));
                let open = mesh::open(&control, &secret, (own, at.ip()), limits.connect_timeout);
                let open = open.map_err(|e| cause(e, &|| control.lost()))?;
                server.iter().filter(|_| open).for_each(Server::mesh);
            }
            control.gather(OPENED.trim_end_matches('/'), b"")?;
            if let Some(server) = &server {
                let local = local.clone();
                server.tells(Box::new(move |record| local.tell(record)));
            }
            Ok((devices.to_vec(), transport, ends, near))
        });
        if let Some(elsewhere) = failed_elsewhere(&local, size) {
            return Err(opened.err().filter(|own| !matches!(own, Error::HostLost { .. })).unwrap_or(elsewhere));
        }
        let (devices, transport, transport_ends, near) = opened.inspect_err(|own| {
            // The hub has it when it answers. Others must not wait for this process.
            let told = local.set(&opened_by(host), wire::cut(own.to_string()).as_bytes());
            drop(told.and_then(|()| local.get(&opened_by(host))));
        })?;
        let clock = client.clock.clone();
        let _ends = Box::new((transport_ends, client, near, server));
        Ok(Arc::new(Members { local, host, devices, transport, clock: Box::new(move || clock.ask()), _ends }))
    }

    /// Rank 0 listens at a port of the system's choice, with a fresh secret, and tells all by MPI.
    fn by_bcast(
        &self,
        limits: Limits,
        bcast: Bcast<'_>,
        start: Instant,
    ) -> Result<(Option<Server>, SocketAddr, Vec<u8>)> {
        let broken = |why: String| cluster_error!("connect", "{why}");
        let mut bytes = [0; NOTE];
        let listened = (self.launch.rank == 0).then(|| self.listen(limits));
        if let Some(listened) = &listened {
            // It tells also that it has failed: the others wait for its word.
            let told = |(server, name, secret): &Listening| (name.clone(), server.address.port(), *secret);
            let note: Note = listened.as_ref().ok().map(told);
            let note = wire::frame(&note).map_err(|e| broken(e.to_string()))?;
            bytes
                .get_mut(..note.len())
                .ok_or_else(|| broken("a long name of this machine".into()))?
                .copy_from_slice(&note);
        }
        bcast(&mut bytes)?;
        let server = listened.transpose()?.map(|(server, ..)| server);
        let note: Note = wire::read(&mut &bytes[..], NOTE).map_err(|e| broken(format!("rank 0's address: {e}")))?;
        let (name, port, secret) = note.ok_or_else(|| broken("rank 0 could not listen; it says why".to_owned()))?;
        Ok((server, self.resolve(&name, port, start)?, secret.to_vec()))
    }

    /// On one machine no other machine need reach rank 0.
    fn listen(&self, limits: Limits) -> Result<Listening> {
        let broken = |e: std::io::Error| cluster_error!("listen", "{e}");
        let secret = greet::random().map_err(broken)?;
        let (ip, name) = match self.launch.local_size == self.launch.size {
            true => (Ipv4Addr::LOCALHOST, "127.0.0.1".to_owned()),
            false => {
                let name = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(broken)?;
                (Ipv4Addr::UNSPECIFIED, name.trim().to_owned())
            }
        };
        Ok((Server::start((ip, 0).into(), limits, secret.to_vec())?, name, secret))
    }

    /// The address of a name, IPv4 first: everywhere the same. Asks again for a name that is not known yet.
    fn resolve(&self, name: &str, port: u16, start: Instant) -> Result<SocketAddr> {
        let mut pause = Duration::from_millis(100);
        loop {
            let why = match (name, port).to_socket_addrs() {
                Ok(found) => match found.min_by_key(|at| (at.is_ipv6(), *at)) {
                    Some(at) => return Ok(at),
                    None => "it has no address".to_owned(),
                },
                Err(e) => e.to_string(),
            };
            let limit = self.connect_timeout;
            let left = limit.saturating_sub(start.elapsed());
            let unknown = format!("the name `{name}` of rank 0's machine was not known");
            fail_if!(left.is_zero(), cluster_error!("connect", "{unknown} for {limit:?}: {why}"));
            event!(warn, "rank_0_unknown", "rank 0's machine `{name}` is not known yet: {why}");
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/control_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "../tests/unit/start_tests.rs"]
mod start_tests;

#[cfg(test)]
#[path = "../tests/unit/stranger_tests.rs"]
mod stranger_tests;

#[cfg(test)]
#[path = "../tests/unit/store_tests.rs"]
mod store_tests;
