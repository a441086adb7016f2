//! Who writes too far is found, wherever the buffer goes afterwards; who reads what was dropped finds poison.

use super::rig::{MODULE, ONE, PEEK, audited, found, poke};
use crate::{
    on_both,
    support::{bytes, failure, guarded},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Result, extend::driver::host::ExecutionOrder};
use gpu_pool_lab::{Check, prelude::*};
use parking_lot::Mutex;
use std::sync::Arc;

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

/// A mistake is found in steps, too.
#[test]
fn steps_show_a_mistake() {
    guarded(|| {
        for seed in 0..5 {
            let builder = GpuPool::builder().host(2).module(&MODULE).check(Check::Memory);
            let pool = builder.schedule(ExecutionOrder::Seeded(seed)).build().unwrap();
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
