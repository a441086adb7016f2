//! Programs that must not compile: each line that is wrong says so by `//~ CODE: part of the message`, and nothing else
//! in the file is wrong.
//!
//! What a user reads first, and how much there is to read, is a part of it where the head of a file says so: `//#
//! first: TEXT` is in the first line of rustc's first message, and `//# lines: NUMBER` is the most that all messages
//! have together.
//!
//! Why not trybuild: its `.stderr` files hold the whole text of one rustc version, which changes every six weeks, and
//! it builds all dependencies anew. What matters is which line is refused, for which reason, and that our own words are
//! there. So this runs `rustc` on each file against the library that this test was linked with.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::SystemTime,
};

/// What rustc has refused.
#[derive(Debug, Default)]
struct Refused {
    /// By line: the code and the message, with notes and labels, of each.
    lines: BTreeMap<usize, Vec<(String, String)>>,
    /// The messages in rustc's order.
    messages: Vec<String>,
}

/// The library as built for this test: the latest beside it.
fn library() -> PathBuf {
    let deps = env::current_exe().unwrap().parent().unwrap().to_owned();
    let built = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libgpu_pool-") && name.ends_with(".rlib")
    };
    let all = fs::read_dir(deps).unwrap().map(|entry| entry.unwrap().path()).filter(is_library);
    all.max_by_key(|path| built(path)).expect("the library was built before its tests")
}

fn compile(source: &Path, library: &Path) -> Result<(), Refused> {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compile_fail");
    fs::create_dir_all(&out).unwrap();
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args(["--edition=2024", "--emit=metadata", "--error-format=json", "--out-dir"])
        .arg(out)
        .arg("--extern")
        .arg(format!("gpu_pool={}", library.display()))
        .arg("-L")
        .arg(format!("dependency={}", library.parent().unwrap().display()))
        .arg(source)
        .output()
        .expect("rustc runs");
    if output.status.success() {
        return Ok(());
    }
    let mut refused = Refused::default();
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { panic!("{source:?}: {line}") };
        let (Some("error"), Some(spans)) = (message["level"].as_str(), message["spans"].as_array()) else { continue };
        let Some(span) = spans.iter().find(|span| span["is_primary"] == true) else { continue };
        let at = span["line_start"].as_u64().unwrap() as usize;
        let code = message["code"]["code"].as_str().unwrap_or_default().to_owned();
        let text = message["rendered"].as_str().unwrap_or_default().to_owned();
        refused.messages.push(text.clone());
        refused.lines.entry(at).or_default().push((code, text));
    }
    assert!(!refused.messages.is_empty(), "{source:?}: {}", String::from_utf8_lossy(&output.stderr));
    Err(refused)
}

/// What a file says of itself: by line, the code and a part of the message, either of which may be empty.
fn expected(source: &str) -> BTreeMap<usize, (String, String)> {
    let marked = source.lines().enumerate().filter_map(|(i, line)| Some((i + 1, line.split_once("//~")?.1.trim())));
    marked
        .map(|(at, mark)| {
            let (code, text) = mark.split_once(':').unwrap_or((mark, ""));
            (at, (code.trim().to_owned(), text.trim().to_owned()))
        })
        .collect()
}

/// What the head of a file says under this name.
fn said<'a>(source: &'a str, name: &str) -> Option<&'a str> {
    let head = source.lines().map_while(|line| line.strip_prefix("//#"));
    head.filter_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':')).map(str::trim).next()
}

/// What is wrong with the messages, as a user reads them.
fn read(source: &str, refused: &Refused) -> Result<(), String> {
    let first = refused.messages[0].lines().next().unwrap_or_default();
    if let Some(expected) = said(source, "first").filter(|expected| !first.contains(expected)) {
        return Err(format!("the first message begins `{first}`, without `{expected}`: {}", refused.messages.concat()));
    }
    let lines = refused.messages.iter().map(|message| message.trim_end().lines().count()).sum::<usize>();
    match said(source, "lines").map(|most| most.parse::<usize>().unwrap()) {
        Some(most) if lines > most => Err(format!("{lines} lines, more than {most}: {}", refused.messages.concat())),
        _ => Ok(()),
    }
}

