//! An inference server: it reads handwritten digits, in batches, each on a device that is free.
//!
//! ```sh
//! cargo run --release --example serve                            # until ctrl-c
//! cargo run --release --example serve -- --requests 2000         # plays its clients, too, and ends
//! ```
//!
//! A request is a line of 64 pixels from 0 to 16, separated by commas; its answer is a line with the digit, or with
//! `error: ..`. First it trains the perceptron of `train_digits`. Without GPUs it runs on software GPUs (with 2000
//! requests about 2 s on two cores).
//!
//! * `connection` puts the requests of a client into a channel. There is one such task for each client.
//! * `batches` takes as many of them as there are, up to `--batch`, or as come within `--wait`, and submits a job. It
//!   does not wait for the answers: meanwhile the next batch goes to another device, or behind this one on the same.
//! * On ctrl-c the server takes no new requests, and gives the answers to those that it has.

#[path = "train_digits/data.rs"]
mod data;
#[path = "train_digits/model.rs"]
#[allow(dead_code, reason = "the server needs its forward pass, `train` the rest")]
mod model;
#[path = "train_digits/rng.rs"]
mod rng;
#[path = "train_digits/train.rs"]
#[allow(dead_code, reason = "the server needs the weights alone")]
mod train;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use data::{CLASSES, Digits, Images, PIXELS};
use gpu_pool::{Device, DeviceBuffer, GpuPool, PinnedBuffer, jobs::JobsWith};
use gpu_pool_train::prelude::*;
use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// Serves a perceptron that reads handwritten digits.
#[derive(Debug, Parser)]
struct Options {
    /// The port of 127.0.0.1; 0: one that is free
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// The most requests of a batch
    #[arg(long, value_name = "N", default_value_t = 64)]
    batch: usize,
    /// The time in microseconds that a request waits for others
    #[arg(long, value_name = "MICROS", default_value_t = 200)]
    wait: u64,
    /// Sends N requests and ends
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Clients that send them, each one after the other
    #[arg(long, value_name = "N", default_value_t = 32)]
    clients: usize,
}

/// Jobs, and the weights on each device.
type Jobs = JobsWith<DeviceBuffer<f32>>;

/// The digit of a request, or why there is none.
type Answer = Result<u32, String>;

struct Request {
    pixels: Vec<f32>,
    answer: oneshot::Sender<Answer>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.batch > 0 && options.clients > 0, "a batch, and the clients, are at least one");
    let pool = GpuPool::builder().build()?;
    let digits = Digits::load(None)?;
    let trained = train::train(&pool, &digits, train::Settings { epochs: 20, batch: 100, lr: 0.2 }, |_| {})?;
    println!("{} x {}, accuracy {:.3}", pool.device_count(), pool.report().devices[0].name, trained.accuracy());

    let weights = trained.weights[0].clone();
    let jobs = pool.jobs_with(move |dev| dev.upload(&weights)).build()?;
    Runtime::new()?.block_on(run(&jobs, &options, digits.held_out))?;
    jobs.close()?;
    pool.close().context("the devices did not end well")
}

async fn run(jobs: &Jobs, options: &Options, images: Images) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", options.port)).await?;
    let address = listener.local_addr()?;
    println!("listening on {address}");
    let end = async {
        match options.requests {
            Some(requests) => play(address, images, requests, options.clients).await,
            None => Ok(tokio::signal::ctrl_c().await.map(|()| "ended by ctrl-c".to_owned())?),
        }
    };
    let (end, served) = serve(listener, jobs, options, end).await?;
    println!("{served}\n{end}");
    Ok(())
}

/// Serves until `end` comes. Then it answers all requests that it has read, and returns the value of `end`.
async fn serve<T>(
    listener: TcpListener,
    jobs: &Jobs,
    options: &Options,
    end: impl Future<Output = Result<T>>,
) -> Result<(T, String)> {
    let (requests, queue) = mpsc::channel(4 * options.batch);
    let wait = Duration::from_micros(options.wait);
    let batches = tokio::spawn(batches(jobs.clone(), queue, options.batch, wait));
    // Dropped when it ends: then `changed` comes back.
    let (serving, ended) = watch::channel(());
    let mut connections = JoinSet::new();
    tokio::pin!(end);
    let end = loop {
        tokio::select! {
            accepted = listener.accept() => {
                let connection = connection(accepted?.0, requests.clone(), ended.clone());
                // A connection that fails is its client's loss.
                connections.spawn(async { connection.await.unwrap_or_else(|error| eprintln!("client: {error}")) });
            }
            Some(_) = connections.join_next() => {}
            end = &mut end => break end?,
        }
    };
    drop((listener, serving, requests));
    connections.join_all().await;
    Ok((end, batches.await??))
}

