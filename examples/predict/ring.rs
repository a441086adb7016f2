//! The copy-engine ring all-reduce that was measured on 8 x H200, call by call. It uses the driver API of the crate
//! ([`gpu_pool::extend::driver`]), because it writes into its neighbour's memory, which the public API cannot express.
//!
//! Each device has a copy stream and an add stream, and cuts each of its chunks into pieces, so that one piece is added
//! while the next one is copied:
//!
//! ```text
//! reduce-scatter, step s:  copy stream: chunk (d - s) goes to the scratch of d + 1
//!                          add stream:  chunk (d - 1 - s) += scratch
//! all-gather, step s:      copy stream: chunk (d + 1 - s) goes to its place on d + 1
//! ```
//!
//! Every edge is an event. One thread per device submits all operations. It may submit a wait only after the other
//! thread has submitted the record; a counter tells.

use anyhow::{Context, Result, ensure};
use gpu_pool::extend::driver::{
    Address, DriverRef, DriverResult, HostArg, KernelArg, Launch, LaunchDims, ModuleImage, RawEvent, RawFunction,
    RawModule, RawStream, host,
};
use std::{
    sync::{Barrier, Condvar, Mutex},
    thread,
    time::Duration,
};

const LONG: Duration = Duration::from_secs(600);

/// The time of a ring in virtual time: the mean over back-to-back calls, of the slowest device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Microseconds from call to call.
    pub call: f64,
    /// The part that the host threads spend in submitting.
    pub submit: f64,
}

/// A counter that only grows, and that other threads wait for.
#[derive(Default)]
struct Counter {
    count: Mutex<usize>,
    grown: Condvar,
}

impl Counter {
    fn publish(&self) {
        *self.count.lock().unwrap() += 1;
        self.grown.notify_all();
    }

    fn reach(&self, count: usize) {
        drop(self.grown.wait_while(self.count.lock().unwrap(), |now| *now < count).unwrap());
    }
}

/// One device's part.
struct Member {
    gpu: DriverRef,
    module: RawModule,
    function: RawFunction,
    data: Address,
    scratch: Address,
    main: RawStream,
    copy: RawStream,
    add: RawStream,
    /// Events at the start of a call, after each copy, and after each addition; each with the number of records.
    start: (RawEvent, Counter),
    copied: (Vec<RawEvent>, Counter),
    added: (Vec<RawEvent>, Counter),
}

/// A ring for one size.
pub struct Ring {
    members: Vec<Member>,
    /// Bytes of a chunk; `piece`: bytes of a piece of it.
    chunk: u64,
    piece: usize,
    pieces: usize,
}

impl Ring {
    /// Allocates memory, streams and events for all-reduces of `bytes`.
    pub fn new(gpus: &[DriverRef], bytes: usize, pieces: usize) -> Result<Self> {
        let devices = gpus.len();
        ensure!(devices > 1 && pieces > 0, "a ring of {devices} devices, in {pieces} pieces");
        ensure!(
            bytes.is_multiple_of(4 * devices * pieces),
            "{bytes} bytes do not divide into {devices} x {pieces} pieces"
        );
        let chunk = bytes / devices;
        let copies = 2 * (devices - 1) * pieces;
        for (d, gpu) in gpus.iter().enumerate() {
            // A member reads its own memory and writes its neighbour's.
            gpu.enable_peer(&*gpus[(d + 1) % devices]).with_context(|| format!("device {d} and its neighbour"))?;
        }
        let member = |gpu: &DriverRef| -> DriverResult<Member> {
            let events = |count: usize| (0..count).map(|_| gpu.event_create(false)).collect::<DriverResult<Vec<_>>>();
            let module =
                gpu.module_load(&ModuleImage { ptx: None, cubins: &[], packed: false, source: None, shared: false })?;
            Ok(Member {
                gpu: gpu.clone(),
                module,
                function: gpu.function(module, "add_f32")?,
                data: gpu.mem_alloc(bytes)?,
                scratch: gpu.mem_alloc(2 * chunk)?,
                main: gpu.stream_create(0)?,
                copy: gpu.stream_create(0)?,
                add: gpu.stream_create(0)?,
                start: (gpu.event_create(false)?, Counter::default()),
                copied: (events(copies)?, Counter::default()),
                added: (events(copies / 2)?, Counter::default()),
            })
        };
        let members = gpus.iter().map(member).collect::<DriverResult<Vec<_>>>()?;
        Ok(Ring { members, chunk: chunk as u64, piece: chunk / pieces, pieces })
    }