#[test]
fn what_must_not_compile_does_not() {
    let library = library();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile_fail");
    let mut sources: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    // It is right with the feature.
    sources.retain(|path| !(cfg!(feature = "nvrtc") && path.ends_with("cuda_source_without_its_feature.rs")));
    sources.sort();
    assert!(sources.len() >= 20, "where have they gone?");
    let check = |source: &PathBuf| {
        let text = fs::read_to_string(source).unwrap();
        let expected = expected(&text);
        let Err(refused) = compile(source, &library) else { return Err("it compiles".to_owned()) };
        for (at, (code, text)) in &expected {
            let fits = |(c, t): &(String, String)| (code.is_empty() || c == code) && t.contains(text.as_str());
            if !refused.lines.get(at).is_some_and(|found| found.iter().any(fits)) {
                return Err(format!("line {at} is not refused by {code} with `{text}`: {}", refused.messages.concat()));
            }
        }
        match refused.lines.keys().find(|at| !expected.contains_key(at)) {
            Some(at) => Err(format!("line {at} is refused, and should not be: {}", refused.messages.concat())),
            None => read(&text, &refused),
        }
    };
    let workers = thread::available_parallelism().map_or(2, usize::from).min(8);
    let failed = parking_lot::Mutex::new(Vec::new());
    thread::scope(|s| {
        for worker in 0..workers {
            let (sources, check, failed) = (&sources, &check, &failed);
            s.spawn(move || {
                for source in sources.iter().skip(worker).step_by(workers) {
                    if let Err(why) = check(source) {
                        failed.lock().push(format!("{}: {why}", source.display()));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// The harness can tell: a program that is right compiles with the very same command.
#[test]
fn what_is_right_compiles() {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("right.rs");
    fs::write(
        &source,
        r#"
use gpu_pool::{GpuPool, PerDevice, Result, memory::UnifiedBuffer};

fn all(pool: &GpuPool, state: &PerDevice<std::rc::Rc<u32>>, table: &mut UnifiedBuffer<f32>) -> Result<()> {
    let local = vec![1.0f32; 8];
    let mut out = vec![0.0f32; 8];
    pool.run(|dev, shard| {
        let mut x = dev.upload(shard.of(&local))?;
        let (mut left, right) = x.split_at_mut(1);
        dev.copy(&right, &mut left).ok();
        Ok(**state.borrow(dev)?)
    })?;
    pool.run_mut(&mut out, 1, |dev, shard, rows| dev.download_into(&dev.upload(shard.of(&local))?, rows))?;
    pool.with(table.rows_mut(4)).run(|dev, _, mut rows| dev.scale(&mut rows, 2.0))?;
    println!("{:?} {:?}", out, table.as_slice()?);
    Ok(())
}

fn main() {
    let _ = all;
}
"#,
    )
    .unwrap();
    if let Err(refused) = compile(&source, &library()) {
        panic!("{refused:#?}");
    }
}

/// The implementations that give rustc's messages our words implement nothing.
#[test]
fn what_stays_on_its_thread_is_neither_send_nor_sync() {
    use gpu_pool::{
        Device, Graph, Group, OnStream, Stream,
        gradients::GradientExchange,
        per_device::{Ref, RefMut},
    };
    static_assertions::assert_not_impl_any!(Device: Send, Sync);
    static_assertions::assert_not_impl_any!(OnStream<'static>: Send, Sync);
    static_assertions::assert_not_impl_any!(Stream: Send, Sync);
    static_assertions::assert_not_impl_any!(Group<'static>: Send, Sync);
    static_assertions::assert_not_impl_any!(Graph: Send, Sync);
    static_assertions::assert_not_impl_any!(GradientExchange: Send, Sync);
    static_assertions::assert_not_impl_any!(Ref<'static, u8>: Send, Sync);
    static_assertions::assert_not_impl_any!(RefMut<'static, u8>: Send, Sync);
}
