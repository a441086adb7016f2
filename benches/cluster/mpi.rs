//! `MPI_Allreduce`, of a library that is loaded at run time, on ranks that mpirun has started.

use std::{
    env,
    ffi::{c_int, c_void},
    io,
    process::{Command, Stdio},
    ptr, thread,
    time::{Duration, Instant},
};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// A pointer with Open MPI, an `int` with MPICH.
type Handle = usize;

/// An order: how many bytes, and how many calls; none is the end.
type Order = [u64; 2];

struct Mpi {
    world: Handle,
    float: Handle,
    double: Handle,
    byte: Handle,
    sum: Handle,
    max: Handle,
    in_place: *const c_void,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, c_int, Handle, Handle, Handle) -> c_int,
    barrier: unsafe extern "C" fn(Handle) -> c_int,
    begin_broadcast: unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, Handle, *mut Handle) -> c_int,
    test: unsafe extern "C" fn(*mut Handle, *mut c_int, *mut c_void) -> c_int,
    rank: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    init: unsafe extern "C" fn(*mut c_int, *mut c_void) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
}

/// As many processes of a program. None without mpirun and its library.
pub fn run(processes: usize) -> Option<Command> {
    let version = Command::new("mpirun").arg("--version").stderr(Stdio::null()).output().ok()?;
    open().inspect_err(|error| println!("no MPI: {error}")).ok()?;
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &processes.to_string()]);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        mpirun.args(["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]);
    }
    Some(mpirun)
}

fn open() -> Result<Library, libloading::Error> {
    let named = env::var("GPU_POOL_MPI").ok().filter(|name| !name.is_empty());
    let names = named.as_deref().map_or(vec!["libmpi.so.40", "libmpi.so.12", "libmpi.so"], |name| vec![name]);
    // Open MPI's components look for its symbols among all of the process.
    // SAFETY: opening MPI runs only its initialisers.
    let open = |name: &&str| unsafe { Library::open(Some(*name), RTLD_NOW | RTLD_GLOBAL) };
    names.iter().map(open).reduce(Result::or).expect("a name")
}

fn load() -> Result<Mpi, libloading::Error> {
    let library: &'static Library = Box::leak(Box::new(open()?));
    // SAFETY: only the address is used.
    let object =
        |name: &[u8]| unsafe { library.get::<*const c_void>(name) }.map(|at| at.as_raw_ptr().expose_provenance());
    // Open MPI's handles are the addresses of objects; MPICH and its relatives have numbers.
    let open_mpi = object(b"ompi_mpi_comm_world\0").is_ok();
    let handle = |name: &[u8], number: Handle| if open_mpi { object(name) } else { Ok(number) };
    // SAFETY: these are mpi.h's signatures, with handles as above, and the library stays.
    unsafe {
        Ok(Mpi {
            world: handle(b"ompi_mpi_comm_world\0", 0x4400_0000)?,
            float: handle(b"ompi_mpi_float\0", 0x4c00_040a)?,
            double: handle(b"ompi_mpi_double\0", 0x4c00_080b)?,
            byte: handle(b"ompi_mpi_byte\0", 0x4c00_010d)?,
            sum: handle(b"ompi_mpi_op_sum\0", 0x5800_0003)?,
            max: handle(b"ompi_mpi_op_max\0", 0x5800_0001)?,
            in_place: ptr::without_provenance(if open_mpi { 1 } else { usize::MAX }),
            all_reduce: *library.get(b"MPI_Allreduce\0")?,
            barrier: *library.get(b"MPI_Barrier\0")?,
            begin_broadcast: *library.get(b"MPI_Ibcast\0")?,
            test: *library.get(b"MPI_Test\0")?,
            rank: *library.get(b"MPI_Comm_rank\0")?,
            init: *library.get(b"MPI_Init\0")?,
            finalize: *library.get(b"MPI_Finalize\0")?,
        })
    }
}

/// A rank. The first one reads orders `<bytes> <rounds>`, passes them on, and answers with microseconds per call of the
/// slowest.
pub fn serve(most: usize) {
    let mpi = load().expect("an MPI library");
    let mut rank = 0;
    // SAFETY: the first call of the library, of its only thread, which needs no arguments; room for an integer.
    let codes = unsafe { [(mpi.init)(ptr::null_mut(), ptr::null_mut()), (mpi.rank)(mpi.world, &mut rank)] };
    assert_eq!(codes, [0; 2], "MPI_Init");
    let mut data = vec![0f32; most / 4];
    let mut lines = (rank == 0).then(|| io::stdin().lines());
    loop {
        let line = lines.as_mut().and_then(Iterator::next).transpose().expect("the parent lives");
        let order = line.map(|line| {
            let (bytes, rounds) = line.split_once(' ').expect("`bytes rounds`");
            [bytes, rounds].map(|number| number.parse().expect("a number"))
        });
        let [bytes, rounds] = mpi.broadcast(order.unwrap_or_default());
        if rounds == 0 {
            break;
        }
        let data = &mut data[..bytes as usize / 4];
        mpi.sum(data);
        // SAFETY: all ranks call it.
        assert_eq!(unsafe { (mpi.barrier)(mpi.world) }, 0, "MPI_Barrier");
        let clock = Instant::now();
        (0..rounds).for_each(|_| mpi.sum(data));
        let slowest = mpi.max(clock.elapsed().as_secs_f64() * 1e6 / rounds as f64);
        if rank == 0 {
            println!("{slowest}");
        }
    }
    // SAFETY: the last call.
    unsafe { (mpi.finalize)() };
}

impl Mpi {
    fn sum(&self, data: &mut [f32]) {
        let (at, count) = (data.as_mut_ptr().cast(), data.len() as c_int);
        // SAFETY: so many numbers, which are this call's; all ranks call it.
        let code = unsafe { (self.all_reduce)(self.in_place, at, count, self.float, self.sum, self.world) };
        assert_eq!(code, 0, "MPI_Allreduce");
    }

    fn max(&self, mut x: f64) -> f64 {
        let at = (&raw mut x).cast();
        // SAFETY: as above.
        let code = unsafe { (self.all_reduce)(self.in_place, at, 1, self.double, self.max, self.world) };
        assert_eq!(code, 0, "MPI_Allreduce");
        x
    }

    /// The order of rank 0. Who waits for it sleeps: the cores are for the other sides.
    fn broadcast(&self, mut order: Order) -> Order {
        let (mut request, mut status, mut done) = (0, [0u64; 16], 0);
        let at = (&raw mut order).cast();
        // SAFETY: 16 bytes, which stay until the request is done; all ranks call it.
        let code =
            unsafe { (self.begin_broadcast)(at, size_of::<Order>() as c_int, self.byte, 0, self.world, &mut request) };
        assert_eq!(code, 0, "MPI_Ibcast");
        loop {
            // SAFETY: a live request; room for an integer and for any library's status.
            let code = unsafe { (self.test)(&mut request, &mut done, status.as_mut_ptr().cast()) };
            assert_eq!(code, 0, "MPI_Test");
            if done != 0 {
                return order;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}
