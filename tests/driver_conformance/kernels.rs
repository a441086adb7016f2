//! Modules, launches, products.

use crate::rig::*;
use gpu_pool::extend::driver::{FaultKind, ModuleImage};

pub fn launch_with_slices_and_values(rig: &Rig) {
    for device in &rig.devices {
        let (s, by) = (stream(device), adder(device));
        for n in [1, 255, 256, 257, 100_000] {
            let x = mem(device, 4 * (n + 1));
            s.fill(&x, 40);
            by.add(&s, x.raw, n, 2);
            s.wait();
            let x = read_words(&x);
            assert!(x[..n].iter().all(|&x| x == 42) && x[n] == 40);
        }
    }
}

pub fn launches_follow_their_stream(rig: &Rig) {
    let device = rig.one();
    let (s, x, by) = (stream(device), mem(device, 4096), adder(device));
    s.fill(&x, 0);
    for _ in 0..200 {
        by.add(&s, x.raw, 1024, 1);
        by.add(&s, x.raw, 512, 1);
    }
    s.wait();
    assert_eq!(read_words(&x), [[400; 512], [200; 512]].concat());
}

/// The compiler's complaint comes back as a fault, and the device goes on. Software GPUs do not read device code.
pub fn garbage_modules_harm_nothing(rig: &Rig) {
    let device = rig.one();
    for ptx in ["this is no PTX", ""] {
        let loaded = device.module_load(&ModuleImage {
            ptx: Some(ptx.as_bytes()),
            cubins: &[],
            packed: false,
            source: None,
            shared: false,
        });
        if rig.cuda {
            assert_ne!(loaded.unwrap_err().kind, FaultKind::DeviceLost);
        }
    }
    launch_with_slices_and_values(rig);
}

/// Software GPUs answer for any name.
pub fn missing_functions_are_reported(rig: &Rig) {
    let by = adder(rig.one());
    let found = rig.one().function(by.module.raw, "no_such_kernel");
    assert_eq!(found.map(drop).map_err(|fault| fault.kind), if rig.cuda { Err(FaultKind::NotFound) } else { Ok(()) });
}

#[cfg(feature = "blas")]
pub fn gemm_matches_the_naive_product(rig: &Rig) {
    use gpu_pool::extend::driver::{Gemm, GemmMatrix, GemmType};
    let device = rig.one();
    let s = stream(device);
    let floats =
        |n: usize, seed: u8| -> Vec<f32> { pattern(n, seed).iter().map(|&b| f32::from(b % 17) - 8.0).collect() };
    let upload = |data: &[f32]| {
        let x = mem(device, 4 * data.len());
        write(&x, &data.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<_>>());
        x
    };
    for (m, n, k) in [(1, 1, 1), (3, 5, 7), (64, 10, 33), (40, 70, 128)] {
        for (transpose_a, transpose_b) in [(false, false), (true, false), (false, true), (true, true)] {
            for (alpha, beta) in [(1.0, 0.0), (0.5, 1.0), (-2.0, 3.0), (0.0, 2.0)] {
                let (a, b) = (floats(m * k, 1), floats(k * n, 2));
                // With beta == 0 the old C must not be read: NaN would show.
                let c = if beta == 0.0 { vec![f32::NAN; m * n] } else { floats(m * n, 3) };
                let (da, db, dc) = (upload(&a), upload(&b), upload(&c));
                let turned = |address, rows, cols, transposed| GemmMatrix {
                    transposed,
                    ..GemmMatrix::dense(address, if transposed { rows } else { cols })
                };
                let (x, y) = (turned(da.raw, m, k, transpose_a), turned(db.raw, k, n, transpose_b));
                let (factor, of) = (alpha.into(), GemmType::F32);
                let z = GemmMatrix::dense(dc.raw, n);
                let gemm = Gemm { of, count: 1, m, n, k, alpha: factor, a: x, b: y, beta: f64::from(beta), c: z };
                // SAFETY: the matrices are live and as large as they should be.
                unsafe { device.gemm(&gemm, s.raw) }.unwrap();
                s.wait();
                let got =
                    read(&dc).chunks_exact(4).map(|v| f32::from_ne_bytes(v.try_into().unwrap())).collect::<Vec<_>>();
                for row in 0..m {
                    for column in 0..n {
                        let product: f32 = (0..k)
                            .map(|i| {
                                let x = if transpose_a { a[i * m + row] } else { a[row * k + i] };
                                x * if transpose_b { b[column * k + i] } else { b[i * n + column] }
                            })
                            .sum();
                        let old = if beta == 0.0 { 0.0 } else { beta * c[row * n + column] };
                        let want = alpha * product + old;
                        let have = got[row * n + column];
                        assert!((want - have).abs() <= 1e-2, "{gemm:?} at {row}, {column}: {have}, not {want}");
                    }
                }
            }
        }
    }
}
