//! Bare devices: the view of a program that is written against the CUDA driver API, in as few words as possible.
//!
//! Handles are plain numbers that may be copied, memory has no owner, and only the program itself orders its work. So
//! the zoo's mistakes can be written here as they were made. Each call is `#[track_caller]` and [annotated](annotate),
//! so that reports name the line of the program.
//!
//! Nothing here makes the process undefined, in any program. Only copies read device memory. Software GPUs
//! refuse unknown addresses, and run conflicting operations one after the other. The host accesses page-locked memory
//! through [`Gpu::host_read`] and [`Gpu::host_write`], which are operations on software GPUs, too.

use gpu_pool::{
    LaunchDims,
    extend::driver::{
        Address, DriverRef, DriverResult, Fault, FaultKind, HostArg, KernelArg, Launch, ModuleImage, RawEvent,
        RawFunction, RawStream, ValueBytes,
    },
};
use gpu_pool_lab::check::annotate;
use gpu_pool_lab::prelude::*;
use std::{
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Longer than any wait here takes: a longer wait is a hang.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Memory by its address, as in the driver API.
#[derive(Clone, Copy, Debug)]
pub struct Mem {
    pub address: Address,
    pub bytes: usize,
}

impl Mem {
    /// Number of elements.
    pub fn len(self) -> usize {
        self.bytes / size_of::<f32>()
    }

    /// A part, by elements.
    pub fn part(self, elements: std::ops::Range<usize>) -> Mem {
        let width = size_of::<f32>();
        Mem { address: self.address + (elements.start * width) as u64, bytes: elements.len() * width }
    }
}

/// A stream.
#[derive(Clone, Copy, Debug)]
pub struct Stream(RawStream);

/// An event.
#[derive(Clone, Copy, Debug)]
pub struct Event(RawEvent);

/// A bare device. Clones name the same device.
#[derive(Clone)]
pub struct Gpu {
    driver: DriverRef,
    yard: Arc<Yard>,
    index: usize,
    axpy: RawFunction,
}

/// The kind of a piece of memory.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Device,
    Pinned,
    Managed,
}

/// The handles to give back at the end, of all devices of one program.
struct Yard {
    /// The devices without a checker.
    raw: Vec<DriverRef>,
    software: bool,
    left: Mutex<Left>,
}

#[derive(Default)]
struct Left {
    memory: Vec<(usize, Kind, Mem)>,
    streams: Vec<(usize, RawStream)>,
    events: Vec<(usize, RawEvent)>,
}

impl Yard {
    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `y += a * x`, as in `kernels/elementwise.cu`.
const MODULE: ModuleImage = ModuleImage {
    ptx: Some(include_bytes!("../../../kernels/ptx/elementwise.ptx")),
    cubins: &[],
    packed: false,
    source: None,
    shared: false,
};

/// `axpy_f32` for software GPUs.
///
/// # Safety
/// As [`HostKernel`](gpu_pool::extend::driver::HostKernel) has it.
unsafe fn axpy(_dims: LaunchDims, args: &[HostArg]) {
    let [HostArg::Slice { ptr: x, .. }, HostArg::Slice { ptr: y, .. }, HostArg::Value(n), HostArg::Value(a)] = args
    else {
        unreachable!("launched by `Gpu::launch_axpy` only")
    };
    let (n, a) = (unpack::<8>(n), unpack::<4>(a));
    let (n, a) = (u64::from_ne_bytes(n) as usize, f32::from_ne_bytes(a));
    let (x, y) = (x.cast::<f32>(), y.cast::<f32>());
    for i in 0..n {
        // SAFETY: both slices hold `n` numbers, and only this kernel uses them while it runs. Raw pointers, since a
        // program may declare `y` as read, or pass the same memory twice.
        unsafe { y.add(i).write(y.add(i).read() + a * x.add(i).read()) };
    }
}

/// `dst = src`, for the host's own accesses on software GPUs.
///
/// # Safety
/// As [`HostKernel`](gpu_pool::extend::driver::HostKernel) has it.
unsafe fn host_copy(_dims: LaunchDims, args: &[HostArg]) {
    let [HostArg::Slice { ptr: src, bytes, .. }, HostArg::Slice { ptr: dst, .. }] = args else {
        unreachable!("launched by `Gpu::as_host` only")
    };
    // SAFETY: both slices have the same length, do not overlap, and only this function uses them while it runs.
    unsafe { dst.copy_from_nonoverlapping(*src, *bytes) };
}

fn unpack<const N: usize>(value: &ValueBytes) -> [u8; N] {
    value.as_bytes().try_into().expect("the size that was packed")
}

/// The devices of one program. `drivers` are the devices that it calls, `raw` the same devices without a checker.
pub fn gpus(drivers: Vec<DriverRef>, raw: Vec<DriverRef>, software: bool) -> DriverResult<Vec<Gpu>> {
    let yard = Arc::new(Yard { raw, software, left: Mutex::default() });
    let gpu = |(index, driver): (usize, DriverRef)| {
        let axpy = driver.function(driver.module_load(&MODULE)?, "axpy_f32")?;
        Ok(Gpu { driver, yard: yard.clone(), index, axpy })
    };
    drivers.into_iter().enumerate().map(gpu).collect()
}

/// Memory, streams, events.
impl Gpu {
    /// `len` numbers of device memory, uninitialised.
    #[track_caller]
    pub fn alloc(&self, len: usize) -> DriverResult<Mem> {
        let bytes = len * size_of::<f32>();
        let address = annotate("alloc", || self.driver.mem_alloc(bytes))?;
        Ok(self.keep(Kind::Device, Mem { address, bytes }))
    }

