//! Proofs with checked data: each ordered pair of devices by copies and each pair by collectives, then all devices
//! together. A copy that passes says little of kernels that wait for each other (club-3090#892), so both are tried.

use super::report::Line;
use gpu_pool::{Device, Error, GpuPool, ReduceOp, Result, collective::PeerReport};
use std::sync::Arc;

/// Elements of a small proof.
const SMALL: usize = 1;
/// Elements of a large one: copies and collectives of another kind than of small ones.
const LARGE: usize = 4 << 20;
/// The same on software GPUs, whose copies are those of the CPU.
const LARGE_SOFTWARE: usize = 1 << 14;
/// How often each is repeated, each time with other data.
const TIMES: usize = 3;
/// The period of the data.
const PERIOD: usize = 251;

/// The number at a place. Sums of 64 devices are exact.
fn number(device: usize, time: usize, at: usize) -> f32 {
    ((at + 7 * device + 31 * time) % PERIOD) as f32
}

fn numbers(device: usize, time: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| number(device, time, at)).collect()
}

/// Tries everything. After the first wait in vain it stops: the devices may still be busy with it.
pub fn all(pool: &GpuPool, lines: &mut Vec<Line>) {
    let report = pool.report();
    let count = report.devices.len();
    let software = report.devices[0].pci_bus_id.is_empty();
    let large = if software { LARGE_SOFTWARE } else { LARGE };
    lines.push(pinned(pool));
    for peer in report.peers.iter().filter(|peer| peer.from != peer.to) {
        lines.extend(route(peer, software));
    }
    let before = lines.len();
    let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
    for (a, b) in pairs {
        let what = format!("GPUs {a} and {b}");
        if !note(&what, pool.on(&[a, b]).run(|dev, _| prove(dev, large)), lines) {
            return;
        }
    }
    let whole = note("all GPUs together", pool.run(|dev, _| prove(dev, large)), lines);
    if whole && lines.len() == before {
        let pairs = count * (count - 1);
        let sizes = format!("4 B and {} KB, {TIMES} times each", large * 4 / 1024);
        lines.push(Line::ok("proof", format!("{pairs} ordered pairs by copies and collectives, and all: {sizes}")));
    }
}

/// Adds lines of the mistakes. False if the pool may be stuck.
fn note(what: &str, found: Result<Vec<Vec<String>>>, lines: &mut Vec<Line>) -> bool {
    let to_do = "do not use these GPUs together: see IOMMU, ACS, NVLink above; GPU_POOL_ALGORITHM=staged goes round";
    match found {
        Ok(found) => {
            let wrong = found.into_iter().flatten();
            lines.extend(wrong.map(|wrong| Line::wrong("proof", format!("{what}: {wrong}"), to_do)));
            true
        }
        Err(error) => {
            lines.push(Line::wrong("proof", format!("{what}: {error}; other pairs were not tried"), to_do));
            !matches!(error, Error::Timeout { .. } | Error::DeviceLost { .. })
        }
    }
}

/// One member's part: copies of the next member's memory, then collectives.
fn prove(dev: &Device, large: usize) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let (me, count) = (dev.rank(), dev.count());
    let next = (me + 1) % count;
    for len in [SMALL, large] {
        let mut near = dev.zeros::<f32>(len)?;
        for time in 0..TIMES {
            let lent = dev.exchange(Arc::new(dev.upload(&numbers(me, time, len))?))?;
            dev.copy(&*lent[next], &mut near)?;
            let found = dev.download(&near)?;
            wrong.extend(differs("a copy", &found, |at| number(next, time, at)));
            // No member frees memory that the next member still reads.
            dev.barrier()?;
            drop(lent);
            let mut sum = dev.upload(&numbers(me, time, len))?;
            dev.all_reduce(&mut sum, ReduceOp::Sum)?;
            let found = dev.download(&sum)?;
            let total: Vec<f32> = (0..PERIOD).map(|at| (0..count).map(|from| number(from, time, at)).sum()).collect();
            wrong.extend(differs("all_reduce", &found, |at| total[at % PERIOD]));
            let root = time % count;
            let mut told = dev.upload(&numbers(me, time, len))?;
            dev.broadcast(&mut told, root)?;
            wrong.extend(differs("broadcast", &dev.download(&told)?, |at| number(root, time, at)));
        }
    }
    Ok(wrong)
}

fn differs(what: &str, found: &[f32], expected: impl Fn(usize) -> f32) -> Option<String> {
    let wrong = (0..found.len()).filter(|&at| found[at] != expected(at)).count();
    let first = (0..found.len()).find(|&at| found[at] != expected(at))?;
    let (got, wanted) = (found[first], expected(first));
    Some(format!(
        "{what} of {} bytes: {wrong} wrong numbers, the first at {first}: {got} for {wanted}",
        found.len() * 4
    ))
}

/// The pool's findings about a pair, from when it was built.
fn route(peer: &PeerReport, software: bool) -> Option<Line> {
    let PeerReport { from, to, claimed, verified, note, .. } = peer;
    let pair = format!("{from} -> {to}");
    if *verified {
        let (latency, rate) = (peer.latency?, peer.gigabytes_per_second?);
        let micros = latency.as_secs_f64() * 1e6;
        return Some(Line::ok("link", format!("{pair}: direct, {micros:.1} us, {rate:.0} GB/s")));
    }
    match claimed {
        true => Some(Line::wrong(
            "link",
            format!("{pair}: {note}; copies go through the host"),
            "the hardware claims access that it does not give: switch IOMMU and ACS off, or update the driver",
        )),
        false if software => None,
        false => Some(Line::note(
            "link",
            format!("{pair}: {note}; copies go through the host"),
            "`nvidia-smi topo -p2p r` says why; in a virtual machine the host must allow it",
        )),
    }
}

/// Page-locked memory can be had.
fn pinned(pool: &GpuPool) -> Line {
    let bytes = 64 << 20;
    match pool.pinned::<u8>(bytes) {
        Ok(_) => Line::ok("page-locked", format!("{} MB at once", bytes >> 20)),
        Err(error) => Line::wrong("page-locked", error.to_string(), "give the container or the machine more memory"),
    }
}
