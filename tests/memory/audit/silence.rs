//! Who does no wrong hears nothing, whatever fails meanwhile, and in whatever order operations run.

use super::rig::MODULE;
use crate::{
    on_both,
    support::{self, Gpus},
};
use gpu_pool::{
    Device, Error, GpuPool, Kernel, LaunchDims, ReduceOp, Result, extend::driver::host::ExecutionOrder,
    memory::BackingChoice,
};
use gpu_pool_lab::{Check, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::{sync::Arc, task::Poll};

on_both! {
    // A program that does no wrong: steps of a training on several streams, with whatever sizes, hears nothing, and
    // computes what it computes without an audit.
    2: fn right_programs_hear_nothing(gpus) {
        let expected = training(&gpus.builder(2).module(&MODULE).check(Check::Off).build().unwrap());
        for choice in [BackingChoice::Auto, BackingChoice::Malloc] {
            let builder = gpus.builder(2).module(&MODULE).check(Check::Memory).memory_backing(choice);
            let pool = builder.build().unwrap();
            assert_eq!(training(&pool), expected);
            pool.close().unwrap();
            let staged = gpus.builder(2).module(&MODULE).check(Check::Memory).without_peer_access().build().unwrap();
            assert_eq!(training(&staged), expected);
            staged.close().unwrap();
        }
    }
}

/// Uploads, kernels on two streams, sums over all devices, buffers that live on: the sums of all parameters.
fn training(pool: &GpuPool) -> Vec<Vec<f32>> {
    let state = pool.per_device(|dev, _| dev.upload(&vec![0.5f32; 10_007])).unwrap();
    let mut staging = pool.pinned::<f32>(10_007).unwrap();
    for step in 0..6 {
        staging.as_mut_slice().unwrap().fill(step as f32);
        let staging = &staging;
        let sums = pool.run(|dev, shard| {
            let weights = &mut *state.borrow_mut(dev)?;
            let side = dev.stream()?;
            let mut gradient = dev.upload_pinned(staging)?;
            let batch = dev.on(&side).upload(&vec![shard.index() as f32; 10_007])?;
            dev.on(&side).axpy(1.0, &batch, &mut gradient)?;
            let kept: Vec<_> = (0..5).map(|i| dev.zeros::<u8>(1000 * (i + 1) + step)).collect::<Result<_>>()?;
            dev.all_reduce(&mut gradient, ReduceOp::Sum)?;
            drop(kept);
            dev.axpy(-0.125, &gradient, weights)?;
            let sum = dev.sum(weights)?;
            let theirs = dev.exchange(Arc::new(sum))?;
            let mut all = dev.zeros::<f32>(1)?;
            for their in &theirs {
                let here = their.copy_to(dev)?;
                dev.axpy(1.0, &here, &mut all)?;
            }
            dev.download(&all)
        });
        sums.unwrap();
    }
    pool.run(|dev, _| dev.download(&dev.sum(&*state.borrow(dev)?)?)).unwrap()
}

/// Whatever call of the audit fails, or of the program: memory comes back, nothing hangs, and no buffer is blamed that
/// was treated well.
#[test]
fn faults_cost_a_look_and_nothing_else() {
    support::guarded(|| {
        for op in [FaultOp::Fill, FaultOp::CopyDown, FaultOp::HostAlloc, FaultOp::EventWait, FaultOp::Record] {
            for nth in (1..30).step_by(support::cases(4, 1)) {
                let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(op).nth(nth)).paused();
                let builder = support::builder().host(2).check(Check::Memory).faults(plan.clone());
                let pool = builder.timeout(support::TIMEOUT / 2).build().unwrap();
                plan.resume();
                for _ in 0..3 {
                    match pool.run(|dev, _| program(dev)) {
                        Ok(_) | Err(Error::Driver { code: 999, .. }) => {}
                        Err(other) => panic!("{op:?} {nth}: {other}"),
                    }
                }
                plan.pause();
                pool.run(|dev, _| program(dev)).unwrap();
                // What a collective has used, of this device and of its peer, may be held until there have been others.
                let tiny = |dev: &Device| dev.all_reduce(&mut dev.zeros::<f32>(2)?, ReduceOp::Sum);
                pool.run(|dev, _| (0..4).try_for_each(|_| tiny(dev))).unwrap();
                let stats = pool.run(|dev, _| Ok(dev.stats())).unwrap();
                assert!(stats.iter().all(|stats| stats.requested < 100), "{op:?} {nth}: memory is lost: {stats:?}");
                pool.close().unwrap();
            }
        }
    });
}

fn program(dev: &Device) -> Result<()> {
    let side = dev.stream()?;
    let x = dev.upload(&[1.0f32; 1000])?;
    let mut y = dev.on(&side).zeros::<f32>(1000)?;
    dev.on(&side).axpy(2.0, &x, &mut y)?;
    let z = dev.zeros::<u8>(300_000)?;
    drop((x, z));
    dev.all_reduce(&mut y, ReduceOp::Sum)?;
    dev.download(&y).map(drop)
}

/// One operation at a time: the same steps for the same seed, and no false alarm in any order.
#[test]
fn steps_with_an_audit_are_deterministic() {
    support::guarded(|| {
        for seed in 0..5 {
            let run = || {
                let pool = support::builder()
                    .host(2)
                    .check(Check::Memory)
                    .schedule(ExecutionOrder::Seeded(seed))
                    .build()
                    .unwrap();
                for _ in 0..3 {
                    pool.run(|dev, _| program(dev)).unwrap();
                }
                let trace = pool.trace().unwrap().to_string();
                pool.close().unwrap();
                trace
            };
            let first = run();
            assert!(first == run(), "seed {seed}: other steps");
        }
    });
}

static OPEN: AtomicBool = AtomicBool::new(false);
static UNTIL_OPEN: Kernel<(&mut [u32], u64, u32, u32)> = Kernel::resumable(&support::MODULE, "slow_add", until_open);

fn until_open(_: LaunchDims, _: &mut [u32], _: u64, _: u32, _: u32) -> Poll<()> {
    if OPEN.load(Acquire) { Poll::Ready(()) } else { Poll::Pending }
}

/// A zone was laid long ago by a stream that is busy now; who reads the buffer elsewhere does not wait for that stream.
#[test]
fn readers_do_not_wait_for_the_zone() {
    support::guarded(|| {
        let pool = Gpus::software().builder(1).check(Check::Memory).build().unwrap();
        pool.run(|dev, _| {
            let (writer, reader) = (dev.stream()?, dev.stream()?);
            let (mut x, mut busy) = (dev.zeros::<u8>(100)?, dev.zeros::<u32>(1)?);
            dev.on(&writer).fill(&mut x, 7)?;
            // SAFETY: the kernel fits its signature and touches nothing.
            unsafe { dev.launch(&UNTIL_OPEN, LaunchDims::cover(1), (&mut busy, 0u64, 0u32, 0u32))? };
            // Else this is a deadlock, and reported as one.
            let seen = dev.on(&reader).download(&x);
            OPEN.store(true, Release);
            assert_eq!(seen?, [7; 100]);
            Ok(())
        })
        .unwrap();
        pool.close().unwrap();
    });
}
