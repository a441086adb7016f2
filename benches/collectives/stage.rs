//! A stage: the operands of an operation on every device, calls of either side on them, and the check of the results.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::{
    DevicePtr, DevicePtrMut,
    sys::{self, CUresult},
};
use gpu_pool::{Device, DeviceBuffer, DeviceCopy, GpuPool, Result, interop::Cuda};
use parking_lot::Mutex;

use crate::{
    nccl::{Club, Rank},
    ops::{Number, Op, PERIOD, pattern},
    processes::Order,
    support::gpus,
};

/// The side that calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Who {
    Ours,
    /// NCCL in memory of our pool.
    Plain,
    /// NCCL in its own registered memory.
    Windows,
    /// The same two, but with a process for each GPU.
    ProcessesPlain,
    ProcessesWindows,
}

impl Who {
    /// NCCL's ways to run.
    pub const NCCL: [Who; 4] = [Who::Plain, Who::Windows, Who::ProcessesPlain, Who::ProcessesWindows];

    /// The way, for the name of the peer.
    pub fn way(self) -> &'static str {
        match self {
            Who::Ours => "",
            Who::Plain => "plain",
            Who::Windows => "windows",
            Who::ProcessesPlain => "processes, plain",
            Who::ProcessesWindows => "processes, windows",
        }
    }

    /// What a process of its own has to do, if the side runs in processes.
    fn in_process(self) -> Option<Who> {
        match self {
            Who::ProcessesPlain => Some(Who::Plain),
            Who::ProcessesWindows => Some(Who::Windows),
            _ => None,
        }
    }

    /// Whether NCCL's own memory is used.
    fn has_windows(self) -> bool {
        matches!(self, Who::Windows | Who::ProcessesWindows)
    }
}

/// Elements of the block that is repeated to fill buffers.
const BLOCK: usize = PERIOD << 15;
/// Results up to this length are checked wholly, longer ones in pieces.
const WHOLE: usize = 1 << 20;
const PIECES: usize = 16;
/// After this time the other threads are considered stuck.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A barrier that starts all threads together. It spins, since sleeping threads would start late.
pub struct Line {
    threads: usize,
    come: AtomicUsize,
}

impl Line {
    pub fn new(threads: usize) -> Self {
        Line { threads, come: AtomicUsize::new(0) }
    }

    /// Waits for the others. Reusable.
    pub fn wait(&self) {
        let mine = self.come.fetch_add(1, Ordering::AcqRel);
        let all = (mine / self.threads + 1) * self.threads;
        let (mut polls, since) = (0u32, Instant::now());
        while self.come.load(Ordering::Acquire) < all {
            polls += 1;
            if polls.is_multiple_of(256) {
                thread::yield_now();
                assert!(since.elapsed() < TIMEOUT, "a device thread did not come to the start");
            }
            std::hint::spin_loop();
        }
    }
}

/// A device's operands.
struct Seat<T: Number> {
    input: DeviceBuffer<T>,
    output: DeviceBuffer<T>,
}

/// An operation on the first devices of a pool.
pub struct Stage<'a, T: Number> {
    pool: &'a GpuPool,
    club: Option<&'a Club>,
    op: Op,
    /// Elements of the larger operand.
    total: usize,
    /// The devices of this process.
    devices: Vec<usize>,
    /// The ranks in all processes, and the first one here.
    world: usize,
    first: usize,
    seats: Vec<Mutex<Seat<T>>>,
}

/// A side's operation on one device, ready to be called.
pub struct Player<'a> {
    /// Enqueues the operation.
    pub call: &'a mut dyn FnMut() -> Result<()>,
    /// Waits until all enqueued operations are over.
    pub wait: &'a mut dyn FnMut() -> Result<()>,
}

