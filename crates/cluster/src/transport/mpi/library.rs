//! The functions of an MPI library that was opened at run time, in any of the three ABIs there are.
//!
//! Open MPI (4 and 5) has pointers as handles, MPICH and its relatives have `int`s, and the standard ABI (MPI 5) has
//! pointers with fixed values. Nothing here depends on a layout: handles are words, and a status is room that is only
//! handed back to the library.

use crate::runtime::variables;
use gpu_pool::{Error, Result};
use libloading::os::unix;
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fs, mem,
    path::Path,
    ptr,
};

/// A handle of any ABI: a pointer, or an `int`, which is passed in the low half of the same register. A function's
/// result goes to a zeroed word, of which an `int` fills the low half: so the target must be little-endian.
pub(super) type Handle = usize;

/// Room for the largest status of all (24 to 40 bytes).
pub(super) type Status = [u64; 16];

/// The largest error text of all is 512 bytes, the largest version 8192.
const TEXT: usize = 8192;

macro_rules! functions {
    ($($name:ident: $symbol:ident($($arg:ty),*);)*) => {
        /// They return 0 or an error code. All may be called by any thread if the library has agreed to
        /// `MPI_THREAD_MULTIPLE`, else by one thread.
        pub(super) struct Functions { $(pub $name: unsafe extern "C" fn($($arg),*) -> c_int,)* }

        impl Functions {
            /// # Safety
            /// The library is an MPI.
            unsafe fn of(library: &Opened) -> Result<Self> {
                $(let $name = library.symbol(stringify!($symbol))
                    .ok_or_else(|| library.unusable(concat!("it has no ", stringify!($symbol))))?;)*
                // SAFETY: the signatures are the standard's, with handles as `Handle` says.
                unsafe {
                    Ok(Functions {
                        $($name: mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>($name),)*
                    })
                }
            }
        }
    };
}

functions! {
    init_thread: MPI_Init_thread(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    initialized: MPI_Initialized(*mut c_int);
    finalized: MPI_Finalized(*mut c_int);
    query_thread: MPI_Query_thread(*mut c_int);
    finalize: MPI_Finalize();
    comm_rank: MPI_Comm_rank(Handle, *mut c_int);
    comm_size: MPI_Comm_size(Handle, *mut c_int);
    comm_dup: MPI_Comm_dup(Handle, *mut Handle);
    comm_get_attr: MPI_Comm_get_attr(Handle, c_int, *mut *mut c_int, *mut c_int);
    set_errhandler: MPI_Comm_set_errhandler(Handle, Handle);
    isend: MPI_Isend(*const c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle);
    irecv: MPI_Irecv(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle);
    test: MPI_Test(*mut Handle, *mut c_int, *mut c_void);
    get_count: MPI_Get_count(*const c_void, Handle, *mut c_int);
    error_string: MPI_Error_string(c_int, *mut c_char, *mut c_int);
    library_version: MPI_Get_library_version(*mut c_char, *mut c_int);
}

pub(super) struct Constants {
    pub world: Handle,
    pub byte: Handle,
    pub errors_return: Handle,
    pub thread_multiple: c_int,
    pub tag_ub: c_int,
}

/// An MPI library. It is never closed: none of them survives that.
pub(super) struct Library {
    pub f: Functions,
    pub constants: Constants,
    pub version: String,
    /// `MPIX_Query_cuda_support`, an extension.
    cuda_support: Option<extern "C" fn() -> c_int>,
}

impl Library {
    /// Opens the library that `GPU_POOL_MPI` names, or else the first that is found. Those of the launcher come first.
    pub(super) fn open() -> Result<Library> {
        if cfg!(not(all(target_pointer_width = "64", target_endian = "little"))) {
            return Err(unusable("MPI is supported on 64-bit little-endian machines"));
        }
        let named = variables::text("GPU_POOL_MPI").map_err(|not| unusable(&not.to_string()))?;
        let named = named.filter(|name| !name.trim().is_empty());
        let names = match &named {
            Some(name) => vec![name.trim()],
            None => found(variables::os("OMPI_COMM_WORLD_RANK").is_some()).to_vec(),
        };
        let mut tried = String::new();
        for name in names {
            match Opened::new(name) {
                // SAFETY: it is called an MPI, by its name or by the user.
                Ok(library) => return unsafe { Library::of(&library) },
                Err(why) => tried += &format!("; {name}: {why}"),
            }
        }
        Err(unusable(&format!(
            "no MPI library was found: install one (Debian and Ubuntu: `apt install openmpi-bin`; PyPI: `pip install \
             mpich`), or name its libmpi.so in GPU_POOL_MPI{tried}"
        )))
    }

    /// # Safety
    /// The library is an MPI.
    unsafe fn of(library: &Opened) -> Result<Library> {
        // SAFETY: as promised.
        let f = unsafe { Functions::of(library)? };
        let handle = |name| -> Result<usize> {
            let at = library.symbol(name).ok_or_else(|| library.unusable("it is half an Open MPI"))?;
            Ok(at.expose_provenance())
        };
        let constants = if library.symbol("ompi_mpi_comm_world").is_some() {
            // Handles are the addresses of objects.
            Constants {
                world: handle("ompi_mpi_comm_world")?,
                byte: handle("ompi_mpi_byte")?,
                errors_return: handle("ompi_mpi_errors_return")?,
                thread_multiple: 3,
                tag_ub: 0,
            }
        } else if library.is_standard_abi() {
            Constants { world: 0x101, byte: 0x247, errors_return: 0x143, thread_multiple: 4096, tag_ub: 501 }
        } else {
            // MPICH, and by its "ABI compatibility initiative" Intel MPI, MVAPICH, Cray MPICH.
            Constants {
                world: 0x4400_0000,
                byte: 0x4c00_010d,
                errors_return: 0x5400_0001,
                thread_multiple: 3,
                tag_ub: 0x6440_0001,
            }
        };
        let (mut text, mut len) = ([0u8; TEXT], 0);
        // SAFETY: the text has room for the longest version. This function may be called before MPI_Init.
        unsafe { (f.library_version)(text.as_mut_ptr().cast(), &mut len) };
        let text = text_of(&text);
        let version = text.lines().next().unwrap_or_default().split(',').next().unwrap_or_default().trim();
        let cuda_support = library.symbol("MPIX_Query_cuda_support");
        // SAFETY: the signature of Open MPI's and MPICH's extension.
        let cuda_support =
            cuda_support.map(|at| unsafe { mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(at) });
        Ok(Library { f, constants, version: format!("{version} ({})", library.name), cuda_support })
    }

    /// Whether it takes the addresses of GPUs' memory. False if it cannot tell. MPI has begun.
    pub(super) fn is_cuda_aware(&self) -> bool {
        self.cuda_support.is_some_and(|query| query() == 1)
    }

    pub(super) fn check(&self, op: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut len) = ([0u8; TEXT], 0);
        // SAFETY: the text has room for the longest one.
        unsafe { (self.f.error_string)(code, text.as_mut_ptr().cast(), &mut len) };
        Err(Error::Transport { library: "mpi", op, code, why: text_of(&text) })
    }
}

