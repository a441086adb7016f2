//! Software GPUs that take one operation at a time: the order is a function of the seed, it can be replayed, every
//! program stays live in it, and exploring finds and simplifies what goes wrong in one order of many.

use crate::support::{self, TIMEOUT, guarded};
use gpu_pool::{
    DeviceBuffer, Error, GpuPool, Kernel, LaunchDims, Module, ReduceOp, Result,
    extend::driver::{
        Address, DriverRef, FaultKind, HostArg, HostKernel, KernelArg, Launch, RawFunction, RawStream,
        host::{self, ExecutionOrder, HostConfig, MachineConfig, Trace, What},
    },
    kernel,
};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{
    Cause, Explorer, Topology,
    check::{Check, Kind},
    explore,
};
use std::{
    collections::HashSet,
    panic::catch_unwind,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::*},
        mpsc,
    },
    task::Poll,
    thread,
    time::Duration,
};

const LONG: Duration = TIMEOUT;

static MODULE: Module = Module::ptx("");

kernel! {
    /// x += 1
    static INCREMENT: "increment" in MODULE, fn(x: &mut [f32]) |_| {
        x.iter_mut().for_each(|x| *x += 1.0);
    }
    /// to = from
    static COPY_OUT: "copy_out" in MODULE, fn(from: &[f32], to: &mut [f32]) |_| {
        to.copy_from_slice(from);
    }
    /// Declared as reading what it writes.
    static LIAR: "liar" in MODULE, fn(x: &[f32], y: &mut [f32]) |_| {
        y[0] = x[0];
        // A kernel whose signature is wrong, as CUDA C would let it pass.
        let x = x.as_ptr().cast_mut();
        // SAFETY: within the slice, which the watcher has made a private copy of; that this is refused is what is
        // tested.
        unsafe { x.add(2).write(99.0) };
    }
}

/// Spins until the word is there.
static AWAIT: Kernel<(&[u32], &mut [u32])> = Kernel::resumable(&MODULE, "await", await_word);

fn await_word(_: LaunchDims, word: &[u32], out: &mut [u32]) -> Poll<()> {
    if word[0] == 0 {
        return Poll::Pending;
    }
    out[0] = word[0];
    Poll::Ready(())
}

fn machine(n: usize, schedule: ExecutionOrder) -> Vec<DriverRef> {
    let config = MachineConfig { schedule, ..MachineConfig::default() };
    host::machine_with(&vec![HostConfig::default(); n], &config).unwrap()
}

fn wait(device: &DriverRef, stream: RawStream) {
    assert!(device.stream_wait_idle(stream, LONG).unwrap());
}

fn fill(device: &DriverRef, at: Address, value: u32, stream: RawStream) {
    // SAFETY: the tests give a live word and wait before it goes.
    unsafe { device.fill_u32(at, value, 1, stream) }.unwrap();
}

/// Two devices with two streams each, an event between them, and words that tell the order.
fn driver_program(schedule: ExecutionOrder) -> (Trace, Vec<u32>) {
    let devices = machine(2, schedule);
    let (mut words, mut streams) = (Vec::new(), Vec::new());
    for device in &devices {
        words.push(device.mem_alloc(256).unwrap());
        streams.extend((0..2).map(|_| (device, device.stream_create(0).unwrap())));
    }
    let out = devices[0].host_alloc(64).unwrap();
    for round in 0..10 {
        for (i, (device, stream)) in streams.iter().enumerate() {
            fill(device, words[i / 2], round * 4 + i as u32, *stream);
        }
    }
    let event = devices[0].event_create(false).unwrap();
    devices[0].event_record(event, streams[0].1).unwrap();
    devices[1].stream_wait_event(streams[2].1, event).unwrap();
    fill(&devices[1], words[1] + 64, 5, streams[2].1);
    for (device, stream) in &streams {
        wait(device, *stream);
    }
    for (i, device) in devices.iter().enumerate() {
        // SAFETY: live memory, waited for.
        unsafe { device.copy_to_host(out.add(4 * i), words[i], 4, streams[2 * i].1) }.unwrap();
        wait(device, streams[2 * i].1);
    }
    // SAFETY: page-locked memory of at least two words, which nobody uses any more.
    let last = unsafe { std::slice::from_raw_parts(out.cast::<u32>(), 2) }.to_vec();
    (host::trace(&devices[0]).unwrap(), last)
}

