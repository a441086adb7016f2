//! Devices to test, and handles that give back what they hold.

use gpu_pool::extend::driver::{
    Address, DriverRef, HostArg, KernelArg, Launch, LaunchDims, ModuleImage, RawEvent, RawFunction, RawModule,
    RawStream, ValueBytes,
    host::{self, HostConfig},
};
use gpu_pool_lab::check;
use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

/// Longer than anything here takes; a hang becomes a failure.
pub const LIMIT: Duration = Duration::from_secs(300);

pub struct Rig {
    pub devices: Vec<DriverRef>,
    pub cuda: bool,
    _alone: Option<std::sync::MutexGuard<'static, ()>>,
}

impl Rig {
    pub fn host(n: usize) -> Rig {
        Rig { devices: host::machine(&vec![HostConfig::default(); n]), cuda: false, _alone: None }
    }

    /// Software GPUs with the checker on: it must not find anything in what the suite does.
    pub fn checked(n: usize) -> Rig {
        let Rig { devices, cuda, _alone } = Rig::host(n);
        Rig { devices: check::wrap(devices), cuda, _alone }
    }

    /// All CUDA devices, or `None` and a note. One case at a time: some hold a stream back with a host function while
    /// they make calls, and a blocking call of another thread (free, module load) on the same context could hold the
    /// context's lock until that function ends (torchcomms#2334, nccl#744).
    #[cfg(feature = "cuda")]
    pub fn cuda() -> Option<Rig> {
        static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
        use gpu_pool::extend::driver::cuda::{device_count, open};
        let devices = device_count().and_then(|count| (0..count).map(open).collect::<Result<Vec<_>, _>>());
        let devices = devices.unwrap_or_default();
        if devices.is_empty() {
            eprintln!("skipped: no CUDA device");
            return None;
        }
        devices.iter().for_each(warm);
        Some(Rig { devices, cuda: true, _alone: Some(alone) })
    }

    pub fn one(&self) -> &DriverRef {
        &self.devices[0]
    }

    /// Two devices, or a note.
    pub fn two(&self) -> Option<(&DriverRef, &DriverRef)> {
        if self.devices.len() < 2 {
            eprintln!("skipped: needs 2 CUDA devices");
            return None;
        }
        Some((&self.devices[0], &self.devices[1]))
    }

    /// Two devices that may access each other, without any right yet, or a note.
    pub fn peers(&self) -> Option<(&DriverRef, &DriverRef)> {
        let (a, b) = self.two()?;
        if !(a.can_access_peer(&**b).unwrap() && b.can_access_peer(&**a).unwrap()) {
            eprintln!("skipped: devices 0 and 1 are no peers");
            return None;
        }
        a.disable_peer(&**b).unwrap();
        b.disable_peer(&**a).unwrap();
        Some((a, b))
    }
}

/// Uses what the CUDA driver may load on first use, which waits for the device, and so would hang behind a gate.
#[cfg(feature = "cuda")]
fn warm(device: &DriverRef) {
    let (s, x, y, p) = (stream(device), mem(device, 4096), mem(device, 4096), pinned(device, 4096));
    let by = adder(device);
    for words in [1, 1024] {
        // SAFETY: in range, ordered by the stream, waited for below.
        unsafe {
            device.fill_u32(x.raw, 0, words, s.raw).unwrap();
            device.fill_u8(x.raw, 0, 4 * words, s.raw).unwrap();
            device.copy_within(y.raw, x.raw, 4 * words, s.raw).unwrap();
        }
        by.add(&s, x.raw, words, 1);
    }
    s.up(&x, &p);
    s.down(&p, &x);
    s.wait();
}

