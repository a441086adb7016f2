//! Measures jobs against what programs write by hand: a thread per device with `crossbeam-channel`, and with tokio's
//! `mpsc` and `oneshot`. The peers do nothing with a device: no order with scopes, no stream, no booking, no abort.
//!
//! * `latency/<devices>`: one job at a time, from `submit` to the woken waiter, threads awake
//! * `latency/<devices>/idle_300us`: after 300 idle us, so that the threads are asleep
//! * `throughput/<devices>`: empty jobs of four submitting threads, in nanoseconds per job
//!
//! * `prove/<devices>`: `examples/prove`'s commitments of 2^16 to 2^22 elements on GPUs, or of 2^10 to 2^16 on software
//!   GPUs, against one device, and against one that begins a job when the one before is over (`overlap(0)`)
//! * `prove_pageable/<devices>`: the same without page-locked memory
//! * `prove/copies`: only the uploads of `prove`, on one device
//!
//! At the end it prints the bytes of a queued job beside its closure.

#[path = "../examples/prove/prover/mod.rs"]
mod prover;
mod support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use gpu_pool::{
    Device, GpuPool, PinnedBuffer,
    jobs::{JobHandle, Jobs, JobsWith},
};
use prover::Prover;
use support::{Bench, MICROSECONDS, MILLISECONDS, NANOSECONDS, Side, gpus};

const IDLE: Duration = Duration::from_micros(300);
const SUBMITTERS: usize = 4;

/// Counts bytes, for the size of a queued job.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator, with their arguments as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A closure and the way to whoever waits for it.
type Task = Box<dyn FnOnce() + Send>;

/// A thread per device, by hand: all take from one bounded channel.
struct ByHand(Option<crossbeam_channel::Sender<Task>>, Vec<thread::JoinHandle<()>>);

impl ByHand {
    fn new(threads: usize) -> Self {
        let (sender, receiver) = crossbeam_channel::bounded::<Task>(64);
        let work = |_| {
            let receiver = receiver.clone();
            thread::spawn(move || receiver.iter().for_each(|task| task()))
        };
        ByHand(Some(sender), (0..threads).map(work).collect())
    }

    fn submit(&self, x: usize) -> crossbeam_channel::Receiver<usize> {
        let (answer, answered) = crossbeam_channel::bounded(1);
        let task: Task = Box::new(move || answer.send(x).expect("its waiter waits"));
        self.0.as_ref().expect("it is open").send(task).expect("the threads run");
        answered
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        self.0 = None;
        self.1.drain(..).for_each(|thread| thread.join().expect("no task panics"));
    }
}

/// The same with tokio: a channel per device, and an answer by `oneshot`.
struct Tokio(Vec<tokio::sync::mpsc::Sender<Task>>, Vec<thread::JoinHandle<()>>, AtomicUsize);

impl Tokio {
    fn new(threads: usize) -> Self {
        let (senders, threads) = (0..threads)
            .map(|_| {
                let (sender, mut receiver) = tokio::sync::mpsc::channel::<Task>(64);
                let work = move || {
                    while let Some(task) = receiver.blocking_recv() {
                        task();
                    }
                };
                (sender, thread::spawn(work))
            })
            .unzip();
        Tokio(senders, threads, AtomicUsize::new(0))
    }

    fn submit(&self, x: usize) -> tokio::sync::oneshot::Receiver<usize> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let task: Task = Box::new(move || answer.send(x).expect("its waiter waits"));
        let next = self.2.fetch_add(1, Relaxed) % self.0.len();
        assert!(self.0[next].blocking_send(task).is_ok(), "the threads run");
        answered
    }
}

impl Drop for Tokio {
    fn drop(&mut self) {
        self.0.clear();
        self.1.drain(..).for_each(|thread| thread.join().expect("no task panics"));
    }
}

fn submit(jobs: &Jobs, x: usize) -> JobHandle<usize> {
    jobs.submit(move |_| Ok(x)).expect("the queue takes jobs")
}

