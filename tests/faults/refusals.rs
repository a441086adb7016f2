//! Calls that make no sense: refused with the line of who made them, and only they fail.

use crate::{
    on_both,
    rig::{STRAY, TWINLESS, assert_works, host},
    support::{self, failure, guarded},
};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, Error, GpuPool, LaunchDims, ReduceOp, Result,
    collective::Algorithm,
    each_mut,
    gradients::{GradientExchange, Wire},
    host::ExecutionOrder,
    rows_mut,
};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{Explorer, Topology};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::{panic::Location, sync::Arc, time::Duration};

on_both! {
    // Each operation says where in the caller's code it was given the wrong buffer.
    2: fn a_buffer_of_another_device_is_refused_with_the_callers_line(gpus) {
        let pool = gpus.pool(2);
        let theirs = Arc::new(pool.on(&[1]).run(|dev, _| dev.upload(&[1.0f32; 8])).unwrap().remove(0));
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
        let mut own = pool.on(&[1]).run(|dev, _| dev.zeros::<f32>(8)).unwrap().remove(0);
        for (name, attempt) in attempts {
            let target = Mutex::new(own);
            let error = failure(pool.on(&[0]).run(|dev, _| attempt(dev, &theirs, &mut target.lock())));
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
        let error = failure(pool.on(&[0]).run(|dev, _| dev.download(&*theirs)));
        assert!(matches!(error, Error::WrongDevice { op: "download", site, .. } if site.line() == marked), "{error}");
        // A copy between two other devices is nobody's here; with one side here, it is fine.
        assert_eq!(pool.on(&[0]).run(|dev, _| dev.download(&theirs.copy_to(dev)?)).unwrap(), [[1.0; 8]]);
        let target = Mutex::new(own);
        let error = failure(pool.on(&[0]).run(|dev, _| dev.copy(&theirs.peer(), &mut *target.lock())));
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
                    failure(pool.on(&[0]).run(|_, _| Ok(()))),
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
            Error::KernelNotFound { op: "launch", device: 0, kernel, why, .. } => {
                assert!(kernel == "stray" && why.contains("Builder::module"), "{error}");
            }
            other => panic!("{other}"),
        }
        assert_works(&pool);
    }

    1: fn lengths_must_agree(gpus) {
        gpus.run(1, |dev| {
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
        });
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
        assert!(matches!(error, Error::KernelNotFound { .. }) && text.contains("host kernel"), "{text}");
        assert_works(&pool);
    });
}

/// The call is refused, with its own place: the line of this check, or one of the next where it stands in several.
#[track_caller]
fn refused<T>(device: Option<usize>, call: &str, result: Result<T>) {
    let here = Location::caller();
    match result {
        Ok(_) => panic!("{call} was not refused"),
        Err(error) => {
            let Error::InvalidArgument { device: found, site, .. } = &error else { panic!("{call}: {error}") };
            let lines = here.line()..here.line() + 1 + call.lines().count() as u32 + 8;
            assert!(site.file() == file!() && lines.contains(&site.line()), "{call} at {here}: {error}");
            assert_eq!(*found, device, "{call}: {error}");
            let text = error.to_string();
            assert!(text.contains(&site.to_string()), "{call}: {text}");
            assert_eq!(text.contains("(device "), device.is_some(), "{call}: {text}");
        }
    }
}

/// A device, or `None` on a thread of the program's, then calls that it refuses.
macro_rules! refuses {
    ($device:expr, $call:expr) => {
        refused($device, stringify!($call), $call)
    };
}