macro_rules! owned {
    ($name:ident { $raw:ty $(, $bytes:ident)? }, $free:ident) => {
        pub struct $name {
            pub of: DriverRef,
            pub raw: $raw,
            $(pub $bytes: usize,)?
        }
        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by this device, dropped once, and the cases wait for their work first.
                let freed = unsafe { self.of.$free(self.raw) };
                if !std::thread::panicking() {
                    freed.unwrap();
                }
            }
        }
    };
}
owned!(Mem { Address, bytes }, mem_free);
owned!(Pinned { *mut u8, bytes }, host_free);
owned!(Managed { *mut u8, bytes }, managed_free);
owned!(Stream { RawStream }, stream_destroy);
owned!(Event { RawEvent }, event_destroy);
owned!(Module { RawModule }, module_unload);

pub fn mem(of: &DriverRef, bytes: usize) -> Mem {
    Mem { of: of.clone(), raw: of.mem_alloc(bytes).unwrap(), bytes }
}

pub fn pinned(of: &DriverRef, bytes: usize) -> Pinned {
    Pinned { of: of.clone(), raw: of.host_alloc(bytes).unwrap(), bytes }
}

pub fn managed(of: &DriverRef, bytes: usize) -> Managed {
    Managed { of: of.clone(), raw: of.managed_alloc(bytes).unwrap(), bytes }
}

pub fn stream(of: &DriverRef) -> Stream {
    Stream { of: of.clone(), raw: of.stream_create(0).unwrap() }
}

pub fn event(of: &DriverRef, timing: bool) -> Event {
    Event { of: of.clone(), raw: of.event_create(timing).unwrap() }
}

impl Stream {
    #[track_caller]
    pub fn wait(&self) {
        assert!(self.of.stream_wait_idle(self.raw, LIMIT).unwrap(), "the stream did not end");
    }

    #[track_caller]
    pub fn is_idle(&self) -> bool {
        self.of.stream_query(self.raw).unwrap()
    }

    /// Is still held back by `gate`; opens the gate and waits.
    #[track_caller]
    pub fn wait_past(&self, gate: Gate) {
        assert!(!self.is_idle());
        gate.open();
        self.wait();
    }

    #[track_caller]
    pub fn fill(&self, at: &Mem, value: u32) {
        // SAFETY: the cases order their work and wait for it before the memory goes.
        unsafe { self.of.fill_u32(at.raw, value, at.bytes / 4, self.raw) }.unwrap();
    }

    #[track_caller]
    pub fn down(&self, to: &Pinned, from: &Mem) {
        // SAFETY: as above.
        unsafe { self.of.copy_to_host(to.raw, from.raw, from.bytes.min(to.bytes), self.raw) }.unwrap();
    }

    #[track_caller]
    pub fn up(&self, to: &Mem, from: &Pinned) {
        // SAFETY: as above.
        unsafe { self.of.copy_to_device(to.raw, from.raw, from.bytes.min(to.bytes), self.raw) }.unwrap();
    }

    /// Holds the stream back until the gate is opened or dropped.
    pub fn gate(&self) -> Gate {
        let (open, wait) = mpsc::channel::<()>();
        let hold = move || {
            // An `Err`, since the gate was dropped, opens it.
            let _ = wait.recv();
        };
        self.of.launch_host(self.raw, Box::new(hold)).unwrap();
        Gate(Some(open))
    }
}

/// A held-back stream. Nothing may be allocated or freed meanwhile: CUDA may wait for the stream then.
pub struct Gate(Option<mpsc::Sender<()>>);

impl Gate {
    pub fn open(mut self) {
        self.0 = None;
    }
}

impl Event {
    #[track_caller]
    pub fn record(&self, stream: &Stream) {
        self.of.event_record(self.raw, stream.raw).unwrap();
    }

    #[track_caller]
    pub fn is_done(&self) -> bool {
        self.of.event_query(self.raw).unwrap()
    }

    #[track_caller]
    pub fn hold(&self, stream: &Stream) {
        stream.of.stream_wait_event(stream.raw, self.raw).unwrap();
    }
}

