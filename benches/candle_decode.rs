//! Words that a model of Llama's shape writes one after the other: with `gpu-pool-candle` on all GPUs in threads of one
//! process, by the model of `examples/candle/llama`; and with candle's own example for several GPUs,
//! `llama_multiprocess` (`peers/llama_multiprocess.rs`): a process for each GPU, and NCCL.
//!
//! On GPUs the model has the shapes of Llama 3 8B with 8 layers, in bf16, and random weights, of which the bench writes
//! a file of 4.5 GB in `/dev/shm`. candle's example has flash attention; here both sides have one plain attention, that
//! of our example's model. The head of the peer's file lists the other changes, all of which make it faster. On
//! software GPUs the model is small, in f32, and has no peer.
//!
//! * `<gpu or software>/candle_decode/<devices>/tokens_per_s`: words in a second, one sequence, each device's host
//!   thread running ahead of its GPU until it reads a word.
//! * `<gpu or software>/candle_decode/<devices>/first_token_ms`: from the start of the processes to the first word
//!   behind the prompt: opening GPUs, the pool or NCCL, reading the weights, and the prompt.
//!
//! Each run is a process of its own. The sides run in turns; values are medians.
//!
//! `cargo bench --features peer --bench candle_decode -- --json FILE`

#[path = "../examples/candle/llama/model.rs"]
#[allow(dead_code)]
mod model;
#[cfg(feature = "peer")]
#[path = "peers/llama_multiprocess.rs"]
mod peer;

