//! Where software GPUs run brief operations, and that these keep their place among the others.

use gpu_pool::extend::driver::{
    Address, DriverRef, HostArg, HostKernel, KernelArg, Launch, LaunchDims, ModuleImage, RawStream,
    host::{self, HostConfig},
};
use parking_lot::{Condvar, Mutex};
use std::{
    sync::mpsc,
    thread::{self, ThreadId},
    time::Duration,
};

const LIMIT: Duration = Duration::from_secs(60);
const BYTES: usize = 1024;

fn gpu() -> DriverRef {
    host::machine(&[HostConfig::default()]).remove(0)
}

fn filled(gpu: &DriverRef, stream: RawStream, value: u8) -> Address {
    let at = gpu.mem_alloc(BYTES).unwrap();
    // SAFETY: the memory was just allocated, and lives as long as the machine.
    unsafe { gpu.fill_u8(at, value, BYTES, stream) }.unwrap();
    at
}

fn first_byte(gpu: &DriverRef, stream: RawStream, at: Address) -> u8 {
    let to = gpu.host_alloc(1).unwrap();
    // SAFETY: both live, and nobody writes them meanwhile.
    unsafe {
        gpu.copy_to_host(to, at, 1, stream).unwrap();
        assert!(gpu.stream_wait_idle(stream, LIMIT).unwrap());
        *to
    }
}

fn launch(gpu: &DriverRef, stream: RawStream, own: bool, kernel: HostKernel, args: &[KernelArg]) {
    let image = ModuleImage { ptx: None, cubins: &[], packed: false, source: None, shared: own };
    let function = gpu.function(gpu.module_load(&image).unwrap(), "kernel").unwrap();
    let dims = LaunchDims::cover(1);
    let launch = Launch { name: "kernel", function, host: Some(kernel), dims, args, early: false };
    // SAFETY: these kernels take any arguments.
    unsafe { gpu.launch(&launch, stream) }.unwrap();
}

#[test]
fn a_small_operation_is_over_when_the_call_returns() {
    let gpu = gpu();
    let stream = gpu.stream_create(0).unwrap();
    let (a, b) = (filled(&gpu, stream, 1), filled(&gpu, stream, 2));
    // SAFETY: both live.
    unsafe { gpu.copy_within(b, a, BYTES, stream) }.unwrap();
    assert!(gpu.stream_query(stream).unwrap());
    assert_eq!(first_byte(&gpu, stream, b), 1);
}

#[test]
fn it_waits_for_what_is_in_front_of_it() {
    let gpu = gpu();
    let stream = gpu.stream_create(0).unwrap();
    let (a, b) = (filled(&gpu, stream, 1), filled(&gpu, stream, 2));
    let (open, gate) = mpsc::channel::<()>();
    gpu.launch_host(stream, Box::new(move || gate.recv().unwrap_or(()))).unwrap();
    // SAFETY: both live.
    unsafe { gpu.copy_within(b, a, BYTES, stream) }.unwrap();
    assert!(!gpu.stream_query(stream).unwrap());
    open.send(()).unwrap();
    assert_eq!(first_byte(&gpu, stream, b), 1);
}

static RAN: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());

/// # Safety
/// None needed.
unsafe fn notes(_: LaunchDims, _: &[HostArg]) {
    RAN.lock().push(thread::current().id());
}

/// A user's kernel may block, or take long.
#[test]
fn kernels_of_others_never_run_on_the_submitting_thread() {
    let gpu = gpu();
    let stream = gpu.stream_create(0).unwrap();
    for own in [true, false] {
        launch(&gpu, stream, own, notes, &[]);
        assert!(gpu.stream_wait_idle(stream, LIMIT).unwrap());
        assert_eq!(RAN.lock().pop() == Some(thread::current().id()), own);
    }
}

/// Whether the kernel has begun, and whether it may end.
static OPEN: (Mutex<[bool; 2]>, Condvar) = (Mutex::new([false; 2]), Condvar::new());

/// # Safety
/// None needed.
unsafe fn blocks(_: LaunchDims, _: &[HostArg]) {
    let mut open = OPEN.0.lock();
    open[0] = true;
    while !open[1] {
        OPEN.1.wait(&mut open);
    }
}

/// Two streams, one memory: the copy does not run beside the kernel, and its call does not wait.
#[test]
fn it_waits_for_operations_that_use_its_memory() {
    let gpu = gpu();
    let [one, two] = [0; 2].map(|priority| gpu.stream_create(priority).unwrap());
    let (a, b) = (filled(&gpu, one, 1), filled(&gpu, one, 2));
    assert!(gpu.stream_wait_idle(one, LIMIT).unwrap());
    launch(&gpu, one, false, blocks, &[KernelArg::Slice { address: b, bytes: BYTES, write: true }]);
    // The kernel is running: a later operation of its stream is not what holds the copy back.
    while !OPEN.0.lock()[0] {
        thread::yield_now();
    }
    // SAFETY: both live.
    unsafe { gpu.copy_within(b, a, BYTES, two) }.unwrap();
    assert!(!gpu.stream_query(two).unwrap());
    OPEN.0.lock()[1] = true;
    OPEN.1.notify_all();
    assert_eq!(first_byte(&gpu, two, b), 1);
}