/// Of each call that can be refused for its arguments, on the program's own threads.
#[test]
fn a_refused_argument_names_the_callers_line() {
    guarded(|| {
        let builder = || support::builder().host(2);
        refuses!(None, builder().memory_limit(4 << 20).memory_reserve(8 << 20).build());
        refuses!(None, builder().software_memory(4 << 20).memory_reserve(8 << 20).build());
        refuses!(None, builder().timeout(Duration::ZERO).build());
        refuses!(None, builder().dry().build());
        refuses!(None, builder().topology(Topology::nvswitch(2)).schedule(ExecutionOrder::Seeded(1)).build());
        refuses!(None, builder().topology(Topology::new("nothing")).build());
        refuses!(None, builder().topology(Topology::nvswitch(2)).host(3).build());
        refuses!(None, builder().topology(Topology::nvswitch(2)).cuda().build());
        refuses!(None, builder().without_peer_access().algorithm(Algorithm::Direct).build());
        refuses!(None, builder().weights(&[1.0]).build());
        refuses!(None, builder().weights(&[1.0, -1.0]).build());
        refuses!(None, builder().host(0).build());
        refuses!(None, builder().devices(&[]).build());
        refuses!(None, builder().devices(&[1, 1]).build());
        refuses!(None, builder().weights(&[1.0]).build_global());
        refuses!(None, Topology::new("nothing").validate());
        #[cfg(feature = "topology-files")]
        {
            refuses!(None, Topology::parse("devices = 7"));
            refuses!(None, Topology::from_file("no such file"));
            refuses!(None, Topology::from_file(file!()));
            refuses!(None, Topology::new("nothing").to_toml());
        }

        let pool = support::builder().host(2).record_memory(false).build().unwrap();
        refuses!(None, pool.leaks());
        refuses!(None, pool.on(&[]).run(|_, _| Ok(())));
        refuses!(None, pool.on(&[0, 2]).run(|_, _| Ok(())));
        refuses!(None, pool.on(&[0, 0]).run(|_, _| Ok(())));
        refuses!(None, pool.run_mut(&mut [0; 5], 0, |_, _, _| Ok(())));
        refuses!(None, pool.with(rows_mut(&mut [0; 5], 2)).run(|_, _, _| Ok(())));
        refuses!(None, pool.with(each_mut(&mut [0; 3])).run(|_, _, _| Ok(())));
        refuses!(None, pool.with(vec![0; 3]).run(|_, _, _| Ok(())));
        refuses!(None, pool.with((vec![0; 2], vec![0; 3])).run(|_, _, _| Ok(())));
        refuses!(None, pool.with((vec![0; 2], vec![0; 2], vec![0; 3])).run(|_, _, _| Ok(())));
        refuses!(None, pool.with(pool.unified::<f32>(5).unwrap().rows_mut(2)).run(|_, _, _| Ok(())));
        refuses!(None, pool.unified::<u64>(usize::MAX));
        let events = pool.run(|dev, _| Ok((dev.record()?, dev.record_timed()?))).unwrap();
        refuses!(None, events[0].0.elapsed_since(&events[0].1));
        refuses!(None, events[0].1.elapsed_since(&events[1].1));
        let explorer = Explorer::new().devices(65).seeds(1);
        let why = explorer.run(|_| Ok(())).unwrap_err().to_string();
        assert!(why.contains(file!()), "{why}");
        // What a closure of the program's was refused, within a scope of another kind, is on the closure's line.
        let mut state = pool.per_device(|_, _| Ok(0)).unwrap();
        refuses!(Some(0), state.run(|dev, _, _| if dev.index() == 0 { dev.group(&[7]).map(drop) } else { Ok(()) }));
    });
}

/// Runs `f` on two devices, with their ordinals and two buffers of other lengths.
fn on_two<F>(f: F)
where
    F: Fn(&Device, Option<usize>, DeviceBuffer<f32>, DeviceBuffer<f32>) -> Result<()> + Send + Sync + 'static,
{
    guarded(move || {
        let pool = host(2);
        pool.run(|dev, _| f(dev, Some(dev.index()), dev.zeros(4)?, dev.zeros(5)?)).unwrap();
        assert_works(&pool);
    });
}