fn text_of(text: &[u8]) -> String {
    CStr::from_bytes_until_nul(text).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

pub(super) fn unusable(why: &str) -> Error {
    cluster_error!("transport", "{why}")
}

/// The libraries' names, of Open MPI first or last.
fn found(open_mpi_first: bool) -> [&'static str; 6] {
    let open = "libmpi.so.40";
    match open_mpi_first {
        true => [open, "libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi.so.12", "libmpich.so.12", "libmpi.so"],
        false => ["libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi.so.12", "libmpich.so.12", open, "libmpi.so"],
    }
}

struct Opened {
    name: String,
    library: mem::ManuallyDrop<unix::Library>,
}

impl Opened {
    fn new(name: &str) -> std::result::Result<Opened, libloading::Error> {
        // SAFETY: an MPI's initialisers do no harm. Its symbols are global: Open MPI's plug-ins look for them there.
        let library = unsafe { unix::Library::open(Some(name), unix::RTLD_NOW | unix::RTLD_GLOBAL)? };
        Ok(Opened { name: name.to_owned(), library: mem::ManuallyDrop::new(library) })
    }

    fn symbol(&self, name: &str) -> Option<*mut c_void> {
        // SAFETY: it is not used as anything here.
        unsafe { self.library.get::<*mut c_void>(name).ok().map(|symbol| symbol.as_raw_ptr()) }
    }

    /// The standard ABI's functions are called like MPICH's. The file's name counts: a link may have another one.
    fn is_standard_abi(&self) -> bool {
        // SAFETY: room for the result, which names a text of the linker's.
        let file = self.symbol("MPI_Init_thread").and_then(|at| unsafe {
            let mut info: libc::Dl_info = mem::zeroed();
            (libc::dladdr(at, &mut info) != 0 && !ptr::eq(info.dli_fname, ptr::null()))
                .then(|| CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned())
        });
        let file = file.unwrap_or_else(|| self.name.clone());
        let file = fs::canonicalize(&file).unwrap_or_else(|_| file.into());
        Path::file_name(&file).is_some_and(|name| name.to_string_lossy().contains("mpi_abi"))
    }

    fn unusable(&self, why: &str) -> Error {
        unusable(&format!("{} is no MPI library that can be used: {why}", self.name))
    }
}