    /// `len` numbers of page-locked host memory, zeroed.
    #[track_caller]
    pub fn alloc_pinned(&self, len: usize) -> DriverResult<Mem> {
        let bytes = len * size_of::<f32>();
        let ptr = annotate("alloc_pinned", || self.driver.host_alloc(bytes))?;
        Ok(self.keep(Kind::Pinned, Mem { address: ptr as u64, bytes }))
    }

    /// `len` numbers of managed memory, zeroed.
    #[track_caller]
    pub fn alloc_managed(&self, len: usize) -> DriverResult<Mem> {
        let bytes = len * size_of::<f32>();
        let ptr = annotate("alloc_managed", || self.driver.managed_alloc(bytes))?;
        Ok(self.keep(Kind::Managed, Mem { address: ptr as u64, bytes }))
    }

    fn keep(&self, kind: Kind, memory: Mem) -> Mem {
        self.yard.left().memory.push((self.index, kind, memory));
        memory
    }

    /// Gives memory back immediately.
    #[track_caller]
    pub fn free(&self, memory: Mem) -> DriverResult {
        let of =
            |left: &Left| left.memory.iter().find(|(_, _, m)| m.address == memory.address).map(|(_, kind, _)| *kind);
        let kind = of(&self.yard.left()).unwrap_or(Kind::Device);
        // SAFETY: the checker refuses memory that is still in use. Without a checker this runs on software GPUs, which
        // lose the device whose work names freed memory, or after the program has waited.
        annotate("free", || unsafe {
            match kind {
                Kind::Device => self.driver.mem_free(memory.address),
                Kind::Pinned => self.driver.host_free(memory.address as *mut u8),
                Kind::Managed => self.driver.managed_free(memory.address as *mut u8),
            }
        })?;
        self.yard.left().memory.retain(|(_, _, m)| m.address != memory.address);
        Ok(())
    }

    /// A stream.
    #[track_caller]
    pub fn stream(&self) -> DriverResult<Stream> {
        let stream = annotate("stream", || self.driver.stream_create(0))?;
        self.yard.left().streams.push((self.index, stream));
        Ok(Stream(stream))
    }

    /// An event, not recorded yet.
    #[track_caller]
    pub fn event(&self) -> DriverResult<Event> {
        let event = annotate("event", || self.driver.event_create(false))?;
        self.yard.left().events.push((self.index, event));
        Ok(Event(event))
    }

    /// The event covers the work that the stream has got so far.
    #[track_caller]
    pub fn record(&self, event: Event, stream: Stream) -> DriverResult {
        annotate("record", || self.driver.event_record(event.0, stream.0))
    }

    /// Later work of the stream waits for the event.
    #[track_caller]
    pub fn wait(&self, stream: Stream, event: Event) -> DriverResult {
        annotate("wait", || self.driver.stream_wait_event(stream.0, event.0))
    }

    /// The host waits for the stream.
    #[track_caller]
    pub fn sync(&self, stream: Stream) -> DriverResult {
        match annotate("sync", || self.driver.stream_wait_idle(stream.0, TIMEOUT))? {
            true => Ok(()),
            false => Err(hung()),
        }
    }

    /// This device may access `peer`'s memory from now on.
    #[track_caller]
    pub fn enable_peer(&self, peer: &Gpu) -> DriverResult {
        annotate("enable_peer", || self.driver.enable_peer(&*peer.driver))
    }