/// The same, on device threads.
#[test]
fn a_refused_argument_names_the_device_and_the_line_of_its_closure() {
    on_two(|dev, here, x, mut y| {
        let (mut host, mut pinned) = ([0.0; 5], dev.pinned::<f32>(3)?);
        refuses!(here, dev.upload_into(&[1.0; 4], &mut y));
        refuses!(here, dev.download_into(&x, &mut host));
        refuses!(here, dev.upload_pinned_into(&pinned, &mut y));
        refuses!(here, dev.download_pinned(&x, &mut pinned));
        refuses!(here, dev.copy(&x, &mut y));
        refuses!(here, dev.axpy(1.0, &x, &mut y));
        refuses!(here, dev.dot(&x, &y));
        refuses!(here, dev.fill(&mut dev.zeros::<u128>(1)?, 1));
        // SAFETY: nothing is read.
        refuses!(here, unsafe { dev.uninit_aligned::<u8>(1, 3) });
        #[cfg(feature = "blas")]
        {
            use gpu_pool::Matrix;
            refuses!(here, Matrix::new(&x, 2, 3));
            refuses!(here, dev.gemm(1.0, Matrix::new(&x, 2, 2)?, Matrix::new(&x, 4, 1)?, 0.0, &mut y));
        }
        #[cfg(feature = "cuda")]
        refuses!(here, dev.cuda());
        let (untimed, timed) = (dev.record()?, dev.record_timed()?);
        refuses!(here, timed.elapsed_since(&untimed));
        refuses!(here, dev.group(&[0, 2]));
        refuses!(here, dev.group(&[0, 1, 0]));
        refuses!(here, dev.group(&[1 - dev.rank()]));
        Ok(())
    });
}

#[test]
fn a_refused_collective_names_the_device_and_the_line_of_its_closure() {
    on_two(|dev, here, x, mut y| {
        let sum = ReduceOp::Sum;
        refuses!(here, dev.all_reduce_into(&x, &mut y, sum));
        refuses!(here, dev.reduce(&mut y, sum, 2));
        refuses!(here, dev.reduce_scatter(&x, &mut y, sum));
        refuses!(here, dev.reduce_scatter_v(&x, &mut y, &[1], sum));
        refuses!(here, dev.reduce_scatter_v(&x, &mut y, &[1, 1], sum));
        refuses!(here, dev.reduce_scatter_v(&x, &mut y, &[2, 2], sum));
        refuses!(here, dev.reduce_scatter_in_place(&mut y, sum));
        refuses!(here, dev.all_gather(&x, &mut y));
        refuses!(here, dev.all_gather_v(&x, &mut y, &[1]));
        refuses!(here, dev.all_gather_v(&x, &mut y, &[1, 1]));
        refuses!(here, dev.all_gather_v(&x, &mut y, &[4, 4]));
        refuses!(here, dev.all_gather_in_place(&mut y));
        refuses!(here, dev.broadcast(&mut y, 2));
        refuses!(here, dev.gather(&x, None, 2));
        refuses!(here, dev.gather(&x, None, dev.rank()));
        refuses!(here, dev.gather(&x, Some(y.view_mut()), dev.rank()));
        refuses!(here, dev.gather(&x, Some(y.view_mut()), 1 - dev.rank()));
        refuses!(here, dev.gather_v(&x, None, &[4, 4], 2));
        refuses!(here, dev.gather_v(&x, None, &[4], 0));
        refuses!(here, dev.gather_v(&x, None, &[1, 1], 0));
        refuses!(here, dev.gather_v(&x, None, &[4, 4], dev.rank()));
        refuses!(here, dev.scatter(None, &mut y, 2));
        refuses!(here, dev.scatter(Some(x.view()), &mut y, dev.rank()));
        refuses!(here, dev.scatter_v(None, &mut y, &[5, 5], 2));
        refuses!(here, dev.scatter_v(None, &mut y, &[5], 0));
        refuses!(here, dev.scatter_v(None, &mut y, &[1, 1], 0));
        refuses!(here, dev.scatter_v(None, &mut y, &[5, 5], dev.rank()));
        refuses!(here, dev.all_to_all(&y, &mut dev.zeros::<f32>(5)?));
        refuses!(here, dev.all_to_all(&x, &mut y));
        refuses!(here, dev.all_to_all_v(&x, &[2], &mut y, &[2, 2]));
        refuses!(here, dev.all_to_all_v(&x, &[2, 2], &mut y, &[2]));
        refuses!(here, dev.all_to_all_v(&x, &[1, 2], &mut y, &[2, 2]));
        refuses!(here, dev.all_to_all_v(&x, &[2, 2], &mut y, &[2, 2]));
        refuses!(here, dev.send(&x, 2));
        refuses!(here, dev.recv(&mut y, 2));
        refuses!(here, dev.sendrecv(&x, 2, &mut y, 0));
        let group = dev.group(&[1, 0])?;
        refuses!(here, group.reduce(&mut y, sum, 2));
        refuses!(here, group.all_gather(&x, &mut y));
        refuses!(here, group.send(&x, 2));
        refuses!(here, group.recv(&mut y, 2));
        Ok(())
    });
}