    /// Runs one warm-up call, and then `calls` calls, as the measurement did.
    pub fn run(&self, calls: usize) -> Result<Timing> {
        let together = Barrier::new(self.members.len());
        let timings = thread::scope(|scope| {
            let together = &together;
            let threads: Vec<_> =
                (0..self.members.len()).map(|d| scope.spawn(move || self.member(d, calls, together))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a member panicked")).collect::<Result<Vec<_>>>()
        })?;
        let slowest = |part: fn(&Timing) -> f64| timings.iter().map(part).fold(0.0, f64::max);
        Ok(Timing { call: slowest(|t| t.call), submit: slowest(|t| t.submit) })
    }

    /// A member's thread. It waits for the device only after all members have submitted: then virtual time knows all
    /// the work. If a member fails, the others fail by the deadline of their waits at the latest.
    fn member(&self, d: usize, calls: usize, together: &Barrier) -> Result<Timing> {
        let gpu = &*self.members[d].gpu;
        let now = || host::virtual_now(gpu).map_or(0.0, |now| 1e6 * now.as_secs_f64());
        let first = self.submit(d, 0);
        together.wait();
        first?;
        self.wait(d)?;
        together.wait();
        let start = now();
        let submitted = (1..=calls).try_for_each(|call| self.submit(d, call));
        let end = now();
        together.wait();
        submitted?;
        self.wait(d)?;
        let calls = calls as f64;
        Ok(Timing { call: (now() - start) / calls, submit: (end - start) / calls })
    }

    fn wait(&self, d: usize) -> Result<()> {
        ensure!(self.members[d].gpu.stream_wait_idle(self.members[d].main, LONG)?, "device {d} is stuck");
        Ok(())
    }

    /// Submits one all-reduce of device `d`.
    fn submit(&self, d: usize, call: usize) -> DriverResult {
        let (n, pieces) = (self.members.len(), self.pieces);
        let (me, next, previous) = (&self.members[d], &self.members[(d + 1) % n], &self.members[(d + n - 1) % n]);
        let gpu = &*me.gpu;
        // Records of all earlier calls.
        let copies = call * 2 * (n - 1) * pieces;
        let additions = call * (n - 1) * pieces;
        let chunk = |i: usize| (i % n) as u64 * self.chunk;
        let half = |step: usize| (step % 2) as u64 * self.chunk;

        gpu.event_record(me.start.0, me.main)?;
        me.start.1.publish();
        gpu.stream_wait_event(me.copy, me.start.0)?;
        gpu.stream_wait_event(me.add, me.start.0)?;
        next.start.1.reach(call + 1);
        gpu.stream_wait_event(me.copy, next.start.0)?;

        for step in 0..n - 1 {
            for piece in 0..pieces {
                let (at, offset) = (step * pieces + piece, (piece * self.piece) as u64);
                if step > 0 {
                    // The chunk is sent after its sum is complete.
                    gpu.stream_wait_event(me.copy, me.added.0[at - pieces])?;
                }
                if step > 1 {
                    // The neighbour must have read the half of its scratch that is written again.
                    next.added.1.reach(additions + at - 2 * pieces + 1);
                    gpu.stream_wait_event(me.copy, next.added.0[at - 2 * pieces])?;
                }
                let source = me.data + chunk(d + n - step) + offset;
                self.push(me, next, next.scratch + half(step) + offset, source)?;
                gpu.event_record(me.copied.0[at], me.copy)?;
                me.copied.1.publish();

                previous.copied.1.reach(copies + at + 1);
                gpu.stream_wait_event(me.add, previous.copied.0[at])?;
                self.add(me, me.data + chunk(d + 2 * n - 1 - step) + offset, me.scratch + half(step) + offset)?;
                gpu.event_record(me.added.0[at], me.add)?;
                me.added.1.publish();
            }
        }
        for step in 0..n - 1 {
            for piece in 0..pieces {
                let (at, offset) = ((n - 1 + step) * pieces + piece, (piece * self.piece) as u64);
                if step == 0 {
                    gpu.stream_wait_event(me.copy, me.added.0[at - pieces])?;
                } else {
                    previous.copied.1.reach(copies + at - pieces + 1);
                    gpu.stream_wait_event(me.copy, previous.copied.0[at - pieces])?;
                }
                let place = chunk(d + n + 1 - step) + offset;
                self.push(me, next, next.data + place, me.data + place)?;
                gpu.event_record(me.copied.0[at], me.copy)?;
                me.copied.1.publish();
            }
        }
        let last = 2 * (n - 1) * pieces - 1;
        gpu.stream_wait_event(me.main, me.copied.0[last])?;
        previous.copied.1.reach(copies + last + 1);
        gpu.stream_wait_event(me.main, previous.copied.0[last])
    }

    fn push(&self, me: &Member, next: &Member, dst: Address, src: Address) -> DriverResult {
        // SAFETY: both ranges are pieces of live memory, freed after the streams are idle. The events of `submit` order
        // each copy after the additions that write its source, and after those that read its destination.
        unsafe { me.gpu.copy_peer(dst, &*next.gpu, src, &*me.gpu, self.piece, me.copy) }
    }

    fn add(&self, me: &Member, sum: Address, more: Address) -> DriverResult {
        let slice = |address, write| KernelArg::Slice { address, bytes: self.piece, write };
        let launch = Launch {
            name: "add_f32",
            function: me.function,
            host: Some(add_f32),
            // As measured: few blocks, so that the rest of the device is free for other work.
            dims: LaunchDims { grid: (48, 1, 1), block: (512, 1, 1), shared_bytes: 0 },
            args: &[slice(sum, true), slice(more, false)],
            early: false,
        };
        // SAFETY: the arguments fit `add_f32`; memory and order as in `push`.
        unsafe { me.gpu.launch(&launch, me.add) }
    }
}

/// Checks the ring's sums, with real data on these devices.
pub fn check(gpus: &[DriverRef], pieces: usize) -> Result<()> {
    let devices = gpus.len();
    let bytes = 4 * 16 * devices * pieces;
    let ring = Ring::new(gpus, bytes, pieces)?;
    let value = |i: usize| (i % 7 + 1) as f32;
    // Each device has its share of a sum that `f32` holds exactly, even after three all-reduces in place.
    let transfer = |d: usize, contents: Option<f32>| -> Result<Vec<f32>> {
        let (gpu, member) = (&gpus[d], &ring.members[d]);
        let host = gpu.host_alloc(bytes)?;
        // SAFETY: the driver has allocated `bytes` bytes, zeroed and page-aligned. Only the copy that is waited for
        // below uses them, too.
        let floats = unsafe { std::slice::from_raw_parts_mut(host.cast::<f32>(), bytes / 4) };
        if let Some(share) = contents {
            floats.iter_mut().enumerate().for_each(|(i, x)| *x = share * value(i));
        }
        // SAFETY: both ranges are live and `bytes` long, and only this copy uses them.
        unsafe {
            match contents {
                Some(_) => gpu.copy_to_device(member.data, host, bytes, member.main)?,
                None => gpu.copy_to_host(host, member.data, bytes, member.main)?,
            }
        }
        ring.wait(d)?;
        let read = floats.to_vec();
        // SAFETY: it came from `host_alloc`, and the copy is complete.
        unsafe { gpu.host_free(host)? };
        Ok(read)
    };
    for d in 0..devices {
        transfer(d, Some((d + 1) as f32))?;
    }
    ring.run(2)?;
    let sum = (devices * (devices + 1) / 2 * devices * devices) as f32;
    for d in 0..devices {
        let found = transfer(d, None)?;
        let wrong = found.iter().enumerate().find(|(i, x)| **x != sum * value(*i));
        ensure!(
            wrong.is_none(),
            "device {d} has a wrong sum: {wrong:?}, {sum} times {} expected",
            value(wrong.map_or(0, |w| w.0))
        );
    }
    Ok(())
}

impl Drop for Ring {
    fn drop(&mut self) {
        for member in &self.members {
            // A stuck stream or a lost device keeps its memory.
            let streams = [member.main, member.copy, member.add];
            let idle = |stream| member.gpu.stream_wait_idle(stream, LONG).unwrap_or(false);
            if !streams.into_iter().all(idle) {
                return;
            }
        }
        for member in &self.members {
            let gpu = &member.gpu;
            // SAFETY: all of them came from this device, each is destroyed once, and all streams that use them are
            // idle.
            unsafe {
                for stream in [member.main, member.copy, member.add] {
                    drop(gpu.stream_destroy(stream));
                }
                let events = [member.start.0].into_iter().chain(member.copied.0.iter().copied());
                events.chain(member.added.0.iter().copied()).for_each(|event| drop(gpu.event_destroy(event)));
                drop(gpu.module_unload(member.module));
                drop(gpu.mem_free(member.data));
                drop(gpu.mem_free(member.scratch));
            }
        }
    }
}

/// The host kernel for the crate's kernel of that name. It needs no count: the slices have the right length.
unsafe fn add_f32(_: LaunchDims, args: &[HostArg]) {
    let [HostArg::Slice { ptr: sum, bytes, write: true }, HostArg::Slice { ptr: more, .. }] = args else {
        panic!("add_f32 takes a slice that it writes and one that it reads")
    };
    let len = bytes / size_of::<f32>();
    // SAFETY: the software GPU gives live ranges, aligned to 4 bytes since pieces are whole numbers of floats; the
    // first one exclusively. Both are one piece long.
    let (sum, more) = unsafe {
        (std::slice::from_raw_parts_mut(sum.cast::<f32>(), len), std::slice::from_raw_parts(more.cast::<f32>(), len))
    };
    sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}
