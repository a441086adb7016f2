//! Measures a thread per GPU against a process per GPU: the cost of single calls, in microseconds.
//!
//! The threads are the device threads of one pool, each running the loop inside one scope. The processes are copies of
//! this program, one device and one pool each; they wait for a line on their standard input and answer with their time.
//! All sides take turns in one run; a turn's sample is the slowest device's. Target: threads within 10 % of processes.
//!
//! * `launch`: `fill_u32` of 8 elements through `Device::launch`; `launch_raw`: the same through the driver API
//!
//! * `recorder`: what the flight recorder adds to a call, in nanoseconds
//!
//! `_raw` cases exist on GPUs only.

mod support;

use std::{cell::RefCell, env, process::Command, ptr, sync::Barrier, time::Duration};

use cudarc::driver::sys;
use gpu_pool::{
    Device, DeviceBuffer, GpuPool, LaunchDims, Module, PerDevice, PinnedBuffer, Result, Stream,
    extend::driver::{self, DriverRef, KernelArg, Launch, ModuleImage, RawFunction, RawStream, ValueBytes},
    extend::lab::time_recorder,
    kernel,
};
use support::{
    Bench, MICROSECONDS, NANOSECONDS, Side,
    child::{Process, serve},
    gpus,
};

const PTX: &str = include_str!("../kernels/ptx/elementwise.ptx");
const CUBINS: &[(u32, &[u8])] = &[
    (80, include_bytes!("../kernels/ptx/elementwise.sm_80.cubin")),
    (90, include_bytes!("../kernels/ptx/elementwise.sm_90.cubin")),
];
static MODULE: Module = Module::ptx(PTX).with_cubins(CUBINS);
kernel! {
    static FILL: "fill_u32" in MODULE, fn(x: &mut [u32], n: u64, value: u32) |_dims| {
        x[..n as usize].fill(value);
    }
}
const ELEMENTS: usize = 8;
const COPIED: usize = 1024;
const LONG: Duration = Duration::from_secs(60);
const WHAT: [&str; 6] = ["launch", "launch_raw", "copy_4K", "record_wait", "allocate_free", "launch_synchronise"];

/// The state of one device for all loops.
struct State {
    filled: DeviceBuffer<u32>,
    source: PinnedBuffer<u32>,
    target: DeviceBuffer<u32>,
    other: Stream,
    raw: Option<Raw>,
}

/// The same device, opened again through the driver API. It shares the pool's context.
struct Raw {
    gpu: DriverRef,
    stream: RawStream,
    fill: RawFunction,
    address: u64,
}

impl State {
    fn new(dev: &Device) -> Result<Self> {
        let mut source = dev.pinned(COPIED)?;
        source.as_mut_slice()?.copy_from_slice(&gpus::noise(COPIED, 1));
        let is_gpu = dev.info().compute_capability.0 > 0;
        Ok(State {
            filled: dev.zeros(ELEMENTS)?,
            source,
            target: dev.zeros(COPIED)?,
            other: dev.stream()?,
            raw: is_gpu.then(|| Raw::new(dev.info().ordinal)),
        })
    }
}

impl Raw {
    fn new(ordinal: usize) -> Self {
        let gpu = driver::cuda::open(ordinal).expect("it is open already");
        let ptx = Some(PTX.as_bytes());
        let image = ModuleImage { ptx, cubins: CUBINS, packed: false, source: None, shared: false };
        let module = gpu.module_load(&image).expect("the crate's own kernels");
        let fill = gpu.function(module, "fill_u32").expect("it is there");
        let stream = gpu.stream_create(0).expect("a stream");
        let address = gpu.mem_alloc(4 * ELEMENTS).expect("32 bytes");
        Raw { gpu, stream, fill, address }
    }

    fn launch(&self, value: u32) {
        let args = [
            KernelArg::Slice { address: self.address, bytes: 4 * ELEMENTS, write: true },
            KernelArg::Value(ValueBytes::new(&(ELEMENTS as u64).to_ne_bytes())),
            KernelArg::Value(ValueBytes::new(&value.to_ne_bytes())),
        ];
        let dims = LaunchDims::cover(ELEMENTS);
        let launch = Launch { name: "fill_u32", function: self.fill, host: None, dims, args: &args, early: false };
        // SAFETY: the arguments fit the kernel; the memory is never given back.
        unsafe { self.gpu.launch(&launch, self.stream) }.expect("a launch");
    }

    fn allocate_free(&self) {
        let (mut address, stream) = (0, ptr::with_exposed_provenance_mut(self.stream.0 as usize));
        // SAFETY: the context is current on a device thread; the stream is live; the memory is freed once, unused.
        let results =
            unsafe { [sys::cuMemAllocAsync(&mut address, 4 * COPIED, stream), sys::cuMemFreeAsync(address, stream)] };
        assert_eq!(results, [sys::CUresult::CUDA_SUCCESS; 2]);
    }

    fn wait(&self) {
        assert!(self.gpu.stream_wait_idle(self.stream, LONG).expect("the stream is healthy"), "a kernel is stuck");
    }
}