#[test]
fn what_a_capture_refuses_names_the_device_and_the_line_of_its_closure() {
    /// A capture ends with what it refuses first, so each has one of its own.
    #[track_caller]
    fn captured<T>(dev: &Device, call: &str, f: impl FnOnce(&Device) -> Result<T>) {
        refused(Some(dev.index()), call, dev.capture(|dev| f(dev).map(drop)));
    }
    macro_rules! captures_no {
        ($outer:expr, |$dev:ident| $call:expr) => {
            captured($outer, stringify!($call), |$dev| $call)
        };
    }
    guarded(|| {
        let pool = &support::builder().host(2).module(&support::MODULE).without_peer_access().build().unwrap();
        pool.run(|dev, _| {
            let (stream, event) = (dev.stream()?, dev.record()?);
            let mut x = dev.zeros::<f32>(4)?;
            let mut pinned = dev.pinned::<f32>(4)?;
            let others = dev.exchange(Arc::new(dev.zeros::<f32>(4)?))?;
            let other = &others[1 - dev.rank()];
            let (graph, ()) = dev.capture(|dev| dev.fill(&mut x, 1.0))?;
            captures_no!(dev, |dev| dev.upload(&[1.0f32]));
            captures_no!(dev, |dev| dev.upload_into(&[1.0; 4], &mut x));
            captures_no!(dev, |dev| dev.download(&x));
            captures_no!(dev, |dev| dev.download_into(&x, &mut [0.0; 4]));
            captures_no!(dev, |dev| dev.upload_pinned(&pinned));
            captures_no!(dev, |dev| dev.download_pinned(&x, &mut pinned));
            captures_no!(dev, |dev| dev.copy(&other.peer(), &mut x));
            captures_no!(dev, |dev| dev.synchronize());
            captures_no!(dev, |dev| dev.stream());
            captures_no!(dev, |dev| dev.stream_with_priority(1));
            captures_no!(dev, |dev| dev.record());
            captures_no!(dev, |dev| dev.record_timed());
            captures_no!(dev, |dev| dev.wait(&event));
            captures_no!(dev, |dev| dev.on(&stream).fill(&mut x, 1.0));
            captures_no!(dev, |dev| dev.on(&stream).scale(&mut x, 1.0));
            captures_no!(dev, |dev| dev.barrier());
            captures_no!(dev, |dev| dev.exchange(1));
            captures_no!(dev, |dev| dev.send(&x, 0));
            captures_no!(dev, |dev| dev.recv(&mut x, 0));
            captures_no!(dev, |dev| dev.capture(|_| Ok(())));
            captures_no!(dev, |dev| dev.launch_graph(&graph));
            #[cfg(feature = "cuda")]
            captures_no!(dev, |dev| dev.cuda().map(drop));
            let mut gradients = GradientExchange::builder().build(dev, &[4])?;
            captures_no!(dev, |dev| gradients.ready(dev, 0));
            captures_no!(dev, |dev| gradients.finish(dev).map(drop));
            captures_no!(dev, |dev| gradients.reset(dev));
            captures_no!(dev, |dev| gradients.join(dev, true));
            captures_no!(dev, |dev| gradients.broadcast_parameters(dev, std::slice::from_mut(&mut x), 0));
            captures_no!(dev, |dev| gradients.verify_parameters(dev, std::slice::from_ref(&x)));
            let graph = dev.capture(|dev| {
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                refuses!(Some(dev.index()), dev.group(&[1, 0])?.all_reduce(&mut x, ReduceOp::Sum));
                Ok(())
            });
            assert!(matches!(&graph, Err(error) if error.to_string().contains("one group")), "{graph:?}");
            Ok(())
        })
        .unwrap();
        let mut unified = pool.unified::<f32>(4).unwrap();
        let of_unified = pool.with(unified.rows_mut(1)).run(|dev, _, mut rows| {
            captures_no!(dev, |dev| dev.fill(&mut rows, 1.0));
            Ok(())
        });
        of_unified.unwrap();
        let graphs = pool.per_device(|dev, _| {
            let mut x = dev.zeros::<f32>(4)?;
            Ok(dev.capture(|dev| dev.all_reduce(&mut x, ReduceOp::Sum))?.0)
        });
        let graphs = &graphs.unwrap();
        pool.on(&[1])
            .run(|dev, _| {
                refuses!(Some(1), dev.launch_graph(&*graphs.borrow(dev)?));
                Ok(())
            })
            .unwrap();
    });
}

