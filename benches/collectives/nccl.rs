//! NCCL, loaded at run time: the functions that the bench calls, and communicators with one rank per device thread.
//!
//! Signatures and constants are those of nccl.h, 2.18 to 2.32.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
};

use cudarc::driver::sys::CUstream;
use gpu_pool::GpuPool;
use libloading::Library;
use parking_lot::Mutex;

use crate::{ops::Op, processes::Processes};

type Comm = *mut c_void;
type Window = *mut c_void;
type Pointer = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([c_char; 128]);

impl UniqueId {
    /// A new one. This process answers those who join by it.
    pub fn new(nccl: &Nccl) -> Self {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is to a live place.
        nccl.check("ncclGetUniqueId", unsafe { (nccl.functions.unique_id)(&mut id) });
        id
    }

    /// In hexadecimal digits, for another process.
    pub fn text(&self) -> String {
        self.0.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect()
    }

    /// What [`text`](Self::text) has written.
    pub fn parse(text: &str) -> Self {
        let byte = |k: usize| u8::from_str_radix(&text[2 * k..2 * k + 2], 16).expect("hexadecimal digits");
        UniqueId(std::array::from_fn(|k| byte(k).cast_signed()))
    }
}

const SUM: c_int = 0;
const COLL_SYMMETRIC: c_int = 1;

