//! What a machine with several devices is not: one device, or one that tells the truth.

use super::exhibit::{Caught, Exhibit, OnCuda, Outcome, Refusal, Seen, Thread};
use super::ground::Ground;
use crate::program;
use gpu_pool::{
    Route,
    driver::check::Kind,
    testing::{FaultOp, FaultPlan, FaultRule, Injected},
};
use std::sync::Arc;

const SOURCE: &str = include_str!("machine.rs");
/// Numbers in a buffer.
const N: usize = 1 << 14;

pub const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        name: "wrong-device",
        title: "A kernel is given another device's memory",
        mistake: "The buffer was made on device 0, and the kernel is launched on device 1. Depending on the machine that is an \
                  illegal address, which kills the context, or a kernel that runs at the speed of the bus.",
        thread: Thread {
            label: "NVIDIA/warp#1693: launches do not look where their arrays are",
            url: "https://github.com/NVIDIA/warp/issues/1693",
        },
        wrong: Some(program!(wrong_device_wrong)),
        right: program!(wrong_device_right),
        mended: "A copy on the device that computes. (Or `peer()` in the launch, which says so at the call.)",
        expected: Caught::Error(Refusal::WrongDevice),
        cuda: OnCuda::Runs,
    },
    Exhibit {
        name: "no-peer-rights",
        title: "A peer copy without the right to it",
        mistake: "Peer access is directed, and off until somebody asks for it: for each pair of devices, and with some \
                  allocators for each allocation. Who forgets gets an error at best, and a hang at worst.",
        thread: Thread {
            label: "openxla/xla#40852: mapped memory without access for the peers: a hang of 56 minutes on 8 x B200",
            url: "https://github.com/openxla/xla/pull/40852",
        },
        wrong: Some(program!(no_peer_rights_wrong)),
        right: program!(no_peer_rights_right),
        mended: "A pool tries each pair when it is built; where the direct way is closed, copies go through the host.",
        expected: Caught::Error(Refusal::PeerDenied),
        cuda: OnCuda::Runs,
    },
    Exhibit {
        name: "lying-peer",
        title: "Peer access that reports success and copies nothing",
        mistake: "The driver says that the devices are peers, every call succeeds, and the data does not arrive: an IOMMU is in \
                  the way. A program that believes it trains on garbage. (The fault is injected.)",
        thread: Thread {
            label: "NVIDIA/open-gpu-kernel-modules#1257: silent corruption in copies between two RTX 6000 Ada",
            url: "https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257",
        },
        wrong: Some(program!(lying_peer_wrong, "fn lie(")),
        right: program!(lying_peer_right),
        mended: "A pool believes a pair only after a probe of both directions, else it goes through the host, and its report \
                 says so.",
        expected: Caught::Healed,
        cuda: OnCuda::Runs,
    },
    Exhibit {
        name: "wrong-declaration",
        title: "A kernel writes what it declares as read",
        mistake: "`y` is declared as an input, and the kernel adds to it. Whoever orders work by declarations, lets others read \
                  `y` at the same time.",
        thread: Thread {
            label: "cupy/cupy#1554: kernels that change their `in_params` should not compile",
            url: "https://github.com/cupy/cupy/pull/1554",
        },
        wrong: Some(program!(wrong_declaration_wrong)),
        right: program!(wrong_declaration_right),
        mended: "The signature in `kernel!` is the declaration: `&mut [f32]`, and the Rust twin could not write to `&[f32]`.",
        expected: Caught::Report(Kind::WrongDeclaration),
        cuda: OnCuda::Unseen,
    },
    Exhibit {
        name: "device-on-another-thread",
        title: "A device is used on a thread that has another one",
        mistake: "The current device belongs to the thread. Work that is handed to a helper thread runs on device 0, or on \
                  none at all.",
        thread: Thread {
            label: "cupy/cupy#72: a pool used on a second thread: CUDA_ERROR_INVALID_CONTEXT",
            url: "https://github.com/cupy/cupy/issues/72",
        },
        wrong: None,
        right: program!(device_on_another_thread_right),
        mended: "`&Device` is a token of the device's own thread; helpers get data and give data back.",
        expected: Caught::DoesNotCompile {
            file: "tests/compile_fail/device_is_shared_with_a_thread.rs",
            code: "E0277",
        },
        cuda: OnCuda::Runs,
    },
];