/// Times single calls, each after `idle`.
fn latency<'a>(name: &'a str, calls: usize, idle: Duration, mut call: impl FnMut(usize) -> usize + 'a) -> Side<'a> {
    Side::sampling(name, move |samples| {
        for i in 0..calls + 5 {
            if !idle.is_zero() {
                thread::sleep(idle);
            }
            let clock = Instant::now();
            let answer = call(i);
            let micros = clock.elapsed().as_secs_f64() * 1e6;
            assert_eq!(answer, i);
            if i >= 5 {
                samples.push(micros);
            }
        }
    })
}

/// Nanoseconds per job of four threads, each of which waits for its jobs 16 behind their submission.
fn throughput<'a, H>(
    name: &'a str,
    each: usize,
    submit: impl Fn(usize) -> H + Sync + 'a,
    wait: impl Fn(H) -> usize + Sync + 'a,
) -> Side<'a> {
    Side::new(name, move || {
        let clock = Instant::now();
        thread::scope(|s| {
            for _ in 0..SUBMITTERS {
                s.spawn(|| {
                    let mut ahead = std::collections::VecDeque::new();
                    let mut sum = 0;
                    for i in 0..each {
                        ahead.push_back(submit(i));
                        if ahead.len() == 16 {
                            sum += ahead.pop_front().map_or(0, &wait);
                        }
                    }
                    sum += ahead.into_iter().map(&wait).sum::<usize>();
                    assert_eq!(sum, each * (each - 1) / 2);
                });
            }
        });
        clock.elapsed().as_secs_f64() * 1e9 / (SUBMITTERS * each) as f64
    })
}

/// Bytes that a queued job takes, beside a closure of 8 bytes.
fn bytes_of_a_job() -> f64 {
    const MANY: usize = 10_000;
    let pool = gpus::pool(true, 1);
    let jobs = pool.jobs().queue(MANY + 1).build().expect("a queue");
    let (go, gone) = crossbeam_channel::bounded::<()>(0);
    let wait = move |_: &gpu_pool::Device| Ok(gone.recv().is_err());
    let blocker = jobs.submit(wait).expect("it is taken");
    while blocker.place().is_none() {
        thread::yield_now();
    }
    let mut handles = Vec::with_capacity(MANY);
    let before = LIVE.load(Relaxed);
    handles.extend((0..MANY).map(|i| submit(&jobs, i)));
    let bytes = (LIVE.load(Relaxed) - before) as f64 / MANY as f64;
    drop(go);
    assert!(blocker.wait().expect("it ends"));
    let sum: usize = handles.into_iter().map(|handle| handle.wait().expect("it runs")).sum();
    assert_eq!(sum, MANY * (MANY - 1) / 2);
    bytes - size_of::<usize>() as f64
}

/// Commitments from one queue. All polynomials are in page-locked memory before the clock starts.
struct Prove {
    jobs: JobsWith<Prover>,
    polynomials: Vec<Arc<PinnedBuffer<u64>>>,
    _pool: GpuPool,
}

/// What a job does with its polynomial.
#[derive(Clone, Copy)]
enum Work {
    Commit,
    /// As a program without page-locked memory.
    CommitPageable,
    Upload,
}

impl Prove {
    fn new(devices: usize, overlap: usize, most: u32) -> Self {
        let builder = gpus::builder(gpus::count() == 0, devices).module(&prover::MODULE);
        let pool = builder.build().expect("the devices can be opened");
        let polynomial = |dev: &Device, number: usize| {
            let mut polynomial = dev.pinned(1 << (most - number as u32 % 7))?;
            let noise = gpus::noise(2 * polynomial.len(), number as u64);
            polynomial.as_mut_slice()?.copy_from_slice(bytemuck::cast_slice(&noise));
            Ok(Arc::new(polynomial))
        };
        let polynomials = |dev: &Device| (0..21).map(|number| polynomial(dev, number)).collect();
        let polynomials = pool.on_device(0).run(polynomials).expect("page-locked memory");
        let jobs = pool.jobs_with(Prover::new).queue(512).overlap(overlap).build().expect("a queue");
        Self { jobs, polynomials, _pool: pool }
    }