/// Reads requests and writes their answers, until the client or the server ends.
async fn connection(stream: TcpStream, requests: mpsc::Sender<Request>, mut ended: watch::Receiver<()>) -> Result<()> {
    let (from, mut to) = stream.into_split();
    let mut lines = BufReader::new(from).lines();
    loop {
        let line = tokio::select! {
            line = lines.next_line() => line?,
            _ = ended.changed() => None,
        };
        let Some(line) = line else { return Ok(()) };
        let answer = match parse(&line) {
            Some(pixels) => {
                let (answer, answered) = oneshot::channel();
                requests.send(Request { pixels, answer }).await?;
                answered.await?
            }
            None => Err(format!("expected {PIXELS} pixels from 0 to 16, separated by commas")),
        };
        let text = answer.map_or_else(|error| format!("error: {error}\n"), |digit| format!("{digit}\n"));
        to.write_all(text.as_bytes()).await?;
    }
}

fn parse(line: &str) -> Option<Vec<f32>> {
    let pixel = |text: &str| text.trim().parse().ok().filter(|pixel| (0..=16).contains(pixel)).map(|p: u8| p.into());
    let pixels: Vec<f32> = line.split(',').map(pixel).collect::<Option<_>>()?;
    (pixels.len() == PIXELS).then(|| pixels.iter().map(|pixel| pixel / 16.0).collect())
}

/// Makes batches of requests, and jobs of batches, until there are no more connections. Returns the counts.
async fn batches(jobs: Jobs, mut queue: mpsc::Receiver<Request>, most: usize, wait: Duration) -> Result<String> {
    let (mut count, mut requests, mut running) = (0, 0, JoinSet::new());
    while let Some(first) = queue.recv().await {
        let mut batch = vec![first];
        let end = Instant::now() + wait;
        while batch.len() < most
            && let Ok(Some(next)) = timeout_at(end, queue.recv()).await
        {
            batch.push(next);
        }
        (count, requests) = (count + 1, requests + batch.len());
        let pixels: Vec<f32> = batch.iter().flat_map(|request| &request.pixels).copied().collect();
        // Waits where the queue is full. Then the channel fills, too, and the clients wait.
        let job = jobs.submit_async(jobs.with(move |dev, weights| classify(dev, weights, &pixels))).await?;
        running.spawn(async {
            let digits = job.await.and_then(|digits| Ok(digits.as_slice()?.to_vec()));
            for (i, request) in batch.into_iter().enumerate() {
                // Its client may be gone.
                let _ = request.answer.send(digits.as_ref().map(|digits| digits[i]).map_err(|e| e.to_string()));
            }
        });
        while running.try_join_next().is_some() {}
    }
    running.join_all().await;
    Ok(format!("{requests} requests in {count} batches"))
}

/// The digits of a batch. Does not wait: the handle of the job is ready when they are there.
fn classify(dev: &Device, weights: &DeviceBuffer<f32>, pixels: &[f32]) -> gpu_pool::Result<PinnedBuffer<u32>> {
    let rows = pixels.len() / PIXELS;
    let (_, logits) = model::forward(dev, weights, &dev.upload(pixels)?, rows)?;
    let mut digits = dev.pinned(rows)?;
    dev.download_pinned(&dev.argmax(&logits, CLASSES)?, &mut digits)?;
    Ok(digits)
}

/// Sends requests from several clients. Returns throughput, latencies and accuracy.
async fn play(address: SocketAddr, images: Images, requests: usize, clients: usize) -> Result<String> {
    let (images, start) = (Arc::new(images), Instant::now());
    let own = |first| (first..requests).step_by(clients).map(|request| request % images.len()).collect();
    let all: JoinSet<_> = (0..clients).map(|first| client(address, images.clone(), own(first))).collect();
    let (mut latencies, mut right) = (Vec::new(), 0);
    for result in all.join_all().await {
        let (more, more_right) = result?;
        latencies.extend(more);
        right += more_right;
    }
    let rate = requests as f64 / start.elapsed().as_secs_f64();
    ensure!(10 * right >= 9 * requests, "{right} right answers to {requests} requests");
    latencies.sort();
    let at = |percent: usize| latencies.get(requests * percent / 100).or(latencies.last()).copied().unwrap_or_default();
    let times = [50, 90, 99, 100].map(|percent| format!("{percent} %: {:.2} ms", 1e3 * at(percent).as_secs_f64()));
    Ok(format!("{rate:.0} requests/s, {right} right answers; latency {}", times.join(", ")))
}

/// Sends an image after the other. Returns the latencies, and the number of right answers.
async fn client(address: SocketAddr, images: Arc<Images>, own: Vec<usize>) -> Result<(Vec<Duration>, usize)> {
    let (from, mut to) = TcpStream::connect(address).await?.into_split();
    let (mut answers, mut latencies, mut right) = (BufReader::new(from).lines(), Vec::new(), 0);
    for image in own {
        let pixels = images.pixels[image * PIXELS..][..PIXELS].iter().map(|pixel| (16.0 * pixel).to_string());
        let line = pixels.collect::<Vec<_>>().join(",") + "\n";
        let sent = Instant::now();
        to.write_all(line.as_bytes()).await?;
        let answer = answers.next_line().await?.context("the server has ended")?;
        latencies.push(sent.elapsed());
        right += usize::from(answer == images.labels[image].to_string());
    }
    Ok((latencies, right))
}
