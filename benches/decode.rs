//! Words that a model of Llama's shape writes one after the other: `examples/decode`, whose layers are divided among
//! the devices, and the same model in plain torch with NCCL (`peers/decode.py`). Both sides capture a step in a graph,
//! which a host launches ahead of its GPU; both make the same random weights on the GPUs.
//!
//! On GPUs the model has the shapes of Llama 3 8B with 8 layers, in bf16. 128 words are written behind a prompt of 12,
//! for each sequence of a batch. torch has two forms: its own operations in a graph, and what `torch.compile` makes of
//! them in a graph. The latter is left out where compiling would take too long. On software GPUs the model is small, in
//! f32, and has no peer.
//!
//! * `<gpu or software>/decode/<devices>/<batch>/tokens_per_s`: words in a second, of all sequences together.
//! * `<gpu or software>/decode/<devices>/first_token_ms`: from the start of a process to the first word behind the
//!   prompt: opening GPUs, the pool or torch and NCCL, making the weights, the prompt. There torch runs no graph.
//!
//! On 2 GPUs it ends after 150 s: the runs of `first_token_ms` are as many as there is time for, and at most 3.

#[path = "../examples/decode/model/mod.rs"]
#[allow(dead_code)]
mod model;
mod support;

use gpu_pool::{GpuPool, Result};
use half::bf16;
use model::{
    Config, Decoder, LLAMA, Model, SMALL,
    kernels::{MODULE, Number},
};
use std::{
    cell::RefCell,
    env,
    process::Command,
    time::{Duration, Instant},
};
use support::{
    Bench, MILLISECONDS, Side, TOKENS,
    child::{self, Process},
    gpus,
};

const PROMPT: usize = 12;
/// Words that are timed, and how many sequences have them; the second line is of software GPUs.
const WORDS: [usize; 2] = [128, 16];
const BATCHES: [&[usize]; 2] = [&[1, 8, 64], &[1, 8]];
const LONGEST: usize = 144;
/// Which of a sequence's words are compared with the peer's.
const COMPARED: usize = 16;
/// No form of the peer is compiled after this time, and no run of `first_token_ms` begins if it may end later.
const COMPILED: Duration = Duration::from_secs(80);
const ENDED: Duration = Duration::from_secs(145);

fn main() {
    let mut arguments = env::args().skip_while(|argument| argument != "--first").skip(1);
    if let Some(devices) = arguments.next() {
        return first_word(devices.parse().expect("a number of devices"));
    }
    let mut bench = Bench::new("decode");
    // Before a clock runs: it takes seconds.
    child::torch_gpus();
    let (start, hardware) = (Instant::now(), gpus::count());
    let counts = if hardware == 1 { vec![1] } else { vec![2, 1] };
    for &devices in &counts {
        if hardware > 0 {
            rates::<bf16>(&mut bench, &LLAMA, devices, start);
        } else {
            rates::<f32>(&mut bench, &SMALL, devices, start);
        }
    }
    first_words(&mut bench, hardware == 0, &counts, start);
    bench.finish();
}

fn case(software: bool, devices: usize, what: &str) -> String {
    format!("{}/decode/{devices}/{what}", if software { "software" } else { "gpu" })
}

fn pool(software: bool, devices: usize) -> Result<GpuPool> {
    gpus::builder(software, devices).module(&MODULE).build()
}

/// The peer: a process that answers orders.
struct Torch(RefCell<Process>);

impl Torch {
    fn start(devices: usize) -> Option<Self> {
        Process::torch("decode.py", devices, &[&devices.to_string()], &[]).map(|process| Torch(RefCell::new(process)))
    }

    fn ask(&self, order: &str, form: &str, batch: usize, number: usize) -> f64 {
        let mut process = self.0.borrow_mut();
        process.order(&format!("{order}:{form}:{batch}"), number);
        process.answer()
    }

    /// The forms that are ready for this batch, with the names that the results have.
    fn forms(&self, devices: usize, batch: usize, start: Instant, compiling: &mut Duration) -> Vec<(&str, &str)> {
        let nccl = devices > 1;
        let all = [
            ("graph", if nccl { "torch + NCCL" } else { "torch" }),
            ("compile", if nccl { "torch.compile + NCCL" } else { "torch.compile" }),
        ];
        let ready = |&(form, name): &(&str, &str)| {
            if form == "compile" && start.elapsed() + *compiling > COMPILED {
                println!("{name}, batch {batch}: no time to compile");
                return false;
            }
            let seconds = self.ask("prepare", form, batch, 0);
            println!("{name}, batch {batch}: prepared in {seconds:.1} s");
            if form == "compile" && seconds.is_finite() {
                *compiling = Duration::from_secs_f64(seconds);
            }
            seconds.is_finite()
        };
        all.into_iter().filter(ready).collect()
    }
}

