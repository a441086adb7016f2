//! Exhibits: wrong beliefs about a machine with several devices.

use super::prelude::*;
use gpu_pool::collective::Route;
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, check::Kind, prelude::*};
use std::sync::Arc;

/// Numbers in a buffer.
const N: usize = 1 << 14;

exhibits! { "machine.rs"

"wrong-device": "A kernel is given another device's memory" {
    "The buffer was made on device 0, and the kernel is launched on device 1. Depending on the machine that is an \
     illegal address, which kills the context, or a kernel that runs at the speed of the bus."
    seen "NVIDIA/warp" issues 1693: "launches do not look where their arrays are"
    wrong wrong_device_wrong => Caught::Error(Refusal::WrongDevice), Runs
    right wrong_device_right =>
        "A copy on the device that computes. (Or `peer()` in the launch, which says so at the call.)"
}

"no-peer-rights": "A peer copy without the right to it" {
    "Peer access is directed, and off until somebody asks for it: for each pair of devices, and with some \
     allocators for each allocation. Who forgets gets an error at best, and a hang at worst."
    seen "openxla/xla" pull 40852: "mapped memory without access for the peers: a hang of 56 minutes on 8 x B200"
    wrong no_peer_rights_wrong => Caught::Error(Refusal::PeerDenied), Runs
    right no_peer_rights_right =>
        "A pool tries each pair when it is built; where the direct way is closed, copies go through the host."
}

"lying-peer": "Peer access that reports success and copies nothing" {
    "The driver says that the devices are peers, every call succeeds, and the data does not arrive: an IOMMU is in \
     the way. A program that believes it trains on garbage. (The fault is injected.)"
    seen "NVIDIA/open-gpu-kernel-modules" issues 1257: "silent corruption in copies between two RTX 6000 Ada"
    wrong lying_peer_wrong, "fn lie(" => Caught::Healed, Runs
    right lying_peer_right =>
        "A pool believes a pair only after a probe of both directions, else it goes through the host, and its \
         report says so."
}

"wrong-declaration": "A kernel writes what it declares as read" {
    "`y` is declared as an input, and the kernel adds to it. Whoever orders work by declarations, lets others read \
     `y` at the same time."
    seen "cupy/cupy" pull 1554: "kernels that change their `in_params` should not compile"
    wrong wrong_declaration_wrong => Caught::Report(Kind::WrongDeclaration), Unseen
    right wrong_declaration_right =>
        "The signature in `kernel!` is the declaration: `&mut [f32]`, and the host kernel could not write to `&[f32]`."
}

"device-on-another-thread": "A device is used on a thread that has another one" {
    "The current device belongs to the thread. Work that is handed to a helper thread runs on device 0, or on none \
     at all."
    seen "cupy/cupy" issues 72: "a pool used on a second thread: CUDA_ERROR_INVALID_CONTEXT"
    wrong =>
        Caught::DoesNotCompile { file: "tests/compile_fail/device_is_shared_with_a_thread.rs", code: "E0277" },
        Runs
    right device_on_another_thread_right =>
        "`&Device` is a token of the device's own thread; helpers get data and give data back."
}

}

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
    b.disable_peer(&a)?; // other code may have had it
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
