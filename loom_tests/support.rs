//! Runs models, and proves that they find mistakes ("teeth").
//!
//! A model that always passes proves little. So for each ordering site of the code (`sync::site`) the table in
//! `table.rs` names a model that must fail if this one site is weakened, and the kind of its failure.

use super::{
    shim::{self, Arc, UnsafeCell},
    table::{Death, TEETH},
};
use std::{
    io::Read,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Memory that loom watches: two unordered accesses, one of them a write, end the model with a race.
#[derive(Default)]
pub struct Watched<T>(UnsafeCell<T>);

// SAFETY: loom runs one thread at a time, and ends the model at the first unordered access.
unsafe impl<T> Send for Watched<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Watched<T> {}

impl<T: Copy> Watched<T> {
    pub fn new(value: T) -> Self {
        Watched(UnsafeCell::new(value))
    }

    #[track_caller]
    pub fn get(&self) -> T {
        // SAFETY: loom has checked that no write is concurrent.
        self.0.with(|value| unsafe { *value })
    }

    #[track_caller]
    pub fn set(&self, new: T) {
        // SAFETY: loom has checked that no access is concurrent.
        self.0.with_mut(|value| unsafe { *value = new });
    }
}

/// Starts a thread of a model that shares `state`.
pub fn spawn<S: 'static, R: 'static>(state: &Arc<S>, f: impl FnOnce(&S) -> R + 'static) -> shim::thread::JoinHandle<R> {
    let state = state.clone();
    shim::thread::spawn(move || f(&state))
}

/// One thread writes and calls `publish`. If `seen` then returns true, the other thread may read.
pub fn publication<S: Default + 'static>(publish: fn(&S), seen: fn(&S) -> bool) {
    let state = Arc::new((S::default(), Watched::new(0)));
    let publishing = spawn(&state, move |state| {
        state.1.set(1);
        publish(&state.0);
    });
    if seen(&state.0) {
        assert_eq!(state.1.get(), 1);
    }
    publishing.join().unwrap();
}

/// Explores all executions of `model` within the preemption bound. Fails if there is only one: then loom has seen no
/// concurrency in the model.
pub fn check(model: impl Fn() + Sync + Send + 'static) {
    check_within(3, model);
}

/// [`check`] with a bound of at most `preemptions`, for models of three threads that take minutes with a bound of
/// three.
/// `LOOM_MAX_PREEMPTIONS` above 3 lifts both bounds.
pub fn check_within(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    let bound = builder.preemption_bound.expect("run by `cargo loom`, which bounds preemptions");
    if bound <= 3 {
        builder.preemption_bound = Some(bound.min(preemptions));
    }
    // Either limit would end the exploration early and report success.
    assert!(builder.max_permutations.is_none() && builder.max_duration.is_none(), "models run to their end");
    let (counter, start) = (std::sync::Arc::new(AtomicUsize::new(0)), Instant::now());
    let executions = counter.clone();
    builder.check(move || {
        executions.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let executions = counter.load(Ordering::Relaxed);
    let name = thread::current().name().unwrap_or("model").to_owned();
    println!("{name}: {executions} executions in {:.2} s", start.elapsed().as_secs_f64());
    assert!(executions > 1, "one execution: loom saw no concurrency in this model");
}

/// Runs each mutant of `file` in a separate process, and demands that its model fails as the table says.
pub fn bite(file: &str) {
    let mut survivors = Vec::new();
    let mut killed = 0;
    for tooth in TEETH.iter().filter(|tooth| tooth.file == file) {
        for &(mutant, expected) in tooth.mutants {
            match run(file, tooth.model, mutant) {
                Ok(death) if death == expected => killed += 1,
                other => survivors.push(format!("{mutant} in {}: expected {expected:?}, got {other:?}", tooth.model)),
            }
        }
    }
    assert!(killed + survivors.len() > 0, "no mutants for {file}");
    println!("{file}: {killed} mutants killed");
    assert!(survivors.is_empty(), "survivors:\n{}", survivors.join("\n"));
}

fn run(file: &str, model: &str, mutant: &str) -> Result<Death, String> {
    let test = format!("models::{file}::{model}");
    let mut child = Command::new(std::env::current_exe().expect("this test's own path"))
        .args([&test, "--exact", "--nocapture", "--test-threads=1"])
        .env("GPU_POOL_MUTANT", mutant)
        .env_remove("RUST_BACKTRACE")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this test starts again");
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let out = thread::spawn(move || text_of(&mut out));
    let err = thread::spawn(move || text_of(&mut err));
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait().expect("the child can be waited for") {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err("ran for a minute".to_owned());
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    };
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    assert!(out.contains("running 1 test"), "no test is called {test}");
    if status.success() { Err("survived".to_owned()) } else { verdict(&err) }
}

fn text_of(from: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = from.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The kind of failure, by the *first* panic message; later messages may be consequences. A model that ran out of
/// branches, or a process that died without a message, proves nothing.
fn verdict(err: &str) -> Result<Death, String> {
    let panics = err.split("panicked at ").nth(1).ok_or_else(|| format!("no panic message: {err}"))?;
    let mut lines = panics.lines().filter(|line| !line.trim().is_empty());
    let (place, message) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    if message.contains("maximum number of branches") {
        Err(format!("inconclusive: {message}"))
    } else if message.contains("Causality violation") {
        Ok(Death::Race)
    } else if message.contains("deadlock;") {
        Ok(Death::Deadlock)
    } else if ["loom_tests/", "src/", "crates/"].iter().any(|folder| place.starts_with(folder)) {
        Ok(Death::Assertion)
    } else {
        Err(format!("unexplained: {place} {message}"))
    }
}