#[test]
fn what_a_gradient_exchange_refuses_names_the_device_and_the_line_of_its_closure() {
    guarded(|| {
        let pool = &host(2);
        let mut exchanges = pool.per_device(|dev, _| GradientExchange::builder().build(dev, &[4])).unwrap();
        pool.run(|dev, _| {
            let here = Some(dev.index());
            let builder = GradientExchange::builder;
            refuses!(here, builder().reduce(ReduceOp::Max).build(dev, &[4]));
            refuses!(here, builder().reduce(ReduceOp::Scaled(f64::NAN)).build(dev, &[4]));
            refuses!(here, builder().of::<half::f16>().wire(Wire::F32).build(dev, &[4]));
            refuses!(here, builder().bucket_bytes(0).build(dev, &[4]));
            refuses!(here, builder().build(dev, &[usize::MAX]));
            let everyone = dev.group(&[0, 1])?;
            refuses!(here, builder().bucket_bytes(0).build_in(&everyone, &[4]));
            let mut of = builder().bucket_bytes(16).first_bucket_bytes(16).ready_order(false).build(dev, &[4, 4])?;
            refuses!(here, of.finish(dev));
            refuses!(here, of.finish_bucket(dev, 0));
            refuses!(here, of.set_weight(1.0));
            refuses!(here, of.grad(2));
            refuses!(here, of.grad_mut(2));
            refuses!(here, of.grads_mut([0, 0]));
            refuses!(here, of.grads_mut([0, 2]));
            refuses!(here, of.lend(2, dev.zeros(4)?));
            refuses!(here, of.lend(0, dev.zeros(5)?));
            refuses!(here, of.take(0));
            refuses!(here, of.take(2));
            refuses!(here, of.ready(dev, 2));
            refuses!(here, of.ready_from(dev, 0, dev.zeros(5)?));
            refuses!(here, of.broadcast_parameters(dev, &mut [dev.zeros::<f32>(1)?], 2));
            of.ready(dev, 1)?;
            refuses!(here, of.ready(dev, 1));
            refuses!(here, of.grad_mut(1));
            refuses!(here, of.grad(1));
            refuses!(here, of.set_sync(false));
            refuses!(here, of.join(dev, true));
            refuses!(here, of.finish_bucket(dev, 2));
            of.finish_bucket(dev, 0)?;
            refuses!(here, of.ready(dev, 0));
            refuses!(here, of.ready(dev, 1));
            refuses!(here, of.grad_mut(1));
            let done = of.finish(dev)?;
            refuses!(here, done.grad(2));
            of.set_sync(false)?;
            of.ready(dev, 0)?;
            refuses!(here, of.finish_bucket(dev, 0));
            of.finish(dev)?;
            refuses!(here, of.lend(0, dev.zeros(4)?));
            let mut scaled = builder().reduce(ReduceOp::Scaled(1.0)).build(dev, &[4])?;
            refuses!(here, scaled.set_weight(f64::INFINITY));
            Ok(())
        })
        .unwrap();
        // In a gang without the other member, and after a step that has failed.
        let alone = pool.on(&[1]).run(|dev, _| {
            refuses!(Some(1), exchanges.borrow_mut(dev)?.ready(dev, 0));
            Ok(())
        });
        alone.unwrap();
        let failed = pool.run(|dev, _| {
            exchanges.borrow_mut(dev)?.ready(dev, 0)?;
            match dev.index() {
                0 => Err(Error::custom("the step fails")),
                _ => dev.barrier(),
            }
        });
        assert!(failed.is_err());
        exchanges.clear_poison().unwrap();
        let after = exchanges.run(|dev, _, exchange| {
            let here = Some(dev.index());
            refuses!(here, exchange.ready(dev, 0));
            refuses!(here, exchange.grad_mut(0));
            refuses!(here, exchange.set_sync(false));
            refuses!(here, exchange.finish(dev));
            exchange.reset(dev)
        });
        after.unwrap();
    });
}