/// Microseconds per call of `what`, `rounds` times.
fn time(dev: &Device, state: &mut State, what: &str, rounds: usize) -> Result<f64> {
    let State { filled, source, target, other, raw } = state;
    let dims = LaunchDims::cover(ELEMENTS);
    let value = rounds as u32;
    let raw = || raw.as_ref().expect("only asked of GPUs");
    let fill = |filled: &mut DeviceBuffer<u32>, value| {
        // SAFETY: the kernel writes the elements of `filled` and nothing else.
        unsafe { dev.launch(&FILL, dims, (filled, ELEMENTS as u64, value)) }
    };
    let once = || match what {
        "launch" => fill(filled, value),
        "launch_raw" => {
            raw().launch(value);
            Ok(())
        }
        "copy_4K" => dev.upload_pinned_into(source, target),
        "record_wait" => dev.on(other).wait(&dev.record()?),
        // SAFETY: nobody reads it.
        "allocate_free" => unsafe { dev.uninit::<u32>(COPIED) }.map(drop),
        "allocate_free_raw" => {
            raw().allocate_free();
            Ok(())
        }
        "launch_synchronise" => fill(filled, value).and_then(|()| dev.synchronize()),
        _ => panic!("{what}?"),
    };
    let micros = support::gpus::micros_per_call(dev, rounds, once)?;
    dev.on(other).synchronize()?;
    dev.synchronize()?;
    match what {
        "launch" | "launch_synchronise" => assert_eq!(dev.download(filled)?, [value; ELEMENTS]),
        "copy_4K" => assert_eq!(dev.download(target)?, source.as_slice()?),
        "launch_raw" | "allocate_free_raw" => raw().wait(),
        _ => {}
    }
    Ok(micros)
}

/// Calls per turn: some milliseconds of work, less than a launch queue holds.
fn rounds(bench: &Bench, what: &str) -> usize {
    bench.size(if what == "allocate_free" { 5000 } else { 500 }, 50)
}

/// A pool, and the state of its threads.
struct Threads {
    pool: GpuPool,
    states: PerDevice<State>,
}

impl Threads {
    fn new(pool: GpuPool) -> Self {
        let states = pool.per_device(|dev, _| State::new(dev)).expect("streams and little memory");
        Threads { pool, states }
    }

    /// The time of the slowest of the first `devices`, which start together.
    fn time(&self, devices: usize, what: &str, rounds: usize) -> f64 {
        let start = Barrier::new(devices);
        let all: Vec<usize> = (0..devices).collect();
        let times = self.pool.on(&all).run(|dev, _| {
            start.wait();
            time(dev, &mut *self.states.borrow_mut(dev)?, what, rounds)
        });
        times.expect("every call succeeds").into_iter().fold(0.0, f64::max)
    }
}

/// Starts this program again, with one device.
fn start(software: bool, device: usize) -> Process {
    let backend = if software { "host:8" } else { "cuda" };
    let mut command = Command::new(env::current_exe().expect("this program has a path"));
    command.arg("--child").env("GPU_POOL_BACKEND", backend).env("GPU_POOL_DEVICES", device.to_string());
    Process::start(&mut command)
}

/// The processes' turn: the time of the slowest of the first `devices`.
fn time_processes(all: &mut [Process], what: &str, rounds: usize) -> f64 {
    all.iter_mut().for_each(|process| process.order(what, rounds));
    all.iter_mut().map(Process::answer).fold(0.0, f64::max)
}

fn child() {
    let threads = Threads::new(GpuPool::builder().module(&MODULE).build().expect("the device can be opened"));
    serve(|what, rounds| threads.time(1, what, rounds));
}

fn main() {
    if env::args().nth(1).as_deref() == Some("--child") {
        return child();
    }
    let mut bench = Bench::new("launch");
    let hardware = gpus::count();
    let software = hardware == 0;
    let case = if software { "software" } else { "gpu" };
    let most = if software { 2 } else { hardware.min(8) };
    // The children open their devices while this process does.
    let processes: RefCell<Vec<Process>> = RefCell::new((0..most).map(|i| start(software, i)).collect());
    let builder = GpuPool::builder().module(&MODULE);
    let builder = match software {
        true => builder.host(most),
        false => builder.cuda().devices(&(0..most).collect::<Vec<_>>()),
    };
    let threads = Threads::new(builder.build().expect("the devices can be opened"));
    for what in WHAT {
        if software && what.ends_with("_raw") {
            continue;
        }
        let rounds = rounds(&bench, what);
        for devices in [1, 2, 4, 8].into_iter().filter(|&n| n <= most) {
            let mut peers =
                vec![Side::new("processes", || time_processes(&mut processes.borrow_mut()[..devices], what, rounds))];
            if what == "allocate_free" && !software {
                let raw = || threads.time(devices, "allocate_free_raw", 200);
                peers.push(Side::new("cuMemAllocAsync, threads", raw));
            }
            let ours = Side::new("threads", || threads.time(devices, what, rounds));
            bench.compare(&format!("{case}/{what}/{devices}"), MICROSECONDS, ours, peers);
        }
    }
    let calls = bench.size(100_000, 1000) as u64;
    let record = || time_recorder(calls).as_secs_f64() * 1e9 / calls as f64;
    bench.compare("recorder", NANOSECONDS, Side::new("record", record), Vec::new());
    bench.finish();
}
