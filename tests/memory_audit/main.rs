//! `Check::Memory`: who writes past the end of a buffer is found out, who reads a dropped one finds poison, and who does neither
//! hears nothing. What no ordering can catch: a kernel that writes one element too far is in order with everything.
//!
//! Poisoned frees were asked for in pytorch#58385; tools that watch allocations see one live allocation where a pool has many
//! blocks (RMM's README says so of compute-sanitizer).

#[path = "../support/mod.rs"]
mod support;

use gpu_pool::{
    AsViewMut, BackingChoice, Check, Device, DeviceBuffer, Error, GpuPool, LaunchDims, Module, ReduceOp, Result,
    driver::{
        check::{Kind, Report},
        host::Schedule,
    },
    kernel,
    testing::{FaultOp, FaultPlan, FaultRule, Injected},
};
use parking_lot::Mutex;
use std::sync::Arc;
use support::{Gpus, bytes, failure};

/// Kernels that touch one byte, at any distance from their argument.
static MODULE: Module = Module::ptx(
    r#"
.version 7.5
.target sm_75
.address_size 64

.visible .entry poke(.param .u64 x, .param .u64 at, .param .u32 value)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [at];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd3, %rd1;
    add.s64 %rd4, %rd3, %rd2;
    st.global.u8 [%rd4], %r1;
    ret;
}

.visible .entry peek(.param .u64 x, .param .u64 at, .param .u64 to)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [at];
    ld.param.u64 %rd5, [to];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd6, %rd5;
    add.s64 %rd4, %rd3, %rd2;
    ld.global.u8 %r1, [%rd4];
    st.global.u8 [%rd6], %r1;
    ret;
}
"#,
);

/// Past its slice, wherever the pool's memory is: that is the mistake.
fn beside(x: &mut [u8], at: i64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut((x.as_mut_ptr().expose_provenance() as i64 + at) as usize)
}

kernel! {
    static POKE: "poke" in MODULE, fn(x: &mut [u8], at: i64, value: u32) |_| {
        // SAFETY: these tests poke within what the pool has mapped, and nobody else touches that meanwhile.
        unsafe { beside(x, at).write(value as u8) }
    }
    static PEEK: "peek" in MODULE, fn(x: &mut [u8], at: i64, to: &mut [u8]) |_| {
        // SAFETY: as above.
        to[0] = unsafe { beside(x, at).read() }
    }
}

const ONE: LaunchDims = LaunchDims { grid: (1, 1, 1), block: (1, 1, 1), shared_bytes: 0 };

fn poke(dev: &Device, x: &mut impl AsViewMut<Elem = u8>, at: i64, value: u32) -> Result<()> {
    // SAFETY: none, which is what the audit is for; in these tests it stays within the pool's memory.
    unsafe { dev.launch(&POKE, ONE, (x.view_mut(), at, value)) }
}

fn audited(gpus: Gpus, count: usize) -> GpuPool {
    gpus.builder(count).module(&MODULE).check(Check::Memory).build().unwrap()
}

#[track_caller]
fn found<R: std::fmt::Debug>(result: Result<R>) -> Arc<Report> {
    match failure(result) {
        Error::Misuse { report, .. } => {
            assert_eq!(report.kind, Kind::OutOfBounds, "{report}");
            report
        }
        other => panic!("not a report: {other}"),
    }
}