/// A struct of functions that return `ncclResult_t`. A library must have all of them.
macro_rules! functions {
    ($of:ident { $($field:ident $name:literal ($($arg:ty),*);)* }) => {
        struct $of {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl $of {
            /// # Safety
            /// The library is NCCL, and stays loaded.
            unsafe fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok($of {
                    // SAFETY: these are nccl.h's signatures; the library stays.
                    $($field: *unsafe { library.get(concat!($name, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

functions! { Functions {
    version "ncclGetVersion" (*mut c_int);
    unique_id "ncclGetUniqueId" (*mut UniqueId);
    init_rank "ncclCommInitRank" (*mut Comm, c_int, UniqueId, c_int);
    destroy "ncclCommDestroy" (Comm);
    group_start "ncclGroupStart" ();
    group_end "ncclGroupEnd" ();
    all_reduce "ncclAllReduce" (Pointer, Pointer, usize, c_int, c_int, Comm, CUstream);
    reduce_scatter "ncclReduceScatter" (Pointer, Pointer, usize, c_int, c_int, Comm, CUstream);
    all_gather "ncclAllGather" (Pointer, Pointer, usize, c_int, Comm, CUstream);
    broadcast "ncclBroadcast" (Pointer, Pointer, usize, c_int, c_int, Comm, CUstream);
    send "ncclSend" (Pointer, usize, c_int, c_int, Comm, CUstream);
    recv "ncclRecv" (Pointer, usize, c_int, c_int, Comm, CUstream);
} }

// Since 2.27.
functions! { Windows {
    alloc "ncclMemAlloc" (*mut Pointer, usize);
    free "ncclMemFree" (Pointer);
    register "ncclCommWindowRegister" (Comm, Pointer, usize, *mut Window, c_int);
    deregister "ncclCommWindowDeregister" (Comm, Window);
} }

// Since 2.28.
functions! { AllToAll {
    all_to_all "ncclAlltoAll" (Pointer, Pointer, usize, c_int, Comm, CUstream);
} }

/// The loaded library.
pub struct Nccl {
    functions: Functions,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    windows: Option<Windows>,
    all_to_all: Option<AllToAll>,
    /// `NCCL 2.28.9`.
    pub name: String,
}

impl Nccl {
    /// Loads it from `LD_LIBRARY_PATH` for ever. `None`, after a line that says why, if there is none.
    pub fn load() -> Option<&'static Nccl> {
        // SAFETY: loading NCCL runs only its initialisers.
        let library = unsafe { Library::new("libnccl.so.2") }.inspect_err(|error| println!("no NCCL: {error}")).ok()?;
        // Its threads may outlive every communicator, so it is never unloaded.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: it is NCCL and stays; these are nccl.h's signatures.
        let loaded = unsafe {
            Functions::load(library).and_then(|functions| Ok((functions, *library.get(b"ncclGetErrorString\0")?)))
        };
        let (functions, error_string) = loaded.inspect_err(|error| println!("not our NCCL: {error}")).ok()?;
        // SAFETY: as above.
        let (windows, all_to_all) = unsafe { (Windows::load(library).ok(), AllToAll::load(library).ok()) };
        let mut nccl = Nccl { functions, error_string, windows, all_to_all, name: String::new() };
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        nccl.check("ncclGetVersion", unsafe { (nccl.functions.version)(&mut version) });
        nccl.name = format!("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
        let ways = [("NCCL_CTA_POLICY", "2", " with copy engines"), ("NCCL_MAX_NCHANNELS", "1", ", lean")];
        for (variable, value, words) in ways {
            if std::env::var(variable).is_ok_and(|set| set == value) {
                nccl.name += words;
            }
        }
        let without = if nccl.windows.is_none() { ", without windows" } else { "" };
        // On stderr: stdout may carry the answers of a child process.
        eprintln!("the peer is {}{without}, multicast off", nccl.name);
        Some(Box::leak(Box::new(nccl)))
    }

    fn check(&self, what: &str, code: c_int) {
        if code != 0 {
            // SAFETY: it returns a constant string, whatever the code.
            let why = unsafe { CStr::from_ptr((self.error_string)(code)) };
            panic!("{what}: {}", why.to_string_lossy());
        }
    }
}

/// A device's part of a communicator. Only that device's thread uses it, where the device's context is current.
pub struct Rank {
    nccl: &'static Nccl,
    comm: Comm,
    world: usize,
    /// Registered memory for input and output: address and handle.
    windows: Option<[(Pointer, Window); 2]>,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time; ranks are behind a lock.
unsafe impl Send for Rank {}

impl Rank {
    fn join(nccl: &'static Nccl, id: UniqueId, rank: usize, world: usize) -> Self {
        let mut comm = ptr::null_mut();
        // SAFETY: the pointer is to a live place; the other ranks come too, each on its device's thread.
        let code = unsafe { (nccl.functions.init_rank)(&mut comm, world as c_int, id, rank as c_int) };
        nccl.check("ncclCommInitRank", code);
        Rank { nccl, comm, world, windows: None }
    }

    /// Opens two windows of `bytes` bytes, and returns whether that worked. All ranks call it together.
    fn open_windows(&mut self, bytes: usize) -> bool {
        let Some(functions) = &self.nccl.windows else { return false };
        let windows = [(); 2].map(|()| {
            let (mut memory, mut window) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the pointers are to live values; the memory has this size.
            unsafe {
                self.nccl.check("ncclMemAlloc", (functions.alloc)(&mut memory, bytes));
                // Without support for symmetric memory this may fail, or succeed and give no window.
                let code = (functions.register)(self.comm, memory, bytes, &mut window, COLL_SYMMETRIC);
                (memory, if code == 0 { window } else { ptr::null_mut() })
            }
        });
        self.windows = Some(windows);
        windows.iter().all(|(_, window)| !window.is_null())
    }

    /// Addresses of the windows for input and output.
    pub fn windows(&self) -> Option<[u64; 2]> {
        self.windows.map(|windows| windows.map(|(memory, _)| memory as u64))
    }

    /// Enqueues the operation on `total` elements, as [`Op::lengths`] counts them.
    ///
    /// The addresses point to as many elements as the operation touches, valid until the stream is past it; the stream
    /// belongs to this rank's device, and the context is current. All ranks make the same call.
    pub unsafe fn call(&self, op: Op, dtype: c_int, [src, dst]: [u64; 2], size: usize, total: usize, stream: CUstream) {
        let (src, dst) = (src as Pointer, dst as Pointer);
        let (part, comm, f) = (total / self.world, self.comm, &self.nccl.functions);
        // SAFETY: the caller's promises are what NCCL asks for.
        let code = unsafe {
            match op {
                Op::AllReduce => (f.all_reduce)(src, dst, total, dtype, SUM, comm, stream),
                Op::ReduceScatter => (f.reduce_scatter)(src, dst, part, dtype, SUM, comm, stream),
                Op::AllGather => (f.all_gather)(src, dst, part, dtype, comm, stream),
                Op::Broadcast => (f.broadcast)(src, dst, total, dtype, 0, comm, stream),
                Op::AllToAll => match &self.nccl.all_to_all {
                    Some(own) => (own.all_to_all)(src, dst, part, dtype, comm, stream),
                    None => self.pairs(dtype, src, dst, size, part, stream),
                },
            }
        };
        self.nccl.check(op.name(), code);
    }

    /// All-to-all by pairs of send and receive, for NCCL versions without a function for it.
    ///
    /// # Safety
    /// As for [`call`](Self::call).
    unsafe fn pairs(&self, dtype: c_int, src: Pointer, dst: Pointer, size: usize, part: usize, s: CUstream) -> c_int {
        let (comm, f) = (self.comm, &self.nccl.functions);
        // SAFETY: the caller's promises are what NCCL asks for.
        unsafe {
            self.nccl.check("ncclGroupStart", (f.group_start)());
            for peer in 0..self.world {
                let (at, to) = (peer * part * size, peer as c_int);
                self.nccl.check("ncclSend", (f.send)(src.byte_add(at), part, dtype, to, comm, s));
                self.nccl.check("ncclRecv", (f.recv)(dst.byte_add(at), part, dtype, to, comm, s));
            }
            (f.group_end)()
        }
    }

    fn leave(&mut self) {
        // SAFETY: all belong to this rank, its streams are idle, and they are not used again.
        unsafe {
            if let (Some(functions), Some(windows)) = (&self.nccl.windows, self.windows.take()) {
                for (memory, window) in windows {
                    if !window.is_null() {
                        let code = (functions.deregister)(self.comm, window);
                        self.nccl.check("ncclCommWindowDeregister", code);
                    }
                    self.nccl.check("ncclMemFree", (functions.free)(memory));
                }
            }
            self.nccl.check("ncclCommDestroy", (self.nccl.functions.destroy)(self.comm));
        }
    }
}

/// A communicator over the pool's first devices.
pub struct Club {
    pub ranks: Vec<Mutex<Rank>>,
    /// Whether all ranks have windows.
    pub windows: bool,
    /// NCCL again, in a process for each GPU.
    pub processes: Option<Processes>,
}

impl Club {
    /// Makes a communicator of `world` ranks. With two windows of `bytes` bytes each, if possible and `bytes` is not 0.
    pub fn join(nccl: &'static Nccl, pool: &GpuPool, world: usize, bytes: usize) -> Self {
        let devices: Vec<usize> = (0..world).collect();
        Club::of_devices(nccl, pool, &devices, (UniqueId::new(nccl), 0, world), bytes)
    }

    /// The one rank of this process, on the pool's only device; windows as in [`join`](Self::join).
    pub fn of_process(nccl: &'static Nccl, pool: &GpuPool, place: (UniqueId, usize, usize), bytes: usize) -> Self {
        Club::of_devices(nccl, pool, &[0], place, bytes)
    }

    /// Starts NCCL in processes, too. They have windows of `bytes` bytes, if possible.
    pub fn and_processes(mut self, nccl: &Nccl, bytes: usize) -> Self {
        self.processes = Some(Processes::start(nccl, self.ranks.len(), bytes));
        self
    }

    fn of_devices(
        nccl: &'static Nccl,
        pool: &GpuPool,
        devices: &[usize],
        (id, first, world): (UniqueId, usize, usize),
        bytes: usize,
    ) -> Self {
        let ranks = pool.on(devices).run(|dev, _| {
            // Makes the device's context current, for this and all later calls.
            dev.cuda()?;
            Ok(Mutex::new(Rank::join(nccl, id, first + dev.rank(), world)))
        });
        let mut club = Club { ranks: ranks.expect("a communicator"), windows: false, processes: None };
        if bytes > 0 && nccl.windows.is_some() {
            let open = pool.on(devices).run(|dev, _| {
                dev.cuda()?;
                Ok(club.ranks[dev.rank()].lock().open_windows(bytes))
            });
            club.windows = open.expect("windows, or none").into_iter().all(|open| open);
            if !club.windows {
                // On stderr: stdout may carry the answers of a child process.
                eprintln!("{} registers no windows here", nccl.name);
            }
        }
        club
    }

    /// Destroys the communicator.
    pub fn leave(self, pool: &GpuPool) {
        let devices: Vec<usize> = (0..self.ranks.len()).collect();
        let left = pool.on(&devices).run(|dev, _| {
            dev.cuda()?;
            self.ranks[dev.rank()].lock().leave();
            Ok(())
        });
        left.expect("the communicator ends");
    }
}
