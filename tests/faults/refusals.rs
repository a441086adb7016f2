//! Calls that make no sense: refused with the line of who made them, and only they fail.

use crate::{
    on_both,
    rig::{STRAY, TWINLESS, assert_works, host},
    support::{self, failure, guarded},
};
use gpu_pool::{AsViewMut, Device, DeviceBuffer, Error, GpuPool, LaunchDims, ReduceOp};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::*},
};

on_both! {
    // Each operation says where in the caller's code it was given the wrong buffer.
    2: fn a_buffer_of_another_device_is_refused_with_the_callers_line(gpus) {
        let pool = gpus.pool(2);
        let theirs = Arc::new(pool.run_on(&[1], |dev, _| dev.upload(&[1.0f32; 8])).unwrap().remove(0));
        let line = AtomicUsize::new(0);
        type Try<'a> = &'a (dyn Fn(&Device, &DeviceBuffer<f32>, &mut DeviceBuffer<f32>) -> Result<(), Error> + Sync);
        let attempts: [(&str, Try<'_>); 6] = [
            ("download", &|dev, x, _| dev.download(x).map(drop)),
            ("upload", &|dev, _, y| dev.upload_into(&[0.0; 8], y)),
            ("sum", &|dev, x, _| dev.sum(x).map(drop)),
            ("scale", &|dev, _, y| dev.scale(y, 2.0)),
            ("all_reduce", &|dev, _, y| dev.all_reduce(y, ReduceOp::Sum)),
            ("fill", &|dev, _, y| dev.fill(y, 1.0)),
        ];
        let mut own = pool.run_on(&[1], |dev, _| dev.zeros::<f32>(8)).unwrap().remove(0);
        for (name, attempt) in attempts {
            let target = Mutex::new(own);
            let error = failure(pool.run_on(&[0], |dev, _| attempt(dev, &theirs, &mut target.lock())));
            match error {
                Error::WrongDevice { op, buffer: 1, device: 0, site } => {
                    assert!(site.file() == file!(), "{name}: {site}");
                    assert!(!op.is_empty());
                    line.fetch_max(site.line() as usize, Relaxed);
                }
                other => panic!("{name}: {other}"),
            }
            own = target.into_inner();
        }
        let marked = std::panic::Location::caller().line() + 1;
        let error = failure(pool.run_on(&[0], |dev, _| dev.download(&*theirs)));
        assert!(matches!(error, Error::WrongDevice { op: "download", site, .. } if site.line() == marked), "{error}");
        // A copy between two other devices is nobody's here; with one side here, it is fine.
        assert_eq!(pool.run_on(&[0], |dev, _| dev.download(&theirs.copy_to(dev)?)).unwrap(), [[1.0; 8]]);
        let target = Mutex::new(own);
        let error = failure(pool.run_on(&[0], |dev, _| dev.copy(&theirs.peer(), &mut *target.lock())));
        assert!(matches!(error, Error::WrongDevice { op: "copy", .. }), "{error}");
        assert_works(&pool);
    }

    1: fn things_of_another_pool_are_refused(gpus) {
        let (one, two) = (gpus.pool(1), gpus.pool(1));
        let x = one.run(|dev, _| dev.upload(&[1.0f32])).unwrap().remove(0);
        let event = one.run(|dev, _| dev.record()).unwrap().remove(0);
        let pinned = one.pinned::<f32>(1).unwrap();
        let line = std::panic::Location::caller().line() + 1;
        let error = failure(two.run(|dev, _| dev.sum(&x)));
        assert!(matches!(error, Error::WrongPool { device: 0, site, .. } if site.line() >= line - 1), "{error}");
        for error in [
            failure(two.run(|dev, _| dev.download(&x))),
            failure(two.run(|dev, _| x.copy_to(dev))),
            failure(two.run(|dev, _| dev.wait(&event))),
            failure(two.run(|dev, _| dev.upload_pinned(&pinned))),
        ] {
            assert!(matches!(error, Error::WrongPool { .. }), "{error}");
        }
        assert_works(&two);
    }

    1: fn scopes_within_scopes_are_refused(gpus) {
        let n = gpus.up_to(2);
        let (pool, other) = (gpus.pool(n), gpus.pool(1));
        let closing = Mutex::new([Some(gpus.pool(1)), Some(gpus.pool(1))]);
        let nested = pool
            .run(|dev, _| {
                let mut own = vec![
                    failure(pool.run(|_, _| Ok(()))),
                    failure(other.run(|_, _| Ok(()))),
                    failure(pool.run_on(&[0], |_, _| Ok(()))),
                    failure(pool.run_mut(&mut vec![0u8; n], 1, |_, _, _| Ok(()))),
                    failure(pool.per_device(|_, _| Ok(()))),
                    failure(support::builder().host(1).build()),
                    failure(pool.survivors()),
                    failure(GpuPool::scope(|_, _| Ok(()))),
                ];
                let victim = closing.lock()[dev.index()].take().unwrap();
                own.push(failure(victim.close()));
                Ok(own)
            })
            .unwrap();
        for error in nested.iter().flatten() {
            assert!(matches!(error, Error::NestedScope { .. }), "{error}");
        }
        assert_works(&pool);
        assert_works(&other);
    }

    1: fn a_kernel_whose_module_the_pool_does_not_have_is_not_found(gpus) {
        let pool = gpus.pool(1);
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(4)?;
            // SAFETY: the kernel is never found.
            unsafe { dev.launch(&STRAY, LaunchDims::cover(4), (&mut x,)) }
        }));
        match &error {
            Error::KernelNotFound { device: 0, kernel, why } => {
                assert!(kernel == "stray" && why.contains("Builder::module"), "{error}");
            }
            other => panic!("{other}"),
        }
        assert_works(&pool);
    }

    1: fn lengths_must_agree(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (mut x, mut pinned) = (dev.zeros::<f32>(4)?, dev.pinned::<f32>(3)?);
            let mut host = [0.0; 5];
            let y = dev.zeros::<f32>(5)?;
            for error in [
                failure(dev.upload_into(&[1.0; 5], &mut x)),
                failure(dev.download_into(&x, &mut host)),
                failure(dev.upload_pinned_into(&pinned, &mut x)),
                failure(dev.download_pinned(&x, &mut pinned)),
                failure(dev.copy(&y, &mut x)),
                failure(dev.axpy(1.0, &y, &mut x)),
            ] {
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            }
            // Such an error fails nobody but its call.
            dev.fill(&mut x, 1.0)?;
            assert_eq!(dev.download(&x)?, [1.0; 4]);
            Ok(())
        })
        .unwrap();
    }

    1: fn a_slice_out_of_range_panics_as_in_the_standard_library(gpus) {
        let pool = gpus.pool(1);
        let error = failure(pool.run(|dev, _| {
            let x = dev.zeros::<f32>(4)?;
            dev.download(&x.slice(2..6))
        }));
        assert!(matches!(&error, Error::Panicked { message, .. } if message.contains("2..6")), "{error}");
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(4)?;
            Ok(x.view_mut().split_at_mut(5).0.len())
        }));
        assert!(matches!(&error, Error::Panicked { .. }), "{error}");
        assert_works(&pool);
    }
}

#[test]
fn a_kernel_without_a_twin_needs_hardware() {
    guarded(|| {
        let pool = host(1);
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(4)?;
            // SAFETY: the kernel is never found.
            unsafe { dev.launch(&TWINLESS, LaunchDims::cover(4), (&mut x,)) }
        }));
        let text = error.to_string();
        assert!(matches!(error, Error::KernelNotFound { .. }) && text.contains("twin"), "{text}");
        assert_works(&pool);
    });
}