fn rates<T: Number>(bench: &mut Bench, config: &Config, devices: usize, start: Instant) {
    let software = gpus::count() == 0;
    let (batches, words) = (BATCHES[usize::from(software)], WORDS[usize::from(software)]);
    let named = |&batch: &usize| (batch, case(software, devices, &format!("{batch}/tokens_per_s")));
    let cases: Vec<_> = batches.iter().map(named).filter(|(_, case)| bench.wants(case)).collect();
    if cases.is_empty() {
        return;
    }
    let torch = if software { None } else { Torch::start(devices) };
    let pool = pool(software, devices).expect("the devices can be opened");
    let made = pool.per_device(|dev, shard| {
        let model = Model::new(dev, &shard, config)?;
        Decoder::<T>::new(dev, model, &config.prompts(1, PROMPT), LONGEST).map(Some)
    });
    let decoders = RefCell::new(made.expect("the model fits the devices"));
    // The first compilation is the longest. A quick run has no time for any.
    let mut compiling = Duration::from_secs(bench.size(15, 1000) as u64);
    bench.set_turns(1, if software { 1 } else { bench.size(7, 3) });
    for (batch, case) in cases {
        let prompts = config.prompts(batch, PROMPT);
        let graphs = decoders.borrow_mut().run(|dev, _, decoder| {
            let next = decoder.take().expect("it is put back").with(dev, &prompts, LONGEST)?;
            let graph = next.graph();
            *decoder = Some(next);
            Ok(graph)
        });
        let (operations, parts) = graphs.expect("the batch fits the devices")[0];
        println!("{case}: {operations} operations a step, in {parts} parts");
        let written = RefCell::new(Vec::new());
        let ours = Side::new("gpu-pool", || {
            let found = decoders.borrow_mut().run(|dev, _, decoder| {
                let decoder = decoder.as_mut().expect("it was put back");
                decoder.rewind(dev)?;
                decoder.advance(dev, PROMPT)?;
                dev.synchronize()?;
                let clock = Instant::now();
                decoder.advance(dev, words)?;
                dev.synchronize()?;
                let took = clock.elapsed();
                Ok((took, decoder.words(dev)?))
            });
            let found = found.expect("the model writes");
            assert!(found.iter().all(|(_, words)| *words == found[0].1), "the devices have other words");
            let took = found.iter().map(|(took, _)| *took).max().expect("there is a device");
            let mut before = written.borrow_mut();
            assert!(before.is_empty() || *before == found[0].1, "the words differ from turn to turn");
            before.clone_from(&found[0].1);
            (batch * words) as f64 / took.as_secs_f64()
        });
        let forms = torch.as_ref().map_or_else(Vec::new, |torch| torch.forms(devices, batch, start, &mut compiling));
        let side = |torch| {
            move |&(form, name)| {
                let torch: &Torch = torch;
                Side::new(name, move || torch.ask("rate", form, batch, words))
            }
        };
        let peers = torch.iter().flat_map(|torch| forms.iter().map(side(torch))).collect();
        bench.compare(&case, TOKENS, ours, peers);
        for (torch, (form, name)) in torch.iter().flat_map(|torch| forms.iter().map(move |form| (torch, form))) {
            let words = &written.borrow()[0][PROMPT..];
            let same = (0..COMPARED).take_while(|&i| torch.ask("word", form, batch, i) == f64::from(words[i])).count();
            println!("{name}, batch {batch}: the first {same} of {COMPARED} words of a sequence are the same");
        }
    }
}

/// A process of its own: writes the first word behind a prompt.
fn first_word(devices: usize) {
    fn write<T: Number>(config: &Config, pool: &GpuPool) -> Result<u32> {
        let words = pool.run(|dev, shard| {
            let model = Model::new(dev, &shard, config)?;
            let mut decoder = Decoder::<T>::new(dev, model, &config.prompts(1, PROMPT), LONGEST)?;
            decoder.advance(dev, PROMPT)?;
            decoder.words(dev)
        })?;
        Ok(words[0][0][PROMPT])
    }
    let software = gpus::count() == 0;
    let written = pool(software, devices).and_then(|pool| {
        let word = if software { write::<f32>(&SMALL, &pool) } else { write::<bf16>(&LLAMA, &pool) }?;
        println!("{word}");
        pool.close()
    });
    written.expect("the model writes");
}

/// The milliseconds until a process has told its first word.
fn until_told(begin: Instant, mut process: Process) -> f64 {
    process.answer();
    let took = begin.elapsed().as_secs_f64() * 1e3;
    assert!(process.ends().success(), "a process has failed");
    took
}

fn first_words(bench: &mut Bench, software: bool, counts: &[usize], start: Instant) {
    // Ours and the peer's, of each number of devices.
    let mut times: Vec<[Vec<f64>; 2]> = counts.iter().map(|_| Default::default()).collect();
    let mut longest = Duration::ZERO;
    for round in 0..3 {
        let begin = Instant::now();
        for (&devices, times) in counts.iter().zip(&mut times) {
            if !bench.wants(&case(software, devices, "first_token_ms")) {
                continue;
            }
            let begin = Instant::now();
            let mut ours = Command::new(env::current_exe().expect("this program"));
            times[0].push(until_told(begin, Process::start(ours.args(["--first", &devices.to_string()]))));
            let begin = Instant::now();
            let arguments = ["first", &devices.to_string()];
            if let Some(process) = (!software).then(|| Process::torch("decode.py", devices, &arguments, &[])).flatten()
            {
                times[1].push(until_told(begin, process));
            }
        }
        longest = longest.max(begin.elapsed());
        if start.elapsed() + longest > ENDED {
            println!("first_token_ms: {} runs", round + 1);
            break;
        }
    }
    bench.set_turns(0, 1);
    for (&devices, [ours, theirs]) in counts.iter().zip(times) {
        let name = if devices > 1 { "torch + NCCL" } else { "torch" };
        let theirs = Some(theirs).filter(|times| !times.is_empty());
        let peers = theirs.into_iter().map(|times| Side::sampling(name, move |to| to.extend(&times))).collect();
        let ours = Side::sampling("gpu-pool", move |to| to.extend(&ours));
        bench.compare(&case(software, devices, "first_token_ms"), MILLISECONDS, ours, peers);
    }
}
