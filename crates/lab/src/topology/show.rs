//! `Display` for a machine, in a few lines: equal devices and equal links are counted, not listed.

use super::{DeviceModel, HostModel, Link, Nic, Path, Topology};
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", if self.name.is_empty() { "a machine without a name" } else { &self.name })?;
        for (what, devices) in grouped(self.devices.iter().map(about_device).zip(0..)) {
            writeln!(f, "  {} {}: {what}", if devices.len() == 1 { "device" } else { "devices" }, ranges(&devices))?;
        }
        for (what, links) in grouped(self.links.iter().map(|link| (about_link(link), link))) {
            write!(f, "  {} {}: {what}", links.len(), if links.len() == 1 { "link" } else { "links" })?;
            match &links[..] {
                [only] => writeln!(f, " (device {} to device {})", only.from, only.to)?,
                _ => writeln!(f)?,
            }
        }
        for (what, hosts) in grouped(self.hosts.iter().map(about_host).zip(0..)) {
            writeln!(f, "  {} {}: {what}", if hosts.len() == 1 { "host" } else { "hosts" }, ranges(&hosts))?;
        }
        let pairs = self.len().saturating_mul(self.len().saturating_sub(1));
        let absent = pairs.saturating_sub(self.links.len() + self.rails().len());
        if absent > 0 {
            writeln!(f, "  {absent} ordered pairs without a link: staged through the host")?;
        }
        for port in self.ports() {
            match port.alike {
                0 => write!(f, "  port `{}` is shared", port.name)?,
                alike => write!(f, "  port `{}` and {alike} like it are shared, each", port.name)?,
            }
            writeln!(f, " by {} paths", port.paths)?;
        }
        let host = &self.host;
        writeln!(
            f,
            "  calls: launch {} us, copy {} us, record {} us, wait {} us; wake-up {} us",
            short(host.launch_us),
            short(host.copy_us),
            short(host.record_us),
            short(host.wait_us),
            short(host.wake_us)
        )
    }
}

struct Port {
    name: String,
    paths: usize,
    alike: usize,
}

impl Topology {
    fn ports(&self) -> Vec<Port> {
        let ends = self.devices.iter().flat_map(|device| [&device.up, &device.down]);
        let mut users: BTreeMap<&str, usize> = BTreeMap::new();
        for path in ends.chain(self.links.iter().map(|link| &link.path)) {
            path.uses.iter().for_each(|used| *users.entry(&used.port).or_default() += 1);
        }
        let kind = |name: &str| name.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }).collect::<String>();
        let shared = users.into_iter().filter(|&(_, paths)| paths > 1);
        let kinds = grouped(shared.map(|(name, paths)| (format!("{} {paths}", kind(name)), (name, paths))));
        let first =
            |ports: Vec<(&str, usize)>| Port { name: ports[0].0.to_owned(), paths: ports[0].1, alike: ports.len() - 1 };
        kinds.into_iter().map(|(_, ports)| first(ports)).collect()
    }
}

/// Values under equal descriptions, in order of first appearance.
fn grouped<T>(items: impl Iterator<Item = (String, T)>) -> Vec<(String, Vec<T>)> {
    let mut groups: Vec<(String, Vec<T>)> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (what, item) in items {
        match known.get(&what) {
            Some(&group) => groups[group].1.push(item),
            None => {
                known.insert(what.clone(), groups.len());
                groups.push((what, vec![item]));
            }
        }
    }
    groups
}

fn about_device(device: &DeviceModel) -> String {
    let speed = if device.speed == 1.0 { String::new() } else { format!(", speed {}", short(device.speed)) };
    format!(
        "{}, {} GB at {} GB/s, {} GFLOP/s{speed}; from the host {}, to it {}",
        device.name,
        short(device.memory as f64 / 1e9),
        short(device.memory_gbps),
        short(device.gflops),
        about_path(&device.up),
        about_path(&device.down)
    )
}

fn about_link(link: &Link) -> String {
    match link.pull_gbps {
        Some(pull) => format!("{}, {} GB/s when pulled", about_path(&link.path), short(pull)),
        None => about_path(&link.path),
    }
}

fn about_host(host: &HostModel) -> String {
    let number = host.devices.len();
    let devices = format!("{number} {}", if number == 1 { "device" } else { "devices" });
    let about = |nic: &Nic| format!("{} GB/s each way after {} us", short(nic.gbps), short(nic.latency_us));
    let kinds = grouped(host.nics.iter().map(|nic| (about(nic), ())));
    let nics = kinds.iter().map(|(what, nics)| format!(", {} x NIC with {what}", nics.len())).collect::<String>();
    let shared = if (1..number).contains(&host.nics.len()) { ", shared" } else { "" };
    format!("{devices}{}{shared}", if nics.is_empty() { ", no NIC".into() } else { nics })
}

fn about_path(path: &Path) -> String {
    format!("{} GB/s after {} us", short(path.gbps), short(path.latency_us))
}

/// Three significant digits at least, and no trailing zeros.
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// `0-3, 5`.
fn ranges(sorted: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &i in sorted {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == i => *last = i,
            _ => runs.push((i, i)),
        }
    }
    let run =
        |&(first, last): &(usize, usize)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}