on_both! {
    // Right behind the end, somewhere in the zone, and at the end of it; small blocks, large ones, and an odd size.
    1: fn a_kernel_that_writes_too_far_is_found(gpus) {
        let pool = audited(gpus, 1);
        for len in [1000, 1024, 5 << 10, 100_001, 1 << 20, (1 << 20) + 17] {
            for behind in [0, 100, 255] {
                let line = line!() + 2;
                let result = pool.run(|dev, _| {
                    let mut x = dev.zeros::<u8>(len)?;
                    poke(dev, &mut x, (len + behind) as i64, 7)
                });
                let report = found(result);
                assert_eq!(report.bytes, len + behind..len + behind + 1, "{report}");
                let buffer = report.allocation.as_ref().unwrap();
                let (op, site) = buffer.by.unwrap();
                assert_eq!((buffer.device, buffer.bytes, op, site.line()), (Some(0), len, "zeros", line));
                assert!(buffer.freed.is_some(), "{report}");
                let text = report.to_string();
                assert!(text.starts_with(&format!("write out of bounds: bytes {}..", len + behind)), "{text}");
                assert!(text.contains(&format!("the first {behind} bytes behind its end")), "{text}");
            }
        }
        pool.run(|dev, _| dev.zeros::<u8>(1000).map(drop)).unwrap();
        pool.close().unwrap();
    }

    // The first stream to touch the buffer need not be the one that asked for it.
    1: fn also_on_another_stream(gpus) {
        let pool = audited(gpus, 1);
        for _ in 0..20 {
            let result = pool.run(|dev, _| {
                let side = dev.stream()?;
                let mut x = dev.upload(&[1u8; 3000])?;
                poke(&dev.on(&side), &mut x, 3000, 7)
            });
            assert_eq!(found(result).bytes, 3000..3001);
        }
    }

    // Several bytes: how many, from where to where.
    1: fn a_report_counts_the_bytes(gpus) {
        let pool = audited(gpus, 1);
        let result = pool.run(|dev, _| {
            let mut x = dev.zeros::<u8>(500)?;
            [3, 7, 100].into_iter().try_for_each(|at| poke(dev, &mut x, 500 + at, 7))
        });
        let report = found(result);
        assert_eq!(report.bytes, 503..601);
        assert!(report.missing.starts_with("3 of the bytes behind the buffer"), "{report}");
        assert!(report.missing.contains("the first 3 bytes behind its end, the last 100 bytes behind"), "{report}");
    }

    // It hits the zone of the block before it: both sizes of blocks.
    1: fn a_write_before_the_start_is_found(gpus) {
        for len in [1000, 1 << 20] {
            let pool = audited(gpus, 1);
            let result = pool.run(|dev, _| {
                let mut all: Vec<_> = (0..4).map(|_| dev.zeros::<u8>(len)).collect::<Result<_>>()?;
                all.sort_by_key(DeviceBuffer::address);
                assert!(all[2].address() - all[1].address() < 2 * len as u64, "they do not lie side by side");
                poke(dev, &mut all[2], -1, 7)?;
                Ok(())
            });
            let report = found(result);
            assert!(report.bytes.start >= len && report.allocation.as_ref().unwrap().bytes == len, "{report}");
        }
    }

    // What a dropped buffer held is gone before anybody can read it by mistake.
    1: fn who_reads_freed_memory_finds_poison(gpus) {
        for len in [1000, 1 << 20] {
            let pool = audited(gpus, 1);
            let seen = pool.run(|dev, _| {
                let (gone, mut x) = (dev.upload(&bytes(len, 3))?, dev.zeros::<u8>(1)?);
                let at = gone.address().wrapping_sub(x.address()) as i64;
                drop(gone);
                let offsets = [0, 1, len as i64 / 2, len as i64 - 1];
                offsets.into_iter().map(|offset| {
                    let mut to = dev.zeros::<u8>(1)?;
                    // SAFETY: within the pool's memory; the second argument is no part of what is read.
                    unsafe { dev.launch(&PEEK, ONE, (&mut x, at + offset, &mut to))? };
                    dev.download(&to)
                }).collect::<Result<Vec<_>>>()
            });
            assert_eq!(seen.unwrap(), [vec![[0xCB]; 4]]);
            pool.close().unwrap();
        }
    }

    // Nor does the next owner: what is not written is not zero by luck.
    1: fn memory_that_is_used_again_is_poisoned(gpus) {
        let pool = audited(gpus, 1);
        let seen = pool.run(|dev, _| {
            let first = dev.upload(&bytes(3000, 3))?;
            let at = first.address();
            drop(first);
            // SAFETY: only a kernel looks that declares that it writes: the checker would tell of a read.
            let mut x = unsafe { dev.uninit::<u8>(3000)? };
            let mut to = dev.zeros::<u8>(1)?;
            // SAFETY: as above.
            unsafe { dev.launch(&PEEK, ONE, (&mut x, 17i64, &mut to))? };
            Ok((x.address() == at, dev.download(&to)?))
        });
        assert_eq!(seen.unwrap(), [(true, vec![0xCB])]);
    }

    // Dropped by other threads: of the pool, of its caller. The owner looks when it has taken them in.
    2: fn buffers_that_others_drop_are_looked_at(gpus) {
        let pool = audited(gpus, 2);
        let broken = |dev: &Device| {
            let mut x = dev.zeros::<u8>(777)?;
            poke(dev, &mut x, 777, 1)?;
            Ok(x)
        };
        let kept = pool.run(|dev, _| broken(dev)).unwrap();
        drop(kept);
        let report = found(pool.run(|_, _| Ok(())));
        assert_eq!((report.bytes.clone(), report.allocation.as_ref().unwrap().device.is_some()), (777..778, true));
        // The other device's may have been told of in the same scope, or not; then nothing is left to be told.
        let _ = pool.run(|_, _| Ok(()));
        pool.run(|_, _| Ok(())).unwrap();

        let remote = pool.run(|dev, _| {
            let mine = if dev.rank() == 0 { Some(Arc::new(broken(dev)?)) } else { None };
            let all = dev.exchange(mine.clone())?;
            drop(mine);
            // Device 1 lets go last.
            let all = if dev.rank() == 0 { None } else { Some(all) };
            dev.barrier()?;
            drop(all);
            Ok(dev.stats().remote_frees)
        });
        let report = found(remote.and_then(|_| pool.run(|_, _| Ok(()))));
        assert_eq!((report.bytes.clone(), report.allocation.as_ref().unwrap().device), (777..778, Some(0)));
        assert!(pool.run(|dev, _| Ok(dev.stats().remote_frees)).unwrap()[0] > 0);
    }

    // The damage is done in one scope and told at the end of the one in which the buffer goes.
    1: fn across_scopes(gpus) {
        let pool = audited(gpus, 1);
        let mut kept = pool.run(|dev, _| {
            let mut x = dev.upload(&[1u8; 100])?;
            poke(dev, &mut x, 100, 2)?;
            Ok(x)
        }).unwrap();
        let x = Mutex::new(kept.pop());
        pool.run(|dev, _| dev.fill(x.lock().as_mut().unwrap(), 3u8)).unwrap();
        found(pool.run(|_, _| {
            drop(x.lock().take());
            Ok(())
        }));
        pool.run(|dev, _| dev.upload(&[1u8; 100]).map(drop)).unwrap();
        pool.close().unwrap();
    }

    // What goes with the pool, and what went after the last scope.
    1: fn close_tells_of_the_rest(gpus) {
        let broken = |dev: &Device| {
            let mut x = dev.upload(&[1u8; 5000])?;
            poke(dev, &mut x, 5000, 2)?;
            Ok(x)
        };
        let pool = audited(gpus, 1);
        let kept = pool.run(|dev, _| broken(dev)).unwrap();
        drop(kept);
        let error = failure(pool.close());
        assert!(error.to_string().starts_with("device 0: the checker has found a mistake at close\n"), "{error}");
        assert_eq!(found::<()>(Err(error)).bytes, 5000..5001);

        let pool = audited(gpus, 1);
        let state = pool.per_device(|dev, _| broken(dev)).unwrap();
        let report = found(pool.close());
        assert_eq!(report.allocation.as_ref().unwrap().bytes, 5000);
        drop(state);
    }

    // More buffers than there is room to copy zones to; the first mistake of many is the one that is told.
    1: fn many_buffers_and_few_slots(gpus) {
        let pool = audited(gpus, 1);
        let result = pool.run(|dev, _| {
            for i in 0..6000usize {
                let mut x = dev.zeros::<u8>(200)?;
                if i == 100 || i == 5900 {
                    poke(dev, &mut x, 200 + i as i64 % 7, 2)?;
                }
            }
            Ok(())
        });
        assert_eq!(found(result).bytes, 202..203);
        pool.run(|dev, _| (0..6000).try_for_each(|_| dev.zeros::<u8>(200).map(drop))).unwrap();
        pool.close().unwrap();
    }

    // The host writes past the end of page-locked memory.
    1: fn page_locked_memory_too(gpus) {
        let pool = audited(gpus, 1);
        let poke = |len: usize, at: usize| {
            let mut x = pool.pinned::<u8>(len).unwrap();
            let start = x.as_mut_slice().unwrap().as_mut_ptr().expose_provenance();
            // SAFETY: within the pool's memory, of which these bytes are nobody's.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start + at).write_volatile(1) };
        };
        for len in [100, 300_000] {
            poke(len, len + 5);
            let report = found(pool.run(|_, _| Ok(())));
            assert_eq!((report.bytes.clone(), report.allocation.as_ref().unwrap().device), (len + 5..len + 6, None));
            let (op, site) = report.allocation.as_ref().unwrap().by.unwrap();
            assert!(op == "pinned" && site.file() == file!(), "{report}");
        }
        poke(4000, 4000);
        assert_eq!(found(pool.close()).bytes, 4000..4001);
    }

    // Dropped while copies run: nobody looks, and nothing is poisoned, before they are over (pytorch#127612).
    1: fn page_locked_memory_in_flight_is_left_alone(gpus) {
        let pool = audited(gpus, 1);
        for round in 0..20u8 {
            let seen = pool.run(|dev, _| {
                let mut busy = dev.zeros::<u32>(1)?;
                support::slow_add(dev, &mut busy, 1, 2000)?;
                let mut host = dev.pinned::<u8>(50_000)?;
                host.as_mut_slice()?.fill(round);
                let x = dev.upload_pinned(&host)?;
                drop(host);
                let again = dev.pinned::<u8>(50_000)?;
                drop(again);
                dev.download(&x)
            });
            assert!(seen.unwrap()[0].iter().all(|byte| *byte == round), "round {round}");
        }
        pool.close().unwrap();
    }

    // A program that does no wrong: steps of a training on several streams, with whatever sizes, hears nothing, and computes
    // what it computes without an audit.
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

    // Frees in a scope that fails are looked at, too; and the scope tells its own error.
    2: fn a_scope_that_fails_for_itself_says_so(gpus) {
        let pool = audited(gpus, 2);
        let result = pool.run(|dev, _| -> Result<()> {
            let mut x = dev.zeros::<u8>(10)?;
            poke(dev, &mut x, 10, 1)?;
            drop(x);
            Err(Error::custom("its own"))
        });
        assert!(matches!(failure(result), Error::Custom(_)));
        let _ = pool.run(|_, _| Ok(()));
        pool.run(|dev, _| dev.zeros::<u8>(10).map(drop)).unwrap();
        pool.close().unwrap();
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

/// Whatever call of the audit fails, or of the program: memory comes back, nothing hangs, and no buffer is blamed that was
/// treated well.
#[test]
fn faults_cost_a_look_and_nothing_else() {
    support::guarded(|| {
        for op in [FaultOp::Fill, FaultOp::CopyDown, FaultOp::HostAlloc, FaultOp::EventWait, FaultOp::Record] {
            for nth in 1..30 {
                let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(op).nth(nth)).paused();
                let builder = support::builder().host(2).check(Check::Memory).faults(plan.clone());
                let pool = builder.timeout(std::time::Duration::from_secs(20)).build().unwrap();
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
                let pool =
                    support::builder().host(2).check(Check::Memory).schedule(Schedule::Seeded(seed)).build().unwrap();
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

/// A mistake is found in steps, too.
#[test]
fn steps_show_a_mistake() {
    support::guarded(|| {
        for seed in 0..5 {
            let builder = GpuPool::builder().host(2).module(&MODULE).check(Check::Memory);
            let pool = builder.schedule(Schedule::Seeded(seed)).build().unwrap();
            let result = pool.run(|dev, _| {
                let mut x = dev.zeros::<u8>(100)?;
                if dev.rank() == 1 { poke(dev, &mut x, 101, 1) } else { Ok(()) }
            });
            assert_eq!(found(result).allocation.as_ref().unwrap().device, Some(1));
        }
    });
}

/// Without an audit the same program goes wrong in silence, which is why there is one.
#[test]
fn races_alone_do_not_show_it() {
    let pool = GpuPool::builder().host(1).module(&MODULE).check(Check::Races).build().unwrap();
    pool.run(|dev, _| {
        let mut x = dev.zeros::<u8>(100)?;
        poke(dev, &mut x, 100, 1)
    })
    .unwrap();
    pool.close().unwrap();
}