impl Player<'_> {
    /// Microseconds of so many operations. The devices begin together.
    pub fn timed(&mut self, line: &Line, calls: usize) -> Result<f64> {
        line.wait();
        let clock = Instant::now();
        for _ in 0..calls {
            (self.call)()?;
        }
        (self.wait)()?;
        Ok(clock.elapsed().as_secs_f64() * 1e6)
    }

    /// Microseconds of the host per call: so many calls, without the wait for what they enqueue.
    pub fn on_host(&mut self, line: &Line, calls: usize) -> Result<f64> {
        (0..10).try_for_each(|_| (self.call)())?;
        (self.wait)()?;
        line.wait();
        let clock = Instant::now();
        (0..calls).try_for_each(|_| (self.call)())?;
        let micros = clock.elapsed().as_secs_f64() * 1e6;
        (self.wait)()?;
        Ok(micros / calls as f64)
    }
}

impl<'a, T: Number> Stage<'a, T> {
    /// Makes operands of `bytes` bytes, rounded down to a multiple that `world` divides, filled with noise.
    pub fn new(pool: &'a GpuPool, club: Option<&'a Club>, world: usize, op: Op, bytes: usize) -> Self {
        Stage::build(pool, club, ((0..world).collect(), world, 0), op, bytes)
    }

    /// One rank of `world`, on the pool's only device. The other ranks are in other processes.
    pub fn part(pool: &'a GpuPool, club: &'a Club, (rank, world): (usize, usize), op: Op, bytes: usize) -> Self {
        Stage::build(pool, Some(club), (vec![0], world, rank), op, bytes)
    }

    fn build(
        pool: &'a GpuPool,
        club: Option<&'a Club>,
        (devices, world, first): (Vec<usize>, usize, usize),
        op: Op,
        bytes: usize,
    ) -> Self {
        let total = bytes / size_of::<T>() / world * world;
        let (input, output) = op.lengths(total, world);
        let seats = pool
            .on(&devices)
            .run(|dev, _| Ok(Mutex::new(Seat { input: dev.zeros(input)?, output: dev.zeros(output)? })));
        let stage =
            Stage { pool, club, op, total, devices, world, first, seats: seats.expect("memory for the operands") };
        stage.load_noise();
        stage
    }

    /// The same operands, with NCCL among the players.
    pub fn with(self, club: &'a Club) -> Self {
        Stage { club: Some(club), ..self }
    }

    /// The sides that can run here.
    pub fn players(&self) -> Vec<Who> {
        let mut players = vec![Who::Ours];
        if let Some(club) = self.club {
            let processes = club.processes.as_ref().map(|processes| processes.windows);
            let plays = |who: &Who| match who.in_process() {
                Some(_) => processes.is_some_and(|windows| windows || !who.has_windows()),
                None => club.windows || !who.has_windows(),
            };
            players.extend(Who::NCCL.into_iter().filter(plays));
        }
        players
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// A barrier of the devices in this process.
    pub fn line(&self) -> Line {
        Line::new(self.devices.len())
    }

    /// Bytes of the larger operand.
    pub fn bytes(&self) -> usize {
        self.total * size_of::<T>()
    }

    /// Runs `f` on every device with the side's operation there. The operands are as at the beginning. With `aside` the
    /// operation has a stream of its own.
    pub fn each<R: Send>(
        &self,
        who: Who,
        aside: bool,
        f: impl Fn(&Device, &mut Player<'_>) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        self.pool.on(&self.devices).run(|home, _| {
            let stream = if aside { Some(home.stream()?) } else { None };
            let on = stream.as_ref().map(|stream| home.on(stream));
            let dev: &Device = on.as_deref().unwrap_or(home);
            let seat = &mut *self.seats[home.rank()].lock();
            if self.op.in_place() {
                dev.copy(&seat.input, &mut seat.output)?;
            }
            dev.synchronize()?;
            if who == Who::Ours {
                let call = &mut || self.op.ours(dev, &seat.input, &mut seat.output);
                return f(home, &mut Player { call, wait: &mut || dev.synchronize() });
            }
            let rank = &*self.club.expect("NCCL plays").ranks[home.rank()].lock();
            let cuda = dev.cuda()?;
            let operands = self.operands(who, rank, &cuda, seat)?;
            let stream = cuda.stream().cu_stream();
            let call = &mut || {
                // SAFETY: the seat's buffers, or the windows, are as long as the operation says. They stay, since the
                // seat is locked and the streams are waited for at the scope's end. The stream belongs to the device of
                // this thread.
                unsafe { rank.call(self.op, T::NCCL, operands, size_of::<T>(), self.total, stream) };
                Ok(())
            };
            // The wait of a program that uses NCCL.
            let wait = &mut || {
                // SAFETY: the stream lives as long as `cuda`.
                check(unsafe { sys::cuStreamSynchronize(stream) });
                Ok(())
            };
            f(home, &mut Player { call, wait })
        })
    }