    /// This device may not access `peer`'s memory any more.
    #[track_caller]
    pub fn disable_peer(&self, peer: &Gpu) -> DriverResult {
        annotate("disable_peer", || self.driver.disable_peer(&*peer.driver))
    }

    /// Whether the driver claims that [`enable_peer`](Self::enable_peer) works.
    pub fn can_access_peer(&self, peer: &Gpu) -> DriverResult<bool> {
        self.driver.can_access_peer(&*peer.driver)
    }
}

/// Work. All calls are asynchronous.
impl Gpu {
    /// Sets each number.
    #[track_caller]
    pub fn fill(&self, x: Mem, value: f32, stream: Stream) -> DriverResult {
        // SAFETY: see the module's docs.
        annotate("fill", || unsafe { self.driver.fill_u32(x.address, value.to_bits(), x.len(), stream.0) })
    }

    /// `y += a * x`.
    #[track_caller]
    pub fn axpy(&self, a: f32, x: Mem, y: Mem, stream: Stream) -> DriverResult {
        annotate("axpy", || self.launch_axpy(a, x, y, true, stream))
    }

    /// `y += a * x`, wrongly declared: `y` as only read.
    #[track_caller]
    pub fn axpy_declared_as_reading(&self, a: f32, x: Mem, y: Mem, stream: Stream) -> DriverResult {
        annotate("axpy", || self.launch_axpy(a, x, y, false, stream))
    }

    fn launch_axpy(&self, a: f32, x: Mem, y: Mem, write: bool, stream: Stream) -> DriverResult {
        let n = x.len().min(y.len());
        let bytes = n * size_of::<f32>();
        let args = [
            KernelArg::Slice { address: x.address, bytes, write: false },
            KernelArg::Slice { address: y.address, bytes, write },
            KernelArg::Value(ValueBytes::new(&(n as u64).to_ne_bytes())),
            KernelArg::Value(ValueBytes::new(&a.to_ne_bytes())),
        ];
        let dims = LaunchDims::cover(n);
        let launch =
            Launch { name: "axpy_f32", function: self.axpy, host: Some(axpy), dims, args: &args, early: false };
        // SAFETY: the arguments fit the kernel; see the module's docs for the rest.
        unsafe { self.driver.launch(&launch, stream.0) }
    }

    /// Copies from page-locked memory.
    #[track_caller]
    pub fn copy_to_device(&self, dst: Mem, src: Mem, stream: Stream) -> DriverResult {
        let (from, bytes) = (src.address as *const u8, dst.bytes.min(src.bytes));
        // SAFETY: see the module's docs.
        annotate("copy_to_device", || unsafe { self.driver.copy_to_device(dst.address, from, bytes, stream.0) })
    }

    /// Copies to page-locked memory.
    #[track_caller]
    pub fn copy_to_host(&self, dst: Mem, src: Mem, stream: Stream) -> DriverResult {
        let (to, bytes) = (dst.address as *mut u8, dst.bytes.min(src.bytes));
        // SAFETY: see the module's docs.
        annotate("copy_to_host", || unsafe { self.driver.copy_to_host(to, src.address, bytes, stream.0) })
    }

    /// Copies from another device's memory to this one's, on a stream of this one.
    #[track_caller]
    pub fn copy_from_peer(&self, dst: Mem, peer: &Gpu, src: Mem, stream: Stream) -> DriverResult {
        let (here, there, bytes) = (&*self.driver, &*peer.driver, dst.bytes.min(src.bytes));
        // SAFETY: see the module's docs.
        annotate("copy_from_peer", || unsafe { here.copy_peer(dst.address, here, src.address, there, bytes, stream.0) })
    }

    /// Raises a flag: an 8-byte word that others wait for.
    #[track_caller]
    pub fn raise(&self, flag: Mem, value: u64, stream: Stream) -> DriverResult {
        // SAFETY: see the module's docs; flags are whole allocations, so they are aligned.
        annotate("raise", || unsafe { self.driver.write_value(flag.address, value, stream.0) })
    }

    /// Later work of the stream waits, spinning, until the flag is raised.
    #[track_caller]
    pub fn spin(&self, flag: Mem, value: u64, stream: Stream) -> DriverResult {
        // SAFETY: as above.
        annotate("spin", || unsafe { self.driver.wait_value(flag.address, value, stream.0) })
    }
}

/// The host's own accesses, and results.
impl Gpu {
    /// The host reads page-locked or managed memory.
    #[track_caller]
    pub fn host_read(&self, memory: Mem) -> DriverResult<Vec<f32>> {
        annotate("host_read", || self.announce("host_read", memory, false))?;
        let mut host = vec![0.0; memory.len()];
        self.as_host(memory, &mut host, false)?;
        Ok(host)
    }

