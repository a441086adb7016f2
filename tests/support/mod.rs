//! What the behaviour tests share: each test on software GPUs and on real ones, kernels that take their time, and a
//! guard against hangs.
#![allow(dead_code)]

use gpu_pool::{Builder, Device, DeviceCopy, Error, GpuPool, Module, kernel};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use std::{
    env,
    fmt::Debug,
    process::{Command, Stdio},
    sync::{
        LazyLock, Mutex,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Tells a hang from a slow machine, nothing else. A machine with many other processes is ten times as slow as an idle
/// one, so this is much longer than any test takes.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// Whether `GPU_POOL_LONG=1` asks for all cases of long tests, as CI does for one crate at a time.
pub fn long() -> bool {
    env::var("GPU_POOL_LONG").is_ok_and(|long| long == "1")
}

/// `all` cases of a test with `GPU_POOL_LONG=1`, else a `few`.
pub fn cases<T>(few: T, all: T) -> T {
    if long() { all } else { few }
}

/// The devices that a test runs on.
#[derive(Clone, Copy, Debug)]
pub struct Gpus {
    cuda: bool,
    available: usize,
    /// How many GPUs that is: fewer, where `GPU_POOL_SHARE` says that each is several devices.
    real: usize,
}

impl Gpus {
    /// Software GPUs, for tests that are not [`on_both`].
    pub fn software() -> Self {
        Gpus { cuda: false, available: 64, real: 64 }
    }

    /// How many GPUs the devices are. Device `i` is GPU `i % real()`.
    pub fn real(&self) -> usize {
        self.real
    }

    /// A pool in the making, of the first `count` devices.
    pub fn builder(&self, count: usize) -> Builder {
        let builder = builder().timeout(TIMEOUT / 2).module(&MODULE);
        match self.cuda {
            true => {
                // In the order of `GPU_POOL_SHARE`, which is not looked at any more.
                let ordinals: Vec<_> = (0..count).map(|i| i % self.real).collect();
                builder.cuda().devices(&ordinals).share_gpus(count > self.real)
            }
            false => builder.host(count),
        }
    }

    /// A [`builder`](Self::builder) without the checker on GPUs, unless `GPU_POOL_CHECK` asks for it.
    pub fn unwatched(&self, count: usize) -> Builder {
        let builder = self.builder(count);
        match self.cuda && env::var_os("GPU_POOL_CHECK").is_none() {
            true => builder.check(Check::Off),
            false => builder,
        }
    }

    /// A pool of the first `count` devices.
    pub fn pool(&self, count: usize) -> GpuPool {
        self.builder(count).build().unwrap()
    }

    /// Runs `f` on each of the first `count` devices, which must succeed. Returns their pool.
    #[track_caller]
    pub fn run(&self, count: usize, f: impl Fn(&Device) -> Result<(), Error> + Sync) -> GpuPool {
        succeeds(self.pool(count), f)
    }

    /// As many devices as there are, up to `limit`.
    pub fn up_to(&self, limit: usize) -> usize {
        self.available.min(limit)
    }

    /// A pool whose devices are not peers: what crosses devices is staged through the host.
    pub fn staged(&self, count: usize) -> GpuPool {
        self.builder(count).without_peer_access().build().unwrap()
    }

    pub fn is_cuda(&self) -> bool {
        self.cuda
    }
}

/// Runs `f` on each device of `pool`, which must succeed. Returns the pool.
#[track_caller]
pub fn succeeds(pool: GpuPool, f: impl Fn(&Device) -> Result<(), Error> + Sync) -> GpuPool {
    pool.run(|dev, _| f(dev)).unwrap();
    pool
}

/// A pool in the making, with the checker on unless `GPU_POOL_CHECK` says otherwise: every test is one of the checker,
/// too, which must not raise false alarms.
pub fn builder() -> Builder {
    gpu_pool_lab::install();
    let builder = GpuPool::builder();
    if std::env::var_os("GPU_POOL_CHECK").is_some() { builder } else { builder.check(Check::Races) }
}

/// Runs a test on software GPUs.
pub fn on_host(_needed: usize, test: fn(Gpus)) {
    guarded(move || test(Gpus::software()));
}

static CUDA: Mutex<()> = Mutex::new(());

/// Runs a test on CUDA devices, if there are enough.
pub fn on_cuda(needed: usize, test: fn(Gpus)) {
    match cuda_devices() {
        0 => println!("skipped: no CUDA device"),
        real if real * share() < needed => println!("skipped: needs {needed} CUDA devices"),
        real => {
            let available = real * share();
            // One at a time: pools of the same GPU take turns, so a test that makes a device wait would make others
            // late.
            let _turn = CUDA.lock().unwrap_or_else(|poison| poison.into_inner());
            guarded(move || test(Gpus { cuda: true, available, real }));
        }
    }
}

/// `GPU_POOL_SHARE`: how many devices each GPU is to be.
fn share() -> usize {
    let times = std::env::var_os("GPU_POOL_SHARE").filter(|times| !times.is_empty());
    times.map_or(1, |times| times.to_str().and_then(|times| times.parse().ok()).expect("GPU_POOL_SHARE is a number"))
}

/// How many GPUs there are.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> usize {
    gpu_pool::extend::driver::cuda::device_count().unwrap_or(0)
}

#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> usize {
    0
}