#[test]
fn a_seed_is_an_order_and_a_list_of_choices_is_the_same_order() {
    let (trace, last) = driver_program(ExecutionOrder::Seeded(3));
    assert_eq!(trace.steps().len(), 44, "{trace}");
    for _ in 0..5 {
        assert_eq!(driver_program(ExecutionOrder::Seeded(3)), (trace.clone(), last.clone()));
    }
    assert_eq!(driver_program(ExecutionOrder::Replay(trace.choices())), (trace, last));
    let orders: HashSet<_> = (0..20).map(|seed| driver_program(ExecutionOrder::Seeded(seed)).0.choices()).collect();
    assert!(orders.len() > 15, "{} orders of 20", orders.len());
    let lasts: HashSet<_> = (0..20).map(|seed| driver_program(ExecutionOrder::Seeded(seed)).1).collect();
    assert!(lasts.len() > 1, "the order of operations shows in memory");
}

#[test]
fn without_choices_a_stream_goes_on_as_long_as_it_can() {
    let (trace, _) = driver_program(ExecutionOrder::Replay(Arc::from([])));
    assert_eq!(trace.switches(), 0);
    let mut runs: Vec<_> = trace.steps()[..41].iter().map(|step| (step.device, step.stream)).collect();
    runs.dedup();
    assert_eq!(runs.len(), 4, "each stream once, from beginning to end\n{trace}");
}

#[test]
fn threaded_machines_have_no_trace() {
    assert!(host::trace(&machine(1, ExecutionOrder::Threaded)[0]).is_none());
    assert!(GpuPool::builder().host(1).build().unwrap().trace().is_none());
}

/// A program with streams, copies, host waits and collectives.
fn pool_program(pool: &GpuPool) -> Result<()> {
    for scope in 0..3 {
        let sums = pool.run(|dev, _| {
            let me = dev.index() as f32;
            let mut x = dev.upload(&vec![me + 1.0; 100])?;
            let side = dev.stream()?;
            let mut y = dev.on(&side).zeros::<f32>(100)?;
            for _ in 0..4 {
                // SAFETY: the kernel's signature is its own.
                unsafe {
                    dev.launch(&INCREMENT, LaunchDims::cover(1), (&mut x,))?;
                    dev.on(&side).launch(&INCREMENT, LaunchDims::cover(1), (&mut y,))?;
                }
            }
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.axpy(1.0, &y, &mut x)?;
            dev.barrier()?;
            dev.all_reduce(&mut x, ReduceOp::Avg)?;
            dev.download(&x)
        })?;
        assert_eq!(sums, vec![vec![22.0; 100]; 3], "scope {scope}");
    }
    Ok(())
}

fn pool(n: usize, schedule: ExecutionOrder) -> GpuPool {
    GpuPool::builder().lab().host(n).schedule(schedule).module(&MODULE).timeout(LONG).build().unwrap()
}

fn traced(n: usize, schedule: ExecutionOrder, f: impl Fn(&GpuPool) -> Result<()>) -> Trace {
    let pool = pool(n, schedule);
    f(&pool).unwrap();
    pool.trace().unwrap()
}

#[test]
fn a_pool_program_has_one_trace_for_each_seed() {
    guarded(|| {
        let first: Vec<Trace> = (0..4).map(|seed| traced(3, ExecutionOrder::Seeded(seed), pool_program)).collect();
        for (seed, first) in first.iter().enumerate() {
            for round in 0..3 {
                let again = traced(3, ExecutionOrder::Seeded(seed as u64), pool_program);
                assert_same(first, &again, &format!("seed {seed}, round {round}"));
            }
            let replayed = traced(3, ExecutionOrder::Replay(first.choices()), pool_program);
            assert_same(first, &replayed, "replay");
        }
        assert_eq!(first.iter().map(Trace::choices).collect::<HashSet<_>>().len(), 4);
    });
}

fn assert_same(a: &Trace, b: &Trace, what: &str) {
    if a != b {
        let at =
            a.steps().iter().zip(b.steps()).position(|(a, b)| a != b).unwrap_or(a.steps().len().min(b.steps().len()));
        let around = |t: &Trace| {
            let text = t.to_string();
            text.lines().skip(at.saturating_sub(8)).take(16).collect::<Vec<_>>().join("\n")
        };
        panic!("{what}: the traces differ at step {at}\n{}\n--- and\n{}", around(a), around(b));
    }
}

#[test]
fn right_programs_are_right_in_every_order() {
    guarded(|| {
        explore_small(12, pool_program);
        // Staged copies, too.
        let staged = Explorer::new().devices(3).seeds(4).configure(|b| b.module(&MODULE).without_peer_access());
        staged.run(pool_program).unwrap();
    });
}

fn explore_small(seeds: u64, f: impl Fn(&GpuPool) -> Result<()>) {
    let explored = Explorer::new().devices(3).seeds(seeds).configure(|b| b.module(&MODULE)).run(f);
    let explored = explored.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(explored.runs >= 1 && explored.steps > 100);
}