use anyhow::{Context as _, Result, ensure};
use candle_core::DType;
use gpu_pool::GpuPool;
use gpu_pool_candle::{Parts, enter};
use half::bf16;
use model::{Cache, Config, Model, SMALL, random};
use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{BufRead as _, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

const LARGE: Config =
    Config { words: 128_256, width: 4096, inner: 14_336, layers: 8, heads: 32, kv_heads: 8, longest: 256 };
/// Words before the clock runs, which load kernels.
const WARM_UP: usize = 16;
const LENGTH: usize = 128;
const PROMPT: usize = 12;

impl Config {
    fn prompt(&self) -> Vec<u32> {
        (1..=PROMPT).map(|i| (i * 7919 % self.words) as u32).collect()
    }
}

fn main() -> Result<()> {
    let mut arguments = env::args().skip_while(|argument| argument != "--child").skip(1);
    let Some(child) = arguments.next() else { return compare() };
    let rest: Vec<String> = arguments.collect();
    match (child.as_str(), &rest[..]) {
        ("look", _) => look(),
        ("ours", [file, ..]) => ours(Path::new(file)),
        #[cfg(feature = "peer")]
        ("peer", [file, comm, rank, ranks, ..]) => {
            peer::run(Path::new(file), Path::new(comm), rank.parse()?, ranks.parse()?)
        }
        _ => anyhow::bail!("this program has no side {child}"),
    }
}

/// Prints whether devices are GPUs, and how many there are. (The comparing process opens none.)
fn look() -> Result<()> {
    let pool = GpuPool::builder().build()?;
    let gpu = pool.run(|dev, _| Ok(dev.info().compute_capability != (0, 0)))?[0];
    println!("{} {}", if gpu { "gpu" } else { "software" }, pool.device_count());
    Ok(())
}

fn ours(file: &Path) -> Result<()> {
    let start = Instant::now();
    let pool = GpuPool::builder().build()?;
    note("pool", start);
    // SAFETY: only the bench knows the file.
    let parts = unsafe { Parts::mapped(&[file])? };
    pool.try_run(|dev, place| {
        let gpu = dev.info().compute_capability != (0, 0);
        let (config, dtype) = if gpu { (LARGE, DType::BF16) } else { (SMALL, DType::F32) };
        enter(dev, |device| {
            #[cfg(feature = "cuda")]
            if let Ok(cuda) = device.as_cuda_device() {
                // SAFETY: all work of this process is on candle's stream.
                unsafe { cuda.disable_event_tracking() };
            }
            let model = Model::load(dev, &config, &parts.builder(dtype, device))?;
            if place.index() == 0 {
                device.synchronize()?;
                note("weights", start);
            }
            let mut sequence = [(Vec::new(), Cache::default())];
            decode(place.index() == 0, &config.prompt(), |words| {
                sequence[0].0 = words.to_vec();
                Ok(model.step(&mut sequence, device)?[0])
            })
        })
    })?;
    Ok(())
}

/// Tells when a step of the start is over, in milliseconds since the process's first line.
fn note(what: &str, start: Instant) {
    println!("note {what} {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
}

/// Writes words behind the prompt. One device tells what the comparing process reads: that the first word is there, the
/// words, and how many there were in a second.
fn decode<E>(tells: bool, prompt: &[u32], mut step: impl FnMut(&[u32]) -> Result<u32, E>) -> Result<(), E> {
    let mut words = vec![step(prompt)?];
    if tells {
        println!("first");
    }
    let mut start = Instant::now();
    while words.len() < WARM_UP + LENGTH {
        if words.len() == WARM_UP {
            start = Instant::now();
        }
        words.push(step(&words[words.len() - 1..])?);
    }
    if tells {
        println!("words {words:?}");
        println!("rate {}", LENGTH as f64 / start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The findings of a run.
struct Found {
    notes: Vec<String>,
    first_ms: f64,
    rate: f64,
    words: String,
}

impl Found {
    fn told(self, side: &str) -> Self {
        let notes = self.notes.join(", ");
        println!("  {side}: {notes}, first word {:.0} ms, {:.1} words/s", self.first_ms, self.rate);
        self
    }
}

/// Starts a side's processes on the first `devices` devices.
fn start(gpu: bool, devices: usize, sides: &[Vec<String>]) -> Result<Found> {
    let begun = Instant::now();
    let mut children = Vec::new();
    for arguments in sides {
        let mut command = Command::new(env::current_exe()?);
        command.arg("--child").args(arguments).stdout(Stdio::piped());
        if gpu {
            let known = env::var("CUDA_VISIBLE_DEVICES").ok();
            let all = known.unwrap_or_else(|| (0..devices).map(|i| i.to_string()).collect::<Vec<_>>().join(","));
            command.env("CUDA_VISIBLE_DEVICES", all.split(',').take(devices).collect::<Vec<_>>().join(","));
        } else {
            command.env("GPU_POOL_BACKEND", format!("host:{devices}"));
        }
        children.push(command.spawn()?);
    }
    let (mut first_ms, mut rate, mut words, mut notes) = (None, None, String::new(), Vec::new());
    for line in BufReader::new(children[0].stdout.take().context("a pipe")?).lines() {
        let line = line?;
        if line == "first" {
            first_ms = Some(begun.elapsed().as_secs_f64() * 1e3);
        } else if let Some(found) = line.strip_prefix("rate ") {
            rate = Some(found.parse()?);
        } else if let Some(found) = line.strip_prefix("words ") {
            words = found.to_string();
        } else if let Some(found) = line.strip_prefix("note ") {
            notes.push(found.to_string());
        }
    }
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "{sides:?}: {status}");
    }
    let (first_ms, rate) = (first_ms.context("no first word")?, rate.context("no rate")?);
    Ok(Found { notes, first_ms, rate, words })
}

/// A file of random weights in bf16: pieces of a few blocks of random numbers. The blocks' length is no multiple of a
/// row, so that no two rows are the same.
fn write(config: &Config, path: &Path) -> Result<()> {
    const BLOCK: usize = (1 << 22) - 3;
    let weights = config.weights();
    let (mut header, mut at) = (Vec::new(), 0);
    for (name, shape, _) in &weights {
        let end = at + 2 * shape.iter().product::<usize>();
        header.push(format!(r#""{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{at},{end}]}}"#));
        at = end;
    }
    let mut header = format!("{{{}}}", header.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let (mut blocks, mut state): (Vec<(f64, Vec<u8>)>, _) = (Vec::new(), 1);
    for (index, (_, shape, largest)) in weights.iter().enumerate() {
        if !blocks.iter().any(|(of, _)| of == largest) {
            let numbers = (0..BLOCK).flat_map(|_| bf16::from_f32(random(&mut state, *largest)).to_le_bytes());
            blocks.push((*largest, numbers.collect()));
        }
        let block = &blocks.iter().find(|(of, _)| of == largest).context("made above")?.1;
        let (mut left, mut from) = (2 * shape.iter().product::<usize>(), index * 20_000 % BLOCK * 2);
        while left > 0 {
            let piece = left.min(block.len() - from);
            file.write_all(&block[from..from + piece])?;
            (left, from) = (left - piece, 0);
        }
    }
    Ok(())
}

/// Ends with the bench.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn compare() -> Result<()> {
    let json = env::args().skip_while(|argument| argument != "--json").nth(1);
    let seen = Command::new(env::current_exe()?).args(["--child", "look"]).output()?;
    let seen = String::from_utf8(seen.stdout)?;
    let (kind, count) = seen.trim().split_once(' ').context("the devices")?;
    let (gpu, count) = (kind == "gpu", count.parse::<usize>()?);
    let place = if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { env::temp_dir() };
    let folder = Folder(place.join(format!("candle_decode-{}", std::process::id())));
    fs::create_dir_all(&folder.0)?;
    let (file, comm) = (folder.0.join("model.safetensors"), folder.0.join("nccl_id"));
    if gpu {
        write(&LARGE, &file)?
    } else {
        SMALL.write(&file)?
    }
    let text = |path: &Path| path.display().to_string();

    let counts = if count > 1 { vec![1, count] } else { vec![1] };
    let mut alone = None;
    for devices in counts {
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for _ in 0..if gpu { 3 } else { 1 } {
            here.push(start(gpu, devices, &[vec!["ours".into(), text(&file)]])?.told("here"));
            if gpu && cfg!(feature = "peer") {
                let rank =
                    |rank: usize| vec!["peer".into(), text(&file), text(&comm), rank.to_string(), devices.to_string()];
                let ranks: Vec<_> = (0..devices).map(rank).collect();
                // Without NCCL there is no peer.
                match start(gpu, devices, &ranks) {
                    Ok(found) => there.push(found.told("candle")),
                    Err(error) => println!("  candle: {error:#}"),
                }
                drop(fs::remove_file(&comm));
            }
        }
        ensure!(here.iter().all(|found| found.words == here[0].words), "the words differ from run to run");
        // In bf16 sums of parts round to other words.
        let alone = alone.get_or_insert_with(|| here[0].words.clone());
        ensure!(gpu || here[0].words == *alone, "{devices} devices write other words than one");
        let same = there.first().map(|peer| {
            let pairs = here[0].words.split(',').zip(peer.words.split(','));
            pairs.take_while(|(here, there)| here == there).count()
        });
        if let Some(same) = same {
            println!("{devices} devices: the first {same} of {} words are the peer's", WARM_UP + LENGTH);
        }
        let rows = [
            ("tokens_per_s", "tokens/s", (|found: &Found| found.rate) as fn(&Found) -> f64),
            ("first_token_ms", "ms", |found: &Found| found.first_ms),
        ];
        for (name, unit, of) in rows {
            let (value, case) = (median(here.iter().map(of)), format!("{kind}/candle_decode/{devices}/{name}"));
            let peer = (!there.is_empty()).then(|| median(there.iter().map(of)));
            let ratio = peer.map(|peer| if unit == "ms" { peer / value } else { value / peer });
            match (peer, ratio) {
                (Some(peer), Some(ratio)) => println!("{case}: {value:.1} {unit}, candle {peer:.1}: {ratio:.2} times"),
                _ => println!("{case}: {value:.1} {unit}"),
            }
            if let Some(file) = &json {
                let machine = env::var("GPU_POOL_MACHINE").unwrap_or_default();
                let peer = match (peer, ratio) {
                    (Some(peer), Some(ratio)) => {
                        format!(r#""peer":"candle llama_multiprocess","peer_value":{peer},"ratio":{ratio}"#)
                    }
                    _ => r#""peer":null,"peer_value":null,"ratio":null"#.into(),
                };
                let value = format!(r#""bench":"candle_decode","case":"{case}","value":{value},"unit":"{unit}""#);
                let line = format!(r#"{{{value},{peer},"machine":"{machine}"}}"#);
                writeln!(OpenOptions::new().create(true).append(true).open(file)?, "{line}")?;
            }
        }
    }
    Ok(())
}