    fn side<'a>(&'a self, name: &'a str, work: Work, count: usize) -> Side<'a> {
        Side::new(name, move || self.milliseconds(work, count))
    }

    fn milliseconds(&self, work: Work, count: usize) -> f64 {
        let clock = Instant::now();
        let submit = |number: usize| {
            let x = self.polynomials[number % self.polynomials.len()].clone();
            let bytes = Prover::bytes(x.len().trailing_zeros()) as u64;
            let job = self.jobs.with(move |dev, prover| match work {
                Work::Commit => prover.commit(dev, dev.upload_pinned(&*x)?).map(Some),
                Work::CommitPageable => prover.commit(dev, dev.upload(x.as_slice()?)?).map(Some),
                Work::Upload => dev.upload_pinned(&*x).map(|_| None),
            });
            self.jobs.job().memory(bytes).submit(job).expect("it is taken")
        };
        let handles: Vec<_> = (0..count).map(submit).collect();
        for handle in handles {
            let root = handle.wait().expect("it succeeds");
            assert!(root.is_none_or(|root| root.as_slice().is_ok_and(|root| root.iter().any(|word| *word != 0))));
        }
        clock.elapsed().as_secs_f64() * 1e3
    }
}

fn prove(bench: &mut Bench) {
    if !bench.wants("prove") {
        return;
    }
    let (most, count) = if gpus::count() > 0 { (22, bench.size(336, 42)) } else { (16, bench.size(42, 14)) };
    let [one, serial] = [1, 0].map(|overlap| Prove::new(1, overlap, most));
    bench.set_turns(2, bench.size(15, 5));
    bench.compare("prove/copies", MILLISECONDS, one.side("gpu-pool", Work::Upload, count), vec![]);
    for devices in gpus::powers(gpus::device_count().max(2)) {
        let many = Prove::new(devices, 1, most);
        for (name, work) in [("prove", Work::Commit), ("prove_pageable", Work::CommitPageable)] {
            let mut peers = vec![serial.side("overlap(0), one device", work, count)];
            if devices > 1 {
                peers.insert(0, one.side("one device", work, count));
            }
            let ours = many.side("gpu-pool", work, count);
            bench.compare(&format!("{name}/{devices}"), MILLISECONDS, ours, peers);
        }
    }
}

fn main() {
    let mut bench = Bench::new("jobs");
    let calls = bench.size(2000, 200);
    let each = bench.size(50_000, 2_000);
    for devices in [1, 2] {
        let pool = gpus::pool(true, devices);
        let jobs = Arc::new(pool.jobs().build().expect("a queue"));
        let (by_hand, tokio) = (ByHand::new(devices), Tokio::new(devices));
        for (suffix, calls, idle) in [("", calls, Duration::ZERO), ("/idle_300us", calls / 5, IDLE)] {
            bench.compare(
                &format!("latency/{devices}{suffix}"),
                MICROSECONDS,
                latency("gpu-pool", calls, idle, |i| submit(&jobs, i).wait().expect("it succeeds")),
                vec![
                    latency("crossbeam-channel", calls, idle, |i| by_hand.submit(i).recv().expect("an answer")),
                    latency("tokio", calls, idle, |i| tokio.submit(i).blocking_recv().expect("an answer")),
                ],
            );
        }
        bench.compare(
            &format!("throughput/{devices}"),
            NANOSECONDS,
            throughput("gpu-pool", each, |i| submit(&jobs, i), |job| job.wait().expect("it succeeds")),
            vec![
                throughput("crossbeam-channel", each, |i| by_hand.submit(i), |x| x.recv().expect("an answer")),
                throughput("tokio", each, |i| tokio.submit(i), |x| x.blocking_recv().expect("an answer")),
            ],
        );
    }
    prove(&mut bench);
    println!("a queued job takes {:.0} bytes beside its closure", bytes_of_a_job());
    bench.finish();
}
