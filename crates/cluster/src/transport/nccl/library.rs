//! The library: where it is looked for, which version will do, its functions. The signatures are those of `nccl.h` from
//! 2.19 to 2.32. Results are plain numbers here: a newer library may know more of them.

use crate::runtime::variables;
use gpu_pool::{Error, Result};
use once_cell::sync::OnceCell;
use std::{
    ffi::{CStr, OsStr, OsString, c_char, c_int, c_uint, c_void},
    ptr::null,
};

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t`, which is the driver's `CUstream`.
pub(super) type Stream = *mut c_void;

/// Names a library, by its path or as the loader knows it.
const VARIABLE: &str = "GPU_POOL_NCCL";

/// 2.19.1. Before it, an abort while another thread is in a call can hang (nccl#992).
const OLDEST: c_int = 21901;

/// `ncclResult_t`, as far as we ask for it.
pub(super) mod code {
    use std::ffi::c_int;

    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const INVALID_USAGE: c_int = 5;
    /// Blocking communicators report it only of themselves, while a call runs.
    pub(crate) const IN_PROGRESS: c_int = 7;
}

/// `ncclUniqueId`, by which the ranks of a communicator find each other.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    pub(super) const BYTES: usize = 128;
}

/// `ncclConfig_t` as of 2.17 to 2.24. A newer library sees by `size` and `version` what it lacks.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER`, blocking: else NCCL hands each call to a thread of its own, which takes some 50 us.
    pub(super) fn blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: null(),
            split_share: UNDEFINED,
        }
    }
}

/// Declares [`Functions`]; all return a result code but those that return a text.
macro_rules! functions {
    ($($name:ident $symbol:literal ($($argument:ty),*) $(-> $text:ty)?;)*) => {
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> functions!(@ $($text)?),)*
        }

        impl Functions {
            /// # Safety
            /// The library is NCCL, and it is never closed.
            unsafe fn of(library: &libloading::Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Functions {
                    // SAFETY: the symbol has nccl.h's signature, and the library stays, by the caller's promise.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
    (@) => { c_int };
    (@ $text:ty) => { $text };
}

functions! {
    version "ncclGetVersion" (*mut c_int);
    unique_id "ncclGetUniqueId" (*mut UniqueId);
    init_rank "ncclCommInitRankConfig" (*mut Comm, c_int, UniqueId, c_int, *mut Config);
    async_error "ncclCommGetAsyncError" (Comm, *mut c_int);
    finalize "ncclCommFinalize" (Comm);
    destroy "ncclCommDestroy" (Comm);
    abort "ncclCommAbort" (Comm);
    group_start "ncclGroupStart" ();
    group_end "ncclGroupEnd" ();
    all_reduce "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
    reduce_scatter "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
    all_gather "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Comm, Stream);
    broadcast "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
    reduce "ncclReduce" (*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream);
    send "ncclSend" (*const c_void, usize, c_int, c_int, Comm, Stream);
    recv "ncclRecv" (*mut c_void, usize, c_int, c_int, Comm, Stream);
    register "ncclCommRegister" (Comm, *mut c_void, usize, *mut *mut c_void);
    deregister "ncclCommDeregister" (Comm, *mut c_void);
    scaled_create "ncclRedOpCreatePreMulSum" (*mut c_int, *mut c_void, c_int, c_int, Comm);
    scaled_destroy "ncclRedOpDestroy" (c_int, Comm);
    error_string "ncclGetErrorString" (c_int) -> *const c_char;
    last_error "ncclGetLastError" (Comm) -> *const c_char;
}

/// The loaded library. It stays loaded: its threads may outlive every communicator.
pub(crate) struct Library {
    pub(super) f: Functions,
    pub(super) version: c_int,
}

impl Library {
    /// The library of this process: the one that `GPU_POOL_NCCL` names, else `libnccl.so.2` of the loader's search path
    /// (`LD_LIBRARY_PATH`). An [`Error::Cluster`] says what to install.
    pub(crate) fn get() -> Result<&'static Library> {
        static LIBRARY: OnceCell<Library> = OnceCell::new();
        let named = || variables::os(VARIABLE).filter(|name| !name.is_empty());
        LIBRARY.get_or_try_init(|| Library::open(named()))
    }

    pub(super) fn open(named: Option<OsString>) -> Result<Library> {
        let name = named.as_deref().unwrap_or(OsStr::new("libnccl.so.2"));
        let text = name.to_string_lossy();
        // SAFETY: opening NCCL runs only its initialisers; another library is the mistake of who names it.
        let library = unsafe { libloading::Library::new(name) }.map_err(|error| missing(&text, &error))?;
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        // SAFETY: it has NCCL's name, or the user calls it NCCL; it is leaked, so it stays.
        let f = unsafe { Functions::of(library) }
            .map_err(|error| unusable(&text, format_args!("is no NCCL, or an old one: {error}")))?;
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        match unsafe { (f.version)(&mut version) } {
            code::SUCCESS => new_enough(&text, version)?,
            code => return Err(unusable(&text, format_args!("does not tell its version ({code})"))),
        }
        Ok(Library { f, version })
    }

    pub(crate) fn version(&self) -> String {
        readable(self.version)
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: the pointer is to a live value.
        let code = unsafe { (self.f.unique_id)(&mut id) };
        if code == code::SUCCESS { Ok(id) } else { Err(self.error("ncclGetUniqueId", code, "no communicator yet")) }
    }

    pub(super) fn error(&self, op: &'static str, code: c_int, place: &str) -> Error {
        // SAFETY: the function takes any code.
        let meaning = text(unsafe { (self.f.error_string)(code) });
        // SAFETY: a null communicator is allowed, and the only one that the function looks at is none: the text is that
        // of the process' last error.
        let last = text(unsafe { (self.f.last_error)(std::ptr::null_mut()) });
        let colon = if last.is_empty() { "" } else { ": " };
        Error::Transport { library: "nccl", op, code, why: format!("{meaning}{colon}{last}, on {place}") }
    }
}

/// The caller breaks a rule of this crate.
pub(super) fn misuse(op: &'static str, why: String) -> Error {
    Error::Transport { library: "nccl", op, code: code::INVALID_USAGE, why }
}

fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's strings live as long as the library, and end with a zero.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_owned()
}

fn new_enough(name: &str, version: c_int) -> Result<()> {
    if version >= OLDEST {
        return Ok(());
    }
    let (found, oldest) = (readable(version), readable(OLDEST));
    Err(unusable(name, format_args!("is NCCL {found}; install {oldest} or newer (an abort of older ones can hang)")))
}

/// The text of `NCCL_VERSION_CODE`, which has had more digits since 2.9.
fn readable(version: c_int) -> String {
    let unit = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / unit, version % unit / 100, version % 100)
}

fn missing(name: &str, error: &libloading::Error) -> Error {
    cluster_error!(
        "transport",
        "NCCL was not found as {name} ({error}). Install NCCL {} or newer (Debian, Ubuntu: libnccl2; PyPI: \
         nvidia-nccl-cu12 or nvidia-nccl-cu13, with its nvidia/nccl/lib in LD_LIBRARY_PATH), or name the library in \
         {VARIABLE}",
        readable(OLDEST)
    )
}

fn unusable(name: &str, why: std::fmt::Arguments<'_>) -> Error {
    cluster_error!("transport", "{name} {why}; {VARIABLE} can name another library")
}

#[cfg(test)]
#[path = "../../../tests/unit/transport/nccl/library_tests.rs"]
mod tests;