/// Stream 1 reads what stream 0 writes, and nothing orders them; wrong only if the read comes between the second
/// write and the third.
fn unordered(pool: &GpuPool) -> Result<()> {
    let seen = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(8)?;
        let side = dev.stream()?;
        let mut y = dev.zeros::<f32>(8)?;
        dev.synchronize()?;
        let on_side = dev.on(&side);
        // SAFETY: nothing frees the buffers before the streams are through. That they race is what is tested.
        let (main, other) = unsafe { (dev.unordered(), on_side.unordered()) };
        // SAFETY: as above; the kernels are what their signatures say.
        unsafe {
            for _ in 0..3 {
                main.launch(&INCREMENT, LaunchDims::cover(1), (&mut x,))?;
            }
            other.launch(&COPY_OUT, LaunchDims::cover(1), (&x, &mut y))?;
        }
        dev.synchronize()?;
        dev.on(&side).synchronize()?;
        Ok(dev.download(&y)?[0])
    })?;
    if seen.contains(&2.0) {
        Err(Error::custom("the read came between the second write and the third"))
    } else {
        Ok(())
    }
}

#[test]
fn a_rare_order_is_found_shrunk_and_replayed() {
    guarded(|| {
        let explorer = Explorer::new().devices(2).seeds(200).configure(|b| b.module(&MODULE).check(Check::Off));
        let failure = explorer.run(unordered).expect_err("one order in a few fails");
        let text = failure.to_string();
        assert!(failure.replays(), "{text}");
        assert!((1..=2).contains(&failure.trace().switches()), "{text}");
        assert!(text.contains("the read came between"), "{text}");
        assert!(text.contains(&format!("GPU_POOL_SEED={}", failure.seed().unwrap())), "{text}");
        assert!(text.contains("kernel `increment`") && text.contains("kernel `copy_out`"), "{text}");
        println!("{text}");
        // Exactly the same again, from the choices and from the seed.
        let again = explorer.clone().replay(failure.choices()).without_shrinking().run(unordered).unwrap_err();
        assert_eq!(again.trace(), failure.trace());
        let seed = failure.seed().unwrap();
        let seeded = explorer.clone().first_seed(seed).seeds(1).run(unordered).unwrap_err();
        assert_eq!(seeded.choices(), failure.choices());
        // The first-come order is right.
        assert!(explorer.replay(Vec::new()).run(unordered).is_ok());
    });
}

#[test]
fn panics_are_failures_and_explore_panics_with_the_report() {
    guarded(|| {
        let failure = Explorer::new().devices(1).seeds(3).run(|pool| {
            pool.run(|_, _| Ok(()))?;
            panic!("always {}", pool.device_count())
        });
        let failure = failure.expect_err("it always panics");
        assert!(matches!(failure.cause(), Cause::Panic(message) if message == "always 1"));
        assert_eq!((failure.seed(), failure.trace().switches()), (Some(0), 0));
        let panicked = catch_unwind(|| explore(2, |_| Err(Error::custom("no good")))).unwrap_err();
        let message = panicked.downcast_ref::<String>().unwrap();
        assert!(message.starts_with("seed 0: no good"), "{message}");
    });
}

/// A word that one stream's kernel spins on is written by another stream, on every device at once.
fn spin(pool: &GpuPool) {
    let seen = pool.run(|dev, _| {
        let mut word = dev.zeros::<u32>(1)?;
        let mut out = dev.zeros::<u32>(1)?;
        let side = dev.stream()?;
        dev.synchronize()?;
        let on_side = dev.on(&side);
        // SAFETY: the buffers outlive the work, which is waited for below; the word is written while the kernel spins,
        // which is the point.
        let (main, other) = unsafe { (dev.unordered(), on_side.unordered()) };
        // SAFETY: as above.
        unsafe { main.launch(&AWAIT, LaunchDims::cover(1), (&word, &mut out))? };
        other.fill(&mut word, 7)?;
        dev.synchronize()?;
        dev.download(&out)
    });
    assert_eq!(seen.unwrap(), vec![vec![7]; pool.device_count()]);
}

#[test]
fn kernels_that_spin_let_others_run() {
    guarded(|| {
        spin(&GpuPool::builder().host(8).module(&MODULE).build().unwrap());
        for seed in 0..5 {
            let pool = pool(8, ExecutionOrder::Seeded(seed));
            spin(&pool);
            let trace = pool.trace().unwrap();
            let finished = trace.steps().iter().filter(|step| step.what == What::Kernel("await")).count();
            assert_eq!(finished, 8, "{trace}");
        }
        spin(&pool(2, ExecutionOrder::Virtual));
    });
}

