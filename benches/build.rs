//! Measures how long it takes to build a pool, compared with creating the contexts alone, in parallel.
//!
//! Contexts belong to a process, so each sample is a new copy of this program. It times itself from before the first
//! driver call: either a whole pool (contexts, threads, streams, the crate's modules, the probe of every ordered pair),
//! or N threads that call `cuDevicePrimaryCtxRetain`. Target: at most 1.3 times the contexts.
//!
//! * `gpu/<devices>`: as users have it; the crate contains cubins, so nothing is compiled on the GPUs that they fit
//! * `gpu/<devices>/cold_cache`: with an empty cache of compiled PTX (`CUDA_CACHE_PATH`)
//! * `gpu/<devices>/ptx_cold`, `.../ptx_warm`: all kernels compiled from PTX (`CUDA_FORCE_PTX_JIT`), and then from the
//!   driver's cache
//! * `software/<devices>`: software GPUs, in this process

mod support;

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use cudarc::driver::{result, sys};
use support::{Bench, MILLISECONDS, Side, gpus};

fn check(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// Creates the contexts of the first `devices` GPUs, in parallel.
fn contexts(devices: usize) {
    result::init().expect("there is a driver");
    thread::scope(|scope| {
        for i in 0..devices {
            scope.spawn(move || {
                let (mut device, mut context) = (0, ptr::null_mut());
                // SAFETY: the driver is initialised; the pointers are to live values.
                unsafe {
                    check(sys::cuDeviceGet(&mut device, i as i32));
                    check(sys::cuDevicePrimaryCtxRetain(&mut context, device));
                    check(sys::cuCtxSetCurrent(context));
                }
                assert!(!context.is_null());
            });
        }
    });
}

/// Milliseconds until a pool of software GPUs, or of GPUs, is usable.
fn pool(software: bool, devices: usize) -> f64 {
    let clock = Instant::now();
    let pool = gpus::pool(software, devices);
    let millis = clock.elapsed().as_secs_f64() * 1e3;
    assert_eq!(pool.device_count(), devices);
    assert!(pool.run(|dev, _| Ok(dev.index())).is_ok_and(|indices| indices.into_iter().eq(0..devices)));
    millis
}

/// In the child process: prints milliseconds.
fn child(what: &str, devices: usize) {
    let millis = match what {
        "pool" => pool(false, devices),
        _ => {
            let clock = Instant::now();
            contexts(devices);
            clock.elapsed().as_secs_f64() * 1e3
        }
    };
    println!("{millis}");
}

/// Runs a child process with these environment variables, and returns its milliseconds.
fn spawn(what: &str, devices: usize, variables: &[(&str, &Path)]) -> f64 {
    let output = Command::new(env::current_exe().expect("this program has a path"))
        .args(["--child", what, &devices.to_string()])
        .envs(variables.iter().copied())
        .output()
        .expect("this program runs");
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number of milliseconds")
}

/// An empty folder for compiled PTX.
fn fresh() -> PathBuf {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let name = format!("gpu-pool-bench-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
    let path = env::temp_dir().join(name);
    fs::create_dir_all(&path).expect("the temporary folder can be written");
    path
}

fn main() {
    let arguments: Vec<String> = env::args().collect();
    if let [_, flag, what, devices] = &arguments[..]
        && flag == "--child"
    {
        return child(what, devices.parse().expect("a number"));
    }
    let mut bench = Bench::new("build");
    bench.set_turns(1, bench.size(15, 3));
    for devices in [1, 8, 64] {
        bench.compare(
            &format!("software/{devices}"),
            MILLISECONDS,
            Side::new("gpu-pool", || pool(true, devices)),
            vec![],
        );
    }

    // One GPU, and all of them: eight contexts take seconds, so there is no time for more cases.
    let most = gpus::count();
    let on = Path::new("1");
    let counts = [1, most.min(8)].into_iter().filter(|&n| n > 0 && n <= most);
    for devices in counts.collect::<BTreeSet<_>>() {
        let contexts = || Side::new("contexts", || spawn("contexts", devices, &[]));
        bench.set_turns(1, bench.size(if devices < 8 { 5 } else { 4 }, 1));
        let ours = Side::new("gpu-pool", || spawn("pool", devices, &[]));
        bench.compare(&format!("gpu/{devices}"), MILLISECONDS, ours, vec![contexts()]);
        // No warm-up: each cold build has a cache of its own, and the warm builds share one that is filled first.
        bench.set_turns(0, bench.size(2, 1));
        let mut folders = Vec::new();
        let mut cold = |variables: &[(&str, &Path)]| {
            folders.push(fresh());
            let folder = folders.last().expect("just pushed").as_path();
            spawn("pool", devices, &[variables, &[("CUDA_CACHE_PATH", folder)]].concat())
        };
        bench.compare(
            &format!("gpu/{devices}/cold_cache"),
            MILLISECONDS,
            Side::new("gpu-pool", || cold(&[])),
            vec![contexts()],
        );
        let forced = ("CUDA_FORCE_PTX_JIT", on);
        let ours = Side::new("gpu-pool", || cold(&[forced]));
        bench.compare(&format!("gpu/{devices}/ptx_cold"), MILLISECONDS, ours, vec![contexts()]);
        // If the cold build was filtered out, its folder is empty; then the first warm build fills it.
        let full = folders.last().cloned().unwrap_or_else(fresh);
        let ours = Side::new("gpu-pool", || spawn("pool", devices, &[forced, ("CUDA_CACHE_PATH", &full)]));
        bench.compare(&format!("gpu/{devices}/ptx_warm"), MILLISECONDS, ours, vec![contexts()]);
        for folder in folders {
            let _ = fs::remove_dir_all(folder);
        }
    }
    bench.finish();
}