    /// Runs `f` on every device with a graph of several of our operations, one after the other.
    pub fn each_captured<R: Send>(
        &self,
        count: usize,
        f: impl Fn(&Device, &mut Player<'_>) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        self.pool.on(&self.devices).run(|dev, _| {
            let seat = &mut *self.seats[dev.rank()].lock();
            if self.op.in_place() {
                dev.copy(&seat.input, &mut seat.output)?;
            }
            let mut call = |dev: &Device| self.op.ours(dev, &seat.input, &mut seat.output);
            let (graph, ()) = dev.capture(|dev| (0..count).try_for_each(|_| call(dev)))?;
            dev.synchronize()?;
            f(dev, &mut Player { call: &mut || dev.launch_graph(&graph), wait: &mut || dev.synchronize() })
        })
    }

    /// The addresses of NCCL's input and output. Windows get the seat's contents.
    fn operands(&self, who: Who, rank: &Rank, cuda: &Cuda<'_>, seat: &mut Seat<T>) -> Result<[u64; 2]> {
        let (input, mut output) = (cuda.read(&seat.input)?, cuda.write(&mut seat.output)?);
        let stream = cuda.stream();
        let mut operands = [input.device_ptr(stream).0, output.device_ptr_mut(stream).0];
        if who == Who::Windows {
            let windows = rank.windows().expect("this rank has windows");
            let (input, output) = self.op.lengths(self.total, self.world);
            for ((window, memory), len) in windows.into_iter().zip(operands).zip([input, output]) {
                let stream = stream.cu_stream();
                // SAFETY: both are at least that long, and the stream orders the accesses to both.
                check(unsafe { sys::cuMemcpyDtoDAsync_v2(window, memory, len * size_of::<T>(), stream) });
            }
            operands = windows;
        }
        if self.op.in_place() {
            operands[0] = operands[1];
        }
        Ok(operands)
    }

    /// One turn: microseconds per operation of the slowest device.
    pub fn turn(&self, who: Who, warm_up: usize, calls: usize) -> f64 {
        if let Some(micros) = self.turn_of_processes(who, false, calls) {
            return micros;
        }
        let line = self.line();
        let times = self.each(who, false, |_, player| {
            for _ in 0..warm_up {
                (player.call)()?;
            }
            (player.wait)()?;
            Ok(player.timed(&line, calls)? / calls as f64)
        });
        slowest(times)
    }

    /// One turn of NCCL's processes, if that is the side: as [`turn`](Self::turn), or of graphs.
    pub fn turn_of_processes(&self, who: Who, graph: bool, calls: usize) -> Option<f64> {
        let there = who.in_process()?;
        let processes = self.club.and_then(|club| club.processes.as_ref()).expect("processes play");
        Some(processes.turn(&Order { op: self.op, dtype: T::NAME, bytes: self.bytes(), who: there, graph }, calls))
    }

    /// Panics unless every rank gets what it should, from small integers.
    pub fn check(&self, who: Who, case: &str) {
        // Processes check what they get before their first turn.
        if who.in_process().is_some() {
            return;
        }
        self.load(|rank| (0..BLOCK).map(|i| T::narrow(pattern(rank, i) as f32)).collect());
        let played = self.each(who, false, |_, player| {
            (player.call)()?;
            (player.wait)()
        });
        played.unwrap_or_else(|error| panic!("{case}: {who:?}: {error}"));
        let checked = self.pool.on(&self.devices).run(|dev, _| {
            let (rank, seat) = (self.first + dev.rank(), &mut *self.seats[dev.rank()].lock());
            if who == Who::Windows {
                self.fetch(dev, seat)?;
            }
            let len = seat.output.len();
            for range in pieces(len) {
                let got = dev.download(&seat.output.slice(range.clone()))?;
                for (i, got) in range.zip(got.into_iter().map(T::wide)) {
                    let want = self.op.expected(rank, self.world, len, i) as f32;
                    assert!(got == want, "{case}: {who:?}: rank {rank}: element {i} is {got} and not {want}");
                }
            }
            Ok(())
        });
        checked.unwrap_or_else(|error| panic!("{case}: {who:?}: {error}"));
        self.load_noise();
    }

    /// Copies the output window into the seat's output.
    fn fetch(&self, dev: &Device, seat: &mut Seat<T>) -> Result<()> {
        let rank = self.club.expect("NCCL plays").ranks[dev.rank()].lock();
        let bytes = seat.output.len() * size_of::<T>();
        let (cuda, [_, window]) = (dev.cuda()?, rank.windows().expect("this rank has windows"));
        let (mut output, stream) = (cuda.write(&mut seat.output)?, cuda.stream());
        let (memory, _ordered) = output.device_ptr_mut(stream);
        // SAFETY: both are that long, and the stream orders the accesses to both.
        check(unsafe { sys::cuMemcpyDtoDAsync_v2(memory, window, bytes, stream.cu_stream()) });
        Ok(())
    }

    /// Loads noise, different on each rank, that survives many sums before it overflows.
    fn load_noise(&self) {
        self.load(|rank| gpus::noise(BLOCK, rank as u64 + 1).into_iter().map(T::tiny).collect());
    }

    /// Fills each rank's input by repeating its block. Outputs are cleared.
    fn load(&self, block: impl Fn(usize) -> Vec<T> + Sync) {
        let loaded = self.pool.on(&self.devices).run(|dev, _| {
            let seat = &mut *self.seats[dev.rank()].lock();
            fill(dev, &mut seat.input, &block(self.first + dev.rank()))?;
            dev.fill(&mut seat.output, T::narrow(0.0))?;
            dev.synchronize()
        });
        loaded.expect("operands");
    }
}

/// Fills the buffer by repeating the block.
pub fn fill<T: DeviceCopy>(dev: &Device, buffer: &mut DeviceBuffer<T>, block: &[T]) -> Result<()> {
    let len = buffer.len();
    let mut done = block.len().min(len);
    dev.upload_into(&block[..done], &mut buffer.slice_mut(..done))?;
    while done < len {
        // The filled part consists of whole blocks.
        let more = done.min(len - done);
        let (from, to) = buffer.split_at_mut(done);
        dev.copy(&from.slice_mut(..more), &mut to.slice_mut(..more))?;
        done += more;
    }
    Ok(())
}

/// The time of the slowest device.
pub fn slowest(times: Result<Vec<f64>>) -> f64 {
    times.expect("every call succeeds").into_iter().fold(0.0, f64::max)
}

/// Panics unless the driver call succeeded.
pub fn check(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// The ranges to check in a result of `len` elements.
fn pieces(len: usize) -> Vec<std::ops::Range<usize>> {
    if len <= WHOLE {
        return std::iter::once(0..len).collect();
    }
    let piece = WHOLE / PIECES;
    (0..PIECES).map(|k| k * (len - piece) / (PIECES - 1)).map(|start| start..start + piece).collect()
}