/// The host writes the word without a call.
#[test]
fn kernels_that_spin_see_what_the_host_writes() {
    for schedule in [ExecutionOrder::Threaded, ExecutionOrder::Seeded(1)] {
        let devices = machine(1, schedule);
        let (device, flag) = (&devices[0], devices[0].host_alloc(8).unwrap());
        let stream = device.stream_create(0).unwrap();
        unsafe fn spins(_: LaunchDims, args: &[HostArg]) {
            let HostArg::Value(value) = args[0] else { unreachable!("as launched below") };
            let at: u64 = bytemuck::pod_read_unaligned(value.as_bytes());
            // SAFETY: the word lives until the end of the test, and everyone uses it atomically.
            if unsafe { AtomicU64::from_ptr(at as *mut u64) }.load(Acquire) == 0 {
                host::again();
            }
        }
        let args = [KernelArg::Value(gpu_pool::extend::driver::ValueBytes::new(&(flag as u64).to_ne_bytes()))];
        let host: HostKernel = spins;
        let dims = LaunchDims::cover(1);
        let launch =
            Launch { name: "spins", function: RawFunction(0), host: Some(host), dims, args: &args, early: false };
        // SAFETY: the argument is what the kernel takes.
        unsafe { device.launch(&launch, stream) }.unwrap();
        assert!(!device.stream_wait_idle(stream, Duration::from_millis(20)).unwrap());
        // SAFETY: an aligned word that lives and is used atomically only.
        unsafe { AtomicU64::from_ptr(flag.cast()) }.store(1, Release);
        wait(device, stream);
    }
}

/// Device threads that wait for each other where the library cannot see it, or that poll: slow, but live.
#[test]
fn programs_that_block_or_poll_out_of_sight_stay_live() {
    guarded(|| {
        let pool = pool(2, ExecutionOrder::Seeded(5));
        let (send, receive) = mpsc::channel::<f32>();
        let (send, receive) = (std::sync::Mutex::new(send), std::sync::Mutex::new(receive));
        let got = pool.run(|dev, _| {
            let x = dev.upload(&[3.0f32])?;
            if dev.index() == 0 {
                // Blocks until device 1 has got through a wait of its own.
                return Ok(receive.lock().unwrap().recv().unwrap());
            }
            let x = dev.download(&x)?[0];
            send.lock().unwrap().send(x).unwrap();
            Ok(x)
        });
        assert_eq!(got.unwrap(), [3.0, 3.0]);
        let polls = AtomicUsize::new(0);
        let polled = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; 8])?;
            for _ in 0..5 {
                dev.scale(&mut x, 2.0)?;
            }
            let event = dev.record()?;
            while !event.is_complete()? {
                polls.fetch_add(1, Relaxed);
                thread::yield_now();
            }
            Ok(())
        });
        polled.unwrap();
        assert!(polls.into_inner() > 0);
    });
}