macro_rules! views {
    ($($name:ident)+) => {$(
        impl $name {
            /// The memory as words. No operation may be using it.
            #[allow(dead_code)]
            pub fn words(&self) -> &[u32] {
                // SAFETY: zeroed at birth, aligned, and the cases look only when no operation runs.
                unsafe { std::slice::from_raw_parts(self.raw.cast(), self.bytes / 4) }
            }

            /// The memory as bytes. No operation may be using it.
            #[allow(dead_code)]
            pub fn all(&mut self) -> &mut [u8] {
                // SAFETY: as above.
                unsafe { std::slice::from_raw_parts_mut(self.raw, self.bytes) }
            }
        }
    )+};
}
views!(Pinned Managed);

/// What device memory holds, by way of a stream of its own.
#[track_caller]
pub fn read(from: &Mem) -> Vec<u8> {
    let (stream, mut to) = (stream(&from.of), pinned(&from.of, from.bytes));
    stream.down(&to, from);
    stream.wait();
    to.all().to_vec()
}

#[track_caller]
pub fn read_words(from: &Mem) -> Vec<u32> {
    read(from).chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
}

/// Sets device memory, by way of a stream of its own.
#[track_caller]
pub fn write(to: &Mem, bytes: &[u8]) {
    let (stream, mut from) = (stream(&to.of), pinned(&to.of, bytes.len()));
    from.all().copy_from_slice(bytes);
    stream.up(to, &from);
    stream.wait();
}

/// Bytes that do not repeat soon.
pub fn pattern(n: usize, seed: u8) -> Vec<u8> {
    (0..n).map(|i| (i.wrapping_mul(31) ^ (i >> 8)) as u8 ^ seed).collect()
}

/// `x[i] += by` for all `i < n`.
pub const ADD: &str = "
.version 7.5
.target sm_75
.address_size 64
.visible .entry add_u32(.param .u64 p_x, .param .u32 p_by, .param .u32 p_n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [p_x];
    ld.param.u32 %r1, [p_by];
    ld.param.u32 %r2, [p_n];
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %ctaid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r6, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r7, [%rd4];
    add.s32 %r7, %r7, %r1;
    st.global.u32 [%rd4], %r7;
DONE:
    ret;
}
";

/// # Safety
/// As the signature of `add_u32` demands.
unsafe fn add_host(_: LaunchDims, args: &[HostArg]) {
    let [HostArg::Slice { ptr, .. }, HostArg::Value(by), HostArg::Value(n)] = args else { panic!("wrong arguments") };
    let word = |value: &ValueBytes| u32::from_ne_bytes(value.as_bytes().try_into().unwrap());
    // SAFETY: the caller's promise.
    let x = unsafe { std::slice::from_raw_parts_mut(ptr.cast::<u32>(), word(n) as usize) };
    x.iter_mut().for_each(|x| *x = x.wrapping_add(word(by)));
}

/// The kernel `add_u32` on one device.
pub struct Adder {
    pub module: Arc<Module>,
    pub function: RawFunction,
}

pub fn adder(of: &DriverRef) -> Adder {
    let raw = of
        .module_load(&ModuleImage {
            ptx: Some(ADD.as_bytes()),
            cubins: &[],
            packed: false,
            source: None,
            shared: false,
        })
        .unwrap();
    let function = of.function(raw, "add_u32").unwrap();
    Adder { module: Arc::new(Module { of: of.clone(), raw }), function }
}

impl Adder {
    #[track_caller]
    pub fn add(&self, stream: &Stream, at: Address, n: usize, by: u32) {
        let args = [
            KernelArg::Slice { address: at, bytes: 4 * n, write: true },
            KernelArg::Value(ValueBytes::new(&by.to_ne_bytes())),
            KernelArg::Value(ValueBytes::new(&(n as u32).to_ne_bytes())),
        ];
        let dims = LaunchDims::cover(n);
        let launch =
            Launch { name: "add_u32", function: self.function, host: Some(add_host), dims, args: &args, early: false };
        // SAFETY: the arguments are those of `add_u32`; the cases order their work.
        unsafe { self.module.of.launch(&launch, stream.raw) }.unwrap();
    }
}
