//! Several traces as one: of processes of a cluster, or of one pool after the other.

use serde_json::Value;
use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::Path,
};

/// Puts traces of [`Builder::trace`](crate::Builder::trace) together, on one axis of time: of a cluster's processes by
/// rank 0's wall clock, which each asks for when its trace begins; of others, or without an answer, by their own. A
/// file whose program was killed is read to its last whole line.
///
/// ```
/// # let file = |name: &str| std::env::temp_dir().join(format!("gpu-pool-{name}-{}.json", std::process::id()));
/// # let (a, b, both) = (file("a"), file("b"), file("both"));
/// let pool = gpu_pool::GpuPool::builder().host(1).build()?;
/// for file in [&a, &b] {
///     pool.record_trace(file, || pool.run(|dev, _| dev.synchronize()))??;
/// }
/// gpu_pool::trace::merge([&a, &b], &both).unwrap();
/// # [a, b, both].map(|file| std::fs::remove_file(file).unwrap());
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// # Errors
/// Those of the files; `InvalidData` for one that is no such trace; `InvalidInput` if `into` is one of them.
pub fn merge<P: AsRef<Path>>(traces: impl IntoIterator<Item = P>, into: impl AsRef<Path>) -> io::Result<()> {
    let there = into.as_ref().canonicalize().ok();
    let open = |path: P| match there.is_some() && path.as_ref().canonicalize().ok() == there {
        true => Err(io::Error::new(io::ErrorKind::InvalidInput, "a trace cannot be merged into itself")),
        false => open(path.as_ref()),
    };
    let mut files = traces.into_iter().map(open).collect::<io::Result<Vec<_>>>()?;
    let first = files.iter().map(|(_, offset)| *offset).fold(f64::INFINITY, f64::min);
    let mut out = BufWriter::new(File::create(into)?);
    let (mut taken, mut flows) = (HashSet::new(), 0);
    let head = serde_json::json!({
        "ph": "M", "name": "gpu_pool_trace", "pid": 1,
        "args": { "version": super::format::VERSION, "clock_offset_us": if first.is_finite() { first } else { 0.0 } },
    });
    write!(out, "[\n{head}")?;
    for (lines, offset) in &mut files {
        // Processes without a cluster have one number: then a later file's gets another one.
        let mut processes = HashMap::<u64, u64>::new();
        let mut most = flows;
        for line in lines {
            let line = line?;
            let Ok(mut event) = serde_json::from_str::<Value>(line.trim_end_matches(',')) else { continue };
            if event["name"].as_str().is_some_and(|name| name.starts_with("gpu_pool_trace")) {
                continue;
            }
            if let Some(time) = event["ts"].as_f64() {
                event["ts"] = (time + (*offset - first)).into();
            }
            if let Some(process) = event["pid"].as_u64() {
                let own = *processes.entry(process).or_insert_with(|| {
                    let own = (process..).find(|process| !taken.contains(process)).unwrap_or(process);
                    taken.insert(own);
                    own
                });
                event["pid"] = own.into();
            }
            if let Some(id) = event["id"].as_u64() {
                let id = flows + (id & ((1 << 40) - 1));
                most = most.max(id);
                event["id"] = id.into();
            }
            write!(out, ",\n{event}")?;
        }
        flows = most;
    }
    writeln!(out, "\n]")?;
    out.flush()
}

type Lines = io::Lines<BufReader<File>>;

/// The lines of a file after its head, and its clock's offset in microseconds.
fn open(path: &Path) -> io::Result<(Lines, f64)> {
    let mut lines = BufReader::new(File::open(path)?).lines();
    let head = lines.by_ref().take(2).collect::<io::Result<Vec<_>>>()?;
    let event = head.get(1).and_then(|line| serde_json::from_str::<Value>(line.trim_end_matches(',')).ok());
    let is_one = |event: &Value| event["name"] == "gpu_pool_trace";
    let offset = event.filter(is_one).and_then(|event| event["args"]["clock_offset_us"].as_f64());
    let why = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is no trace of gpu-pool", path.display()));
    Ok((lines, offset.ok_or_else(why)?))
}