#[test]
fn work_that_nobody_waits_for_is_done() {
    let devices = machine(1, ExecutionOrder::Seeded(0));
    let (stream, done) = (devices[0].stream_create(0).unwrap(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..3 {
        let done = done.clone();
        devices[0].launch_host(stream, Box::new(move || _ = done.fetch_add(1, Relaxed))).unwrap();
    }
    support::until("three functions", || done.load(Relaxed) == 3).unwrap();
    // And what is left when the last handle goes.
    let last = done.clone();
    devices[0].launch_host(stream, Box::new(move || _ = last.fetch_add(1, Relaxed))).unwrap();
    drop(devices);
    assert_eq!(done.load(Relaxed), 4);
}

#[test]
fn a_kernel_that_writes_what_it_declares_as_read_is_reported_and_harms_nothing() {
    guarded(|| {
        let pool = GpuPool::builder().host(2).module(&MODULE).check(Check::Races).build().unwrap();
        let lie = pool.run(|dev, _| {
            let x = dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?;
            let mut y = dev.zeros::<f32>(1)?;
            if dev.index() == 1 {
                // SAFETY: it is not what it says, which is what is tested; the software GPU keeps the harm away.
                unsafe { dev.launch(&LIAR, LaunchDims::cover(1), (&x, &mut y))? };
            }
            dev.download(&x)
        });
        let Err(Error::Misuse { device: 1, report, .. }) = lie else { panic!("{lie:?}") };
        // 3.0 and 99.0 differ in their upper two bytes only.
        assert_eq!((report.kind, report.bytes.clone()), (Kind::WrongDeclaration, 10..12));
        assert!(report.missing.contains("kernel `liar`") && report.missing.contains("argument 0"), "{report}");
        // The pool works again.
        pool.run(|dev, _| {
            let x = dev.upload(&[1.0f32])?;
            assert_eq!(dev.download(&x)?, [1.0]);
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn a_watched_kernel_leaves_the_memory_as_it_was() {
    let config = MachineConfig { watch_reads: true, ..MachineConfig::default() };
    let devices = host::machine_with(&[HostConfig::default()], &config).unwrap();
    let (device, stream) = (&devices[0], devices[0].stream_create(0).unwrap());
    let (at, out) = (device.mem_alloc(256).unwrap(), device.host_alloc(8).unwrap());
    unsafe fn scribbles(_: LaunchDims, args: &[HostArg]) {
        let HostArg::Slice { ptr, .. } = args[0] else { unreachable!("as launched below") };
        // SAFETY: within the argument, which is a copy.
        unsafe { ptr.add(1).write(77) };
    }
    let args = [KernelArg::Slice { address: at, bytes: 4, write: false }];
    let host: HostKernel = scribbles;
    let dims = LaunchDims::cover(1);
    fill(device, at, 0x0101_0101, stream);
    let launch =
        Launch { name: "scribbles", function: RawFunction(0), host: Some(host), dims, args: &args, early: false };
    // SAFETY: live memory, waited for below.
    unsafe {
        device.launch(&launch, stream).unwrap();
        device.copy_to_host(out, at, 4, stream).unwrap();
    }
    let fault = device.stream_wait_idle(stream, LONG).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Misuse);
    assert_eq!(fault.report.unwrap().bytes, 1..2);
    // SAFETY: page-locked memory whose copy has completed: the stream went on after the refused kernel.
    assert_eq!(unsafe { out.cast::<u32>().read() }, 0x0101_0101);
    assert!(device.stream_wait_idle(stream, LONG).unwrap(), "told once");
}

#[test]
fn dry_machines_compute_nothing_but_run_host_functions() {
    let config = MachineConfig {
        schedule: ExecutionOrder::Virtual,
        topology: Some(Arc::new(Topology::nvswitch(1))),
        dry: true,
        ..MachineConfig::default()
    };
    let devices = host::machine_with(&[HostConfig::default()], &config).unwrap();
    let (device, stream) = (&devices[0], devices[0].stream_create(0).unwrap());
    assert!(host::is_dry(&**device));
    let (at, out) = (device.mem_alloc(1 << 30).unwrap(), device.host_alloc(64).unwrap());
    fill(device, at, 9, stream);
    let ran = Arc::new(AtomicUsize::new(0));
    let run = ran.clone();
    device.launch_host(stream, Box::new(move || run.store(1, Relaxed))).unwrap();
    // SAFETY: live memory, waited for below.
    unsafe { device.copy_to_host(out, at, 4, stream) }.unwrap();
    wait(device, stream);
    // SAFETY: page-locked memory that nobody uses any more.
    assert_eq!((ran.load(Relaxed), unsafe { out.cast::<u32>().read() }), (1, 0));
}

#[test]
fn events_of_other_streams_order_steps() {
    // The classic: a consumer without a wait reads too early in some order; with the wait in none.
    let program = |waits: bool| {
        move |pool: &GpuPool| {
            let seen = pool.run(|dev, _| {
                let side = dev.stream()?;
                let mut x = dev.zeros::<f32>(4)?;
                let mut y: DeviceBuffer<f32> = dev.zeros(4)?;
                dev.synchronize()?;
                let on_side = dev.on(&side);
                // SAFETY: the buffers outlive the work.
                let (main, other) = unsafe { (dev.unordered(), on_side.unordered()) };
                // SAFETY: the kernels are what their signatures say.
                unsafe { main.launch(&INCREMENT, LaunchDims::cover(1), (&mut x,))? };
                let written = main.record()?;
                if waits {
                    other.wait(&written)?;
                }
                // SAFETY: as above.
                unsafe { other.launch(&COPY_OUT, LaunchDims::cover(1), (&x, &mut y))? };
                other.synchronize()?;
                Ok(dev.download(&y)?[0])
            })?;
            if seen == [1.0; 2] { Ok(()) } else { Err(Error::custom(format!("{seen:?}"))) }
        }
    };
    guarded(move || {
        let explorer = Explorer::new().devices(2).seeds(40).configure(|b| b.module(&MODULE).check(Check::Off));
        assert!(explorer.run(program(false)).is_err());
        explorer.run(program(true)).unwrap_or_else(|failure| panic!("{failure}"));
    });
}
