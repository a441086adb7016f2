//! Machines without CUDA, in each way to be without it: an error in plain words, never a panic.
//!
//! A stand-in for libcuda, built here, plays the broken ones; the test re-runs itself with that library found first.

use crate::support::{again, printed, task};
use gpu_pool::{Error, extend::driver::cuda};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

#[test]
fn without_a_library_opening_is_an_error() {
    match cuda::device_count() {
        Ok(n) => println!("skipped: there are {n} GPUs here"),
        Err(e) => {
            assert!(matches!(e, Error::NoDevice { .. }), "{e}");
            for e in [cuda::open(0).err(), cuda::open(usize::MAX).err()] {
                assert!(matches!(e, Some(Error::NoDevice { .. })), "{e:?}");
            }
            println!("{e}");
        }
    }
}

/// The subprocess: says what opening came to.
#[test]
fn child() {
    let Some(ordinal) = task() else { return };
    let ordinal = ordinal.parse().unwrap();
    match cuda::open(ordinal) {
        Ok(_) => println!("CHILD opened"),
        Err(e @ Error::NoDevice { .. }) => println!("CHILD {e}"),
        Err(e) => println!("CHILD of another kind: {e}"),
    }
    // Again: a failure is not remembered, and does no harm.
    assert!(cuda::open(ordinal).is_err());
}

/// A driver that answers as its environment says, with every symbol that the crate demands, or with the first two only.
fn stand_in(complete: bool) -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libcuda-{complete}"));
    fs::create_dir_all(&dir).unwrap();
    let mut source = String::from(
        r#"
        fn var(name: &str) -> i32 { std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(0) }
        #[unsafe(no_mangle)] pub extern "C" fn cuInit(_: u32) -> i32 { var("STUB_INIT") }
        #[unsafe(no_mangle)] pub unsafe extern "C" fn cuDriverGetVersion(v: *mut i32) -> i32 {
            unsafe { *v = var("STUB_VERSION") };
            0
        }
        "#,
    );
    if complete {
        source.push_str(
            r#"#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetCount(n: *mut i32) -> i32 {
                unsafe { *n = var("STUB_COUNT") };
                0
            }"#,
        );
        let written = ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"];
        let library = include_str!("../../src/driver/cuda/library.rs");
        let list = library.split("const REQUIRED").nth(1).unwrap().split("];").next().unwrap();
        for name in list.split('"').filter(|n| n.starts_with("cu") && !written.contains(n)) {
            // CUDA_ERROR_UNKNOWN
            source.push_str(&format!("#[unsafe(no_mangle)] pub extern \"C\" fn {name}() -> i32 {{ 999 }}\n"));
        }
    }
    let file = dir.join("stand_in.rs");
    fs::write(&file, source).unwrap();
    let built = Command::new(env::var_os("RUSTC").unwrap_or("rustc".into()))
        .args(["--edition=2024", "--crate-type=cdylib", "-Anon_snake_case", "-o"])
        .arg(dir.join("libcuda.so"))
        .arg(&file)
        .status();
    match built {
        Ok(status) => {
            assert!(status.success());
            Some(dir)
        }
        Err(e) => {
            println!("skipped: no rustc here ({e})");
            None
        }
    }
}

fn opening(dir: &Path, ordinal: usize, answers: &[(&str, i32)]) -> String {
    let mut process = again(&["no_cuda::child"], &ordinal.to_string());
    process.env("LD_LIBRARY_PATH", dir).envs(answers.iter().map(|(k, v)| (k, v.to_string())));
    let text = printed(&mut process, 1);
    // The harness may have begun the line.
    let said = text.lines().find_map(|l| l.split_once("CHILD ")).unwrap_or_else(|| panic!("{text}")).1;
    println!("{answers:?}: {said}");
    said.to_owned()
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "the stand-in is found by LD_LIBRARY_PATH")]
fn a_driver_without_devices_is_an_error_in_words() {
    let Some(dir) = stand_in(false) else { return };
    let no_gpu = "no device: the CUDA driver is there but sees no GPU";
    assert!(opening(&dir, 0, &[("STUB_INIT", 100)]).starts_with(no_gpu));
    assert!(opening(&dir, 0, &[("STUB_INIT", 34)]).contains("stub"));
    assert!(opening(&dir, 0, &[("STUB_INIT", 803)]).contains("different driver versions"));
    assert!(opening(&dir, 0, &[("STUB_INIT", 3)]).contains("fork"));
    assert!(opening(&dir, 0, &[("STUB_INIT", 999)]).contains("CUDA_ERROR_UNKNOWN (999)"));
    assert!(opening(&dir, 0, &[("STUB_VERSION", 11080)]).contains("driver >= 535 needed"));
    assert!(opening(&dir, 0, &[("STUB_VERSION", 12020)]).contains("libcuda has no cuDeviceGetCount"));

    let Some(dir) = stand_in(true) else { return };
    assert!(opening(&dir, 0, &[("STUB_VERSION", 12020), ("STUB_COUNT", 0)]).starts_with(no_gpu));
    let absent = opening(&dir, 5, &[("STUB_VERSION", 12020), ("STUB_COUNT", 2)]);
    assert_eq!(absent, "no device: GPU 5 was asked for, but the CUDA driver sees 2 (from 0)");
    let broken = opening(&dir, 1, &[("STUB_VERSION", 12020), ("STUB_COUNT", 2)]);
    assert!(broken.contains("cuDeviceGet returned CUDA_ERROR_UNKNOWN (999)"), "{broken}");
}