/// Instantiates each test for both kinds of devices, as `host::name` and `cuda::name`:
///
/// ```ignore
/// on_both! { 2: fn name(gpus) { gpus.pool(2); } }   // needs two devices
/// ```
#[macro_export]
macro_rules! on_both {
    ($($(#[$m:meta])* $needed:literal: fn $name:ident($gpus:ident) $body:block)+) => {
        mod both {
            #[allow(unused_imports)]
            use super::*;
            $($(#[$m])* pub fn $name($gpus: $crate::support::Gpus) $body)+
        }
        mod host { $(#[test] fn $name() { $crate::support::on_host($needed, super::both::$name) })+ }
        mod cuda { $(#[test] fn $name() { $crate::support::on_cuda($needed, super::both::$name) })+ }
    };
}

/// Runs `f` on a thread of its own and fails if it does not come to an end.
pub fn guarded<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    guarded_for(TIMEOUT, f)
}

/// [`guarded`] with a limit of its own.
pub fn guarded_for<R: Send + 'static>(timeout: Duration, f: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, ended) = channel();
    let name = thread::current().name().unwrap_or("test").to_owned();
    let thread = thread::Builder::new().name(name).spawn(move || {
        let result = f();
        let _ = done.send(());
        result
    });
    match ended.recv_timeout(timeout) {
        Err(RecvTimeoutError::Timeout) => panic!("hung: no end after {timeout:?}"),
        Ok(()) | Err(RecvTimeoutError::Disconnected) => {}
    }
    thread.unwrap().join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits, with yields, until `done`; gives up with an error, so that a device closure can return it.
pub fn until(what: &str, done: impl Fn() -> bool) -> Result<(), Error> {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > TIMEOUT / 4 {
            return Err(Error::custom(format!("waited in vain until {what}")));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The error of a scope that must fail.
#[track_caller]
pub fn failure<R: Debug>(result: Result<R, Error>) -> Error {
    match result {
        Ok(value) => panic!("this should have failed, but gave {value:?}"),
        Err(error) => error,
    }
}

/// Tells a process that a test started what its task is.
const TASK: &str = "GPU_POOL_TEST_TASK";

/// The task of this process, if a test started it with [`again`].
pub fn task() -> Option<String> {
    env::var(TASK).ok()
}

/// A process that runs the named tests of this binary, one at a time. They find `task` by [`task`].
pub fn again(tests: &[&str], task: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(tests).args(["--exact", "--nocapture", "--test-threads=1"]).env(TASK, task);
    command
}

/// Runs one test of this binary in a process of its own, which must succeed and have run it.
#[track_caller]
pub fn in_a_process(test: &str, task: &str) {
    let start = Instant::now();
    let mut process = again(&[test], task).stdout(Stdio::piped()).spawn().unwrap();
    let printed = process.stdout.take().unwrap();
    let printed = thread::spawn(|| std::io::read_to_string(printed));
    let status = loop {
        if let Some(status) = process.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > TIMEOUT {
            let _ = process.kill();
            panic!("{task}: hung");
        }
        thread::sleep(Duration::from_millis(10));
    };
    let printed = printed.join().unwrap().unwrap();
    // Not "1 passed": the test may be about the end of a process.
    assert!(status.success() && printed.contains("running 1 test"), "{task}: {status}: {printed}");
}

/// What a process prints, which must succeed and have run so many tests.
#[track_caller]
pub fn printed(process: &mut Command, tests: usize) -> String {
    let output = process.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let passed = text.contains(&format!("{tests} passed"));
    assert!(output.status.success() && passed, "{process:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Values that tell one another apart at every place.
pub fn ramp(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(seed)).collect()
}

/// Bytes that tell one another apart. Made in rows of 256, since a closure per byte is slow without optimisation.
pub fn bytes(len: usize, seed: u8) -> Vec<u8> {
    static ROWS: LazyLock<Vec<[u8; 256]>> =
        LazyLock::new(|| (0..=255).map(|row| std::array::from_fn(|i| i as u8 ^ row)).collect());
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let row = bytes.len() >> 8;
        let row = (row as u8).wrapping_mul(31) ^ ((row >> 8) as u8).wrapping_mul(7) ^ seed;
        bytes.extend_from_slice(&ROWS[usize::from(row)][..256.min(len - bytes.len())]);
    }
    bytes
}

/// Whether all elements have the bits of `x`. Compares slices: a closure per element is slow without optimisation.
pub fn all_are<T: DeviceCopy>(found: &[T], x: T) -> bool {
    let expected = [x; 1024];
    let bits = bytemuck::cast_slice::<T, u8>;
    found.chunks(expected.len()).all(|found| bits(found) == bits(&expected[..found.len()]))
}

/// A kernel that waits, and then does `$work` in each of `n` threads. `%rd8` is the byte offset of a thread's element.
macro_rules! slow_ptx {
    ($signature:literal, $work:literal) => {
        concat!(
            ".visible .entry ",
            $signature,
            r#"
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd2, [n];
    ld.param.u32 %r2, [micros];
    mov.u64 %rd4, %globaltimer;
    mul.wide.u32 %rd5, %r2, 1000;
    add.u64 %rd5, %rd4, %rd5;
WAIT:
    mov.u64 %rd6, %globaltimer;
    setp.lt.u64 %p1, %rd6, %rd5;
    @%p1 bra WAIT;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    cvt.u64.u32 %rd7, %r6;
    setp.ge.u64 %p2, %rd7, %rd2;
    @%p2 bra END;
    shl.b64 %rd8, %rd7, 2;
"#,
            $work,
            r#"
END:
    ret;
}
"#
        )
    };
}

/// Device code for the kernels below.
pub static MODULE: Module = Module::ptx(concat!(
    "
.version 7.5
.target sm_75
.address_size 64

",
    slow_ptx!(
        "slow_add(.param .u64 x, .param .u64 n, .param .u32 add, .param .u32 micros)",
        "
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [add];
    cvta.to.global.u64 %rd3, %rd1;
    add.u64 %rd9, %rd3, %rd8;
    ld.global.u32 %r7, [%rd9];
    add.u32 %r7, %r7, %r1;
    st.global.u32 [%rd9], %r7;
"
    ),
    slow_ptx!(
        "slow_copy(.param .u64 src, .param .u64 dst, .param .u64 n, .param .u32 micros)",
        "
    ld.param.u64 %rd1, [src];
    ld.param.u64 %rd10, [dst];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd11, %rd10;
    add.u64 %rd9, %rd3, %rd8;
    ld.global.u32 %r7, [%rd9];
    add.u64 %rd9, %rd11, %rd8;
    st.global.u32 [%rd9], %r7;
"
    ),
));

kernel! {
    /// Waits, then adds `add` to `n` elements.
    pub static SLOW_ADD: "slow_add" in MODULE, fn(x: &mut [u32], n: u64, add: u32, micros: u32) |_dims| {
        std::thread::sleep(std::time::Duration::from_micros(micros.into()));
        x[..n as usize].iter_mut().for_each(|x| *x = x.wrapping_add(add));
    }
    /// Waits, then copies `n` elements.
    pub static SLOW_COPY: "slow_copy" in MODULE, fn(src: &[u32], dst: &mut [u32], n: u64, micros: u32) |_dims| {
        std::thread::sleep(std::time::Duration::from_micros(micros.into()));
        dst[..n as usize].copy_from_slice(&src[..n as usize]);
    }
}

/// [`SLOW_ADD`] over all of `x`.
pub fn slow_add<V>(dev: &gpu_pool::Device, x: &mut V, add: u32, micros: u32) -> Result<(), Error>
where
    V: gpu_pool::AsViewMut<Elem = u32>,
{
    let n = x.view().len();
    // SAFETY: the kernel fits its signature and touches the first `n` elements.
    unsafe { dev.launch(&SLOW_ADD, gpu_pool::LaunchDims::cover(n), (x.view_mut(), n as u64, add, micros)) }
}

/// [`SLOW_COPY`] of all of `src`.
pub fn slow_copy<S, D>(dev: &gpu_pool::Device, src: &S, dst: &mut D, micros: u32) -> Result<(), Error>
where
    S: gpu_pool::AsView<Elem = u32>,
    D: gpu_pool::AsViewMut<Elem = u32>,
{
    let n = src.view().len();
    assert_eq!(n, dst.view().len());
    // SAFETY: the kernel fits its signature and touches the first `n` elements of each.
    unsafe { dev.launch(&SLOW_COPY, gpu_pool::LaunchDims::cover(n), (src.view(), dst.view_mut(), n as u64, micros)) }
}
