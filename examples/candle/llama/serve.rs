//! A server of a model of Llama's shape, tensor parallel on all devices, with continuous batching: sequences join and
//! leave the batch between two words.
//!
//! ```sh
//! cargo run --release --example candle_serve                 # plays its clients, too, and ends
//! cargo run --release --example candle_serve -- 127.0.0.1:7000
//! ```
//!
//! A request is a line of words (numbers) with the number of words to write first: `20 1 2 3`. The answer is a line of
//! words, each sent when it is written, or `error: ..`.
//!
//! * `connection` reads requests of a client, and gives each to the engine with a channel for its words.
//! * `engine` is a thread. For each word it takes the requests that have come, and runs one step on all devices. Models
//!   and caches stay on their devices, in a `PerDevice`.

#[path = "model.rs"]
mod model;

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use gpu_pool::{GpuPool, PerDevice};
use gpu_pool_candle::{Error, Parts, enter};
use model::{Cache, Model, SMALL};
use std::collections::HashMap;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
};

/// The most sequences of a step.
const BATCH: usize = 16;
const CLIENTS: usize = 24;

/// A sequence that is wanted, and the way back for its words.
struct Request {
    prompt: Vec<u32>,
    wanted: usize,
    words: mpsc::UnboundedSender<u32>,
}

/// One device's part of the model, and caches by sequence.
type State = (Model, HashMap<u64, Cache>);

/// Writes words until no request is left and none can come. Returns the largest batch and the number of steps.
fn engine(models: &mut PerDevice<State>, mut requests: mpsc::Receiver<Request>) -> Result<(usize, usize)> {
    // The words to feed next, by sequence.
    let mut running: Vec<(u64, Vec<u32>, Request)> = Vec::new();
    let (mut next_id, mut largest, mut steps) = (0, 0, 0);
    loop {
        while running.len() < BATCH {
            // Waits for a request only if there is no other work.
            let request = if running.is_empty() { requests.blocking_recv() } else { requests.try_recv().ok() };
            let Some(request) = request else { break };
            running.push((next_id, request.prompt.clone(), request));
            next_id += 1;
        }
        if running.is_empty() {
            return Ok((largest, steps));
        }
        (largest, steps) = (largest.max(running.len()), steps + 1);
        let plan: Vec<(u64, Vec<u32>)> = running.iter().map(|(id, words, _)| (*id, words.clone())).collect();
        let found = models.try_run(|dev, _, (model, caches)| {
            // Sequences that have left the batch leave their caches.
            caches.retain(|id, _| plan.iter().any(|(running, _)| running == id));
            enter(dev, |device| {
                let of = |(id, words): &(u64, Vec<u32>)| (words.clone(), caches.remove(id).unwrap_or_default());
                let mut batch: Vec<_> = plan.iter().map(of).collect();
                let next = model.step(&mut batch, device)?;
                caches.extend(plan.iter().map(|(id, _)| *id).zip(batch.into_iter().map(|(_, cache)| cache)));
                Ok::<_, Error>(next)
            })
        })?;
        for ((_, words, request), next) in running.iter_mut().zip(&found[0]) {
            request.wanted -= 1;
            *words = vec![*next];
            // A client that has gone needs no further words.
            if request.words.send(*next).is_err() {
                request.wanted = 0;
            }
        }
        running.retain(|(.., request)| request.wanted > 0);
    }
}

fn parse(line: &str) -> Result<(usize, Vec<u32>)> {
    let numbers: Result<Vec<u32>, _> = line.split_whitespace().map(str::parse).collect();
    let numbers = numbers.context("a request is a line of whole numbers")?;
    let (wanted, prompt) = numbers.split_first().context("a request is a number and words")?;
    let total = *wanted as usize + prompt.len();
    ensure!(*wanted > 0 && !prompt.is_empty() && total <= SMALL.longest, "1 to {} words in all", SMALL.longest);
    ensure!(prompt.iter().all(|&word| (word as usize) < SMALL.words), "words are below {}", SMALL.words);
    Ok((*wanted as usize, prompt.to_vec()))
}