    /// The host writes page-locked or managed memory.
    #[track_caller]
    pub fn host_write(&self, memory: Mem, value: f32) -> DriverResult {
        annotate("host_write", || self.announce("host_write", memory, true))?;
        self.as_host(memory, &mut vec![value; memory.len()], true)
    }

    /// Tells the checker, if there is one.
    fn announce(&self, op: &str, memory: Mem, write: bool) -> DriverResult {
        let Some((checker, _)) = self.driver.checker() else { return Ok(()) };
        checker.host_access(memory.address, memory.bytes, write).map_err(|report| Fault {
            kind: FaultKind::Misuse,
            code: 0,
            name: "GPU_POOL_MISUSE".to_owned(),
            detail: format!("{op}: {report}"),
            report: Some(report),
        })
    }

    /// On software GPUs a load or store of the host would be a data race in this process if an operation were running.
    /// So it is an operation, on a stream of its own and below the checker: ordered with nothing, but never at the same
    /// time as a conflicting operation.
    fn as_host(&self, memory: Mem, host: &mut [f32], write: bool) -> DriverResult {
        let ptr = memory.address as *mut f32;
        if !self.yard.software {
            for (i, value) in host.iter_mut().enumerate() {
                // SAFETY: `memory` is host memory of that many numbers. A device may be writing it: the access is
                // volatile, so two loads need not agree, and any bytes are a number.
                unsafe { if write { ptr.add(i).write_volatile(*value) } else { *value = ptr.add(i).read_volatile() } };
            }
            return Ok(());
        }
        let raw = &self.yard.raw[self.index];
        let mine = raw.host_alloc(memory.bytes)?;
        // SAFETY: fresh memory of that many bytes; no operation names it yet.
        let seen = unsafe { slice::from_raw_parts_mut(mine.cast::<f32>(), host.len()) };
        if write {
            seen.copy_from_slice(host);
        }
        let (src, dst) = if write { (mine as u64, memory.address) } else { (memory.address, mine as u64) };
        let slice = |address, write| KernelArg::Slice { address, bytes: memory.bytes, write };
        let args = [slice(src, false), slice(dst, true)];
        let (function, dims) = (RawFunction(0), LaunchDims::cover(1));
        let launch = Launch { name: "the host", function, host: Some(host_copy), dims, args: &args, early: false };
        let stream = raw.stream_create(0)?;
        // SAFETY: both are live and as long as the arguments say. Software GPUs exclude conflicting operations.
        unsafe { raw.launch(&launch, stream)? };
        if !raw.stream_wait_idle(stream, TIMEOUT)? {
            return Err(hung());
        }
        if !write {
            host.copy_from_slice(seen);
        }
        // SAFETY: the stream is idle, so nothing names them any more.
        unsafe {
            raw.stream_destroy(stream)?;
            raw.host_free(mine)
        }
    }

    /// The contents of device memory once the stream has come this far. Waits.
    #[track_caller]
    pub fn download(&self, x: Mem, stream: Stream) -> DriverResult<Vec<f32>> {
        annotate("download", || {
            let pinned = self.alloc_pinned(x.len())?;
            self.copy_to_host(pinned, x, stream)?;
            self.sync(stream)?;
            let host = self.host_read(pinned)?;
            self.free(pinned)?;
            Ok(host)
        })
    }
}

fn hung() -> Fault {
    let detail = format!("nothing for {TIMEOUT:?}");
    Fault { kind: FaultKind::Other, code: 0, name: "HUNG".to_owned(), detail, report: None }
}

impl Drop for Yard {
    /// Below the checker: these are not calls of the program. Errors of a lost device do not matter here.
    fn drop(&mut self) {
        let left = std::mem::take(self.left.get_mut().unwrap_or_else(PoisonError::into_inner));
        for &(device, stream) in &left.streams {
            let _ = self.raw[device].stream_wait_idle(stream, TIMEOUT);
        }
        // SAFETY: all streams are idle or their devices are lost, and the program that had the handles has ended.
        unsafe {
            for (device, stream) in left.streams {
                let _ = self.raw[device].stream_destroy(stream);
            }
            for (device, event) in left.events {
                let _ = self.raw[device].event_destroy(event);
            }
            for (device, kind, Mem { address, .. }) in left.memory {
                let _ = match kind {
                    Kind::Device => self.raw[device].mem_free(address),
                    Kind::Pinned => self.raw[device].host_free(address as *mut u8),
                    Kind::Managed => self.raw[device].managed_free(address as *mut u8),
                };
            }
        }
    }
}
