//! NCCL, loaded at run time: communicators of several processes, with all-reduces.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr::{null, null_mut},
    thread,
};

use cudarc::driver::sys::CUstream;
use libloading::Library;

type Comm = *mut c_void;

const IN_PROGRESS: c_int = 7;
const UNDEFINED: c_int = c_int::MIN;
/// `ncclFloat32`
const FLOAT: c_int = 7;
/// `ncclSum`
const SUM: c_int = 0;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

/// `ncclConfig_t` as of 2.17.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// Cluster size, fewest and most CTAs.
    limits: [c_int; 3],
    net_name: *const c_char,
    split_share: c_int,
}

struct Functions {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
}

fn load() -> Result<Functions, libloading::Error> {
    let name = std::env::var_os("GPU_POOL_NCCL").unwrap_or("libnccl.so.2".into());
    // SAFETY: opening NCCL runs only its initialisers.
    let library: &'static Library = Box::leak(Box::new(unsafe { Library::new(name) }?));
    // SAFETY: these are nccl.h's signatures, and the library stays.
    unsafe {
        Ok(Functions {
            unique_id: *library.get(b"ncclGetUniqueId\0")?,
            init: *library.get(b"ncclCommInitRankConfig\0")?,
            async_error: *library.get(b"ncclCommGetAsyncError\0")?,
            all_reduce: *library.get(b"ncclAllReduce\0")?,
            abort: *library.get(b"ncclCommAbort\0")?,
        })
    }
}

/// Whether the library can be loaded.
pub fn is_there() -> bool {
    load().inspect_err(|error| println!("no NCCL: {error}")).is_ok()
}

/// What joins the ranks of a communicator.
pub fn unique_id() -> Vec<u8> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: the pointer is to a live place.
    let code = unsafe { (load().expect("NCCL is there").unique_id)(&mut id) };
    assert_eq!(code, 0, "ncclGetUniqueId");
    id.0.into()
}

/// This process's part of a communicator.
pub struct Rank {
    f: Functions,
    comm: Comm,
}

impl Rank {
    /// Joins the communicator of this id, as rank and size say. The device's context is current.
    pub fn join(id: Vec<u8>, (rank, size): (usize, usize), blocking: bool) -> Rank {
        let f = load().expect("NCCL is there");
        let id = UniqueId(id.try_into().expect("128 bytes"));
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21901,
            blocking: blocking.into(),
            limits: [UNDEFINED; 3],
            net_name: null(),
            split_share: UNDEFINED,
        };
        let mut comm = null_mut();
        // SAFETY: the pointers are to live values; the other processes come, too.
        let code = unsafe { (f.init)(&mut comm, size as c_int, id, rank as c_int, &mut config) };
        let rank = Rank { f, comm };
        rank.settle(code);
        rank
    }

    /// An all-reduce in place. Returns when it is launched.
    ///
    /// # Safety
    /// `len` floats at `at` are memory of this device until the stream has passed the call.
    pub unsafe fn all_reduce(&self, at: *mut c_void, len: usize, stream: CUstream) {
        // SAFETY: the caller's promise; a live communicator.
        self.settle(unsafe { (self.f.all_reduce)(at, at, len, FLOAT, SUM, self.comm, stream) });
    }

    fn settle(&self, mut code: c_int) {
        while code == IN_PROGRESS {
            // SAFETY: a live communicator; the pointer is to a live integer.
            let asked = unsafe { (self.f.async_error)(self.comm, &mut code) };
            assert_eq!(asked, 0, "ncclCommGetAsyncError");
            thread::yield_now();
        }
        assert_eq!(code, 0, "NCCL fails");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // SAFETY: the last use; all streams are idle.
        unsafe { (self.f.abort)(self.comm) };
    }
}
