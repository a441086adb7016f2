//! The peer: PyTorch's caching allocator, in a process of its own, which takes its turns on command.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use parking_lot::Mutex;

use crate::{
    support::{Side, child::Process},
    trace::Trace,
};

/// The program that `GPU_POOL_TORCH` names: `torch_allocator`, built from `benches/peers/torch_allocator.cpp`, or
/// `torch_allocator.py` where that cannot be built. Both understand the same orders, which the C++ file lists.
pub struct Torch {
    pub name: &'static str,
    pub program: String,
    process: Mutex<Process>,
    trace: PathBuf,
}

impl Torch {
    /// None if it is not named.
    pub fn start() -> Option<Self> {
        let program = env::var("GPU_POOL_TORCH").ok().filter(|program| !program.is_empty())?;
        let is_script = Path::new(&program).extension().is_some_and(|extension| extension == "py");
        let mut command = Command::new(if is_script { "python3" } else { &program });
        if is_script {
            command.arg(&program);
        }
        Some(Torch {
            name: if is_script { "PyTorch (Python)" } else { "PyTorch (C++)" },
            process: Mutex::new(Process::start(&mut command)),
            program,
            trace: env::temp_dir().join(format!("gpu-pool-trace-{}", process::id())),
        })
    }

    /// Sends an order, and returns the answer.
    pub fn ask(&self, order: &str, number: u64) -> f64 {
        let mut process = self.process.lock();
        process.order(order, number as usize);
        process.answer()
    }

    /// Resets the peer, and loads a trace for `devices` devices, each with at most `limit` bytes.
    pub fn load(&self, trace: &Trace, devices: usize, limit: Option<u64>) {
        trace.write(&self.trace).expect("there is room for temporary files");
        self.ask("limit", limit.unwrap_or(0));
        let path = self.trace.to_str().expect("a readable path");
        self.ask(&format!("load:{path}"), devices as u64);
    }

    /// As [`load`](Self::load), with the trace's first part done.
    pub fn prepare(&self, trace: &Trace, devices: usize) {
        self.load(trace, devices, None);
        assert_eq!(self.ask("first", trace.first.len() as u64), 0.0, "there is memory for the trace");
    }

    /// A side that gets the same order at every turn.
    pub fn side<'a>(&'a self, order: String, number: usize) -> Side<'a> {
        Side::new(self.name, move || self.ask(&order, number as u64))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.trace);
    }
}