async fn connection(stream: TcpStream, requests: mpsc::Sender<Request>) -> Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Some(line) = lines.next_line().await? {
        match parse(&line) {
            Err(error) => write.write_all(format!("error: {error:#}").as_bytes()).await?,
            Ok((wanted, prompt)) => {
                let (words, mut written) = mpsc::unbounded_channel();
                requests.send(Request { prompt, wanted, words }).await.context("the engine has ended")?;
                while let Some(word) = written.recv().await {
                    write.write_all(format!("{word} ").as_bytes()).await?;
                }
            }
        }
        write.write_all(b"\n").await?;
    }
    Ok(())
}

/// The prompt of a client, and the words that it wants.
fn wish(client: usize) -> (usize, Vec<u32>) {
    (20 + client % 7, (0..3 + client % 5).map(|i| ((client * 37 + i * 11) % SMALL.words) as u32).collect())
}

async fn client(port: std::net::SocketAddr, index: usize) -> Result<(usize, Vec<u32>)> {
    let (wanted, prompt) = wish(index);
    let mut stream = BufReader::new(TcpStream::connect(port).await?);
    let line: Vec<String> = std::iter::once(wanted as u32).chain(prompt).map(|number| number.to_string()).collect();
    stream.write_all(format!("{}\n", line.join(" ")).as_bytes()).await?;
    let mut answer = String::new();
    stream.read_line(&mut answer).await?;
    let words: Result<Vec<u32>, _> = answer.split_whitespace().map(str::parse).collect();
    Ok((index, words.with_context(|| answer.clone())?))
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    SMALL.write(&file)?;
    // SAFETY: only this program knows the file.
    let parts = unsafe { Parts::mapped(&[&file])? };
    let pool = GpuPool::global()?;
    let load = |dev: &gpu_pool::Device| {
        let model = enter(dev, |device| Model::load(dev, &SMALL, &parts.builder(DType::F32, device)))?;
        Ok((model, HashMap::new()))
    };
    let mut models: PerDevice<State> = pool.per_device(|dev, _| load(dev))?;
    let (sender, requests) = mpsc::channel(2 * BATCH);
    let engine = std::thread::spawn(move || engine(&mut models, requests));
    let address = std::env::args().nth(1);
    let runtime = tokio::runtime::Runtime::new()?;
    let answers = runtime.block_on(async {
        let listener = TcpListener::bind(address.as_deref().unwrap_or("127.0.0.1:0")).await?;
        let port = listener.local_addr()?;
        println!("{} devices serve on {port}", pool.device_count());
        let mut clients = JoinSet::new();
        if address.is_none() {
            (0..CLIENTS).for_each(|index| drop(clients.spawn(client(port, index))));
        }
        let mut answers = Vec::new();
        while address.is_some() || answers.len() < CLIENTS {
            tokio::select! {
                accepted = listener.accept() => {
                    let (stream, sender) = (accepted?.0, sender.clone());
                    drop(tokio::spawn(async move {
                        if let Err(error) = connection(stream, sender).await {
                            eprintln!("client: {error:#}");
                        }
                    }));
                }
                Some(answer) = clients.join_next() => answers.push(answer??),
                // The engine has ended. Its error is below.
                () = sender.closed() => break,
            }
        }
        Ok::<_, anyhow::Error>(answers)
    })?;
    drop((sender, runtime));
    let (largest, steps) = engine.join().expect("the engine does not panic")?;
    println!("{} answers in {steps} steps, up to {largest} sequences in a step", answers.len());
    ensure!(largest >= 8, "the batch was not shared");

    // One device, one sequence at a time, writes the same.
    let alone = pool.on_device(0).try_run(|dev| {
        enter(dev, |device| {
            let model = Model::load(dev, &SMALL, &parts.builder(DType::F32, device))?;
            let mut all = Vec::new();
            for (wanted, prompt) in (0..CLIENTS).map(wish) {
                let (mut words, mut sequence) = (Vec::new(), [(prompt, Cache::default())]);
                while words.len() < wanted {
                    words.extend(model.step(&mut sequence, device)?);
                    sequence[0].0 = words[words.len() - 1..].to_vec();
                }
                all.push(words);
            }
            Ok(all)
        })
    })?;
    ensure!(answers.iter().all(|(client, words)| *words == alone[*client]), "the server writes other words");
    println!("the words of one device alone");
    Ok(())
}
