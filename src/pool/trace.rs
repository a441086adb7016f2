//! A pool's traces: sessions of its [`timeline`](crate::timeline).

use super::GpuPool;
use crate::error::{Error, Result, Site};
use crate::{contain::Finally, memory::MemoryStats, thread::worker::Shared};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::{collections::HashMap, panic::Location, sync::Arc};

impl GpuPool {
    /// Runs `f`, and writes the work of the pool's devices meanwhile to a file: a Chrome trace, which
    /// <https://ui.perfetto.dev> opens. [`Builder::trace`](crate::Builder::trace) traces a pool's whole life, and says
    /// what is in the file.
    ///
    /// It returns when the work that `f` has submitted is in the file, or has not completed for two seconds. Other
    /// threads may use the pool meanwhile: their work is in the file, too.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the file cannot be written, or the pool's devices are traced already. `f` has run
    /// unless the file could not be made.
    #[track_caller]
    pub fn record_trace<R>(&self, path: impl AsRef<Path>, f: impl FnOnce() -> R) -> Result<R> {
        let (path, site) = (path.as_ref(), Location::caller());
        self.check_open()?;
        start(&self.shared, path).map_err(|error| refused("record_trace", site, path, &error))?;
        // The session ends also if the closure panics.
        let stop = Finally(|| drop(self.shared.timeline.stop()));
        let result = f();
        std::mem::forget(stop);
        self.shared.timeline.stop().map_err(|error| refused("record_trace", site, path, &error))?;
        Ok(result)
    }
}

fn refused(op: &'static str, site: Site, path: &Path, error: &std::io::Error) -> Error {
    Error::invalid_at(site, op, format_args!("{}: {error}", path.display()))
}

fn start(shared: &Arc<Shared>, path: &Path) -> std::io::Result<()> {
    let devices = shared.handles.iter().map(|handle| (handle.lane.clone(), handle.driver.clone(), handle.sharers > 1));
    let host = shared.world.as_ref().map_or((0, None), |world| (world.host(), world.clock()));
    let weak = Arc::downgrade(shared);
    let memory = move |device: usize| {
        let words = weak.upgrade().and_then(|shared| Some(shared.owners[device].get()?.mirror.read()));
        words.map_or((0, 0), |words| {
            let MemoryStats { in_use, reserved, .. } = MemoryStats::from_words(words);
            (in_use, reserved)
        })
    };
    shared.timeline.start(path, host, devices.collect(), Box::new(memory))
}

/// Starts the trace of a pool's whole life. A pool of a cluster, and a further pool of the process, has the number of
/// its process, or its own, in the file's name.
pub(crate) fn start_for_life(shared: &Arc<Shared>, path: &Path, site: Site) -> Result<()> {
    static POOLS: Mutex<Option<HashMap<PathBuf, usize>>> = Mutex::new(None);
    let mut pools = POOLS.lock();
    let before = pools.get_or_insert_default().entry(path.to_owned()).or_insert(0);
    let mut own = path.to_owned();
    if let Some(world) = shared.world.as_ref().filter(|world| world.devices().len() > 1) {
        own = numbered(&own, "", world.host());
    }
    if *before > 0 {
        own = numbered(&own, "pool", *before);
    }
    *before += 1;
    drop(pools);
    start(shared, &own).map_err(|error| refused("trace", site, &own, &error))
}

/// `trace.json` becomes `trace.pool1.json`.
fn numbered(path: &Path, word: &str, number: usize) -> PathBuf {
    let extension = path.extension().map_or_else(|| "json".into(), |extension| extension.to_string_lossy());
    path.with_extension(format!("{word}{number}.{extension}"))
}