fn wrong_device_wrong(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let all = dev.exchange(Arc::new(dev.upload(&[1.0f32; N])?))?;
        let mut y = dev.zeros::<f32>(N)?;
        dev.axpy(1.0, &*all[0], &mut y)?; // on device 1, too
        dev.download(&y)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}

fn wrong_device_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let all = dev.exchange(Arc::new(dev.upload(&[1.0f32; N])?))?;
        let mut y = dev.zeros::<f32>(N)?;
        dev.axpy(1.0, &all[0].copy_to(dev)?, &mut y)?;
        dev.download(&y)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}

fn no_peer_rights_wrong(ground: &Ground) -> Outcome {
    let [a, b] = ground.bare()?;
    b.disable_peer(&a)?; // somebody else may have had it
    let (s, t) = (a.stream()?, b.stream()?);
    let (x, y) = (a.alloc(N)?, b.alloc(N)?);
    a.fill(x, 1.0, s)?;
    a.sync(s)?;
    b.copy_from_peer(y, &a, x, t)?;
    Ok(Seen::all(&b.download(y, t)?, 1.0))
}

fn no_peer_rights_right(ground: &Ground) -> Outcome {
    let pool = ground.builder(2).without_peer_access().build()?;
    let seen = pool.run(|dev, _| {
        let all = dev.exchange(Arc::new(dev.upload(&[1.0f32; N])?))?;
        dev.download(&all[(dev.rank() + 1) % all.len()].copy_to(dev)?)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}

/// Copies from device 0 to device 1 are lost on the way.
fn lie() -> FaultPlan {
    FaultPlan::new().on(FaultRule::new(Injected::Drop).device(1).peer(0).op(FaultOp::CopyPeer))
}

fn lying_peer_wrong(ground: &Ground) -> Outcome {
    let [a, b] = ground.bare_with(&lie())?;
    assert!(b.can_access_peer(&a)?, "so it says");
    b.enable_peer(&a)?;
    let (s, t) = (a.stream()?, b.stream()?);
    let (x, y) = (a.alloc(N)?, b.alloc(N)?);
    a.fill(x, 1.0, s)?;
    a.sync(s)?;
    b.fill(y, 0.0, t)?;
    b.copy_from_peer(y, &a, x, t)?; // success
    Ok(Seen::all(&b.download(y, t)?, 1.0))
}

fn lying_peer_right(ground: &Ground) -> Outcome {
    let pool = ground.builder(2).faults(lie()).build()?;
    let seen = pool.run(|dev, _| {
        let all = dev.exchange(Arc::new(dev.upload(&[1.0f32; N])?))?;
        dev.download(&all[(dev.rank() + 1) % all.len()].copy_to(dev)?)
    })?;
    let report = pool.report();
    let pair = report.peer(1, 0);
    let found = pair.claimed && !pair.verified && pair.route == Route::Staged;
    Ok(Seen::when(found && Seen::all(&seen.concat(), 1.0) == Seen::Right))
}

fn wrong_declaration_wrong(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (stream, x, y) = (gpu.stream()?, gpu.alloc(N)?, gpu.alloc(N)?);
    gpu.fill(x, 1.0, stream)?;
    gpu.fill(y, 0.0, stream)?;
    gpu.axpy_declared_as_reading(1.0, x, y, stream)?;
    Ok(Seen::all(&gpu.download(y, stream)?, 1.0))
}

fn wrong_declaration_right(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (stream, x, y) = (gpu.stream()?, gpu.alloc(N)?, gpu.alloc(N)?);
    gpu.fill(x, 1.0, stream)?;
    gpu.fill(y, 0.0, stream)?;
    gpu.axpy(1.0, x, y, stream)?;
    Ok(Seen::all(&gpu.download(y, stream)?, 1.0))
}

fn device_on_another_thread_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let batch = std::thread::spawn(|| vec![1.0f32; N]).join().expect("it does not panic");
        dev.download(&dev.upload(&batch)?)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}
