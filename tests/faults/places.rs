//! Each public function that can fail is called wrongly: its error names the function, and its call in this file.
//!
//! `.ci/places.py` compares this table with rustdoc's pages, so that no function is forgotten: it reads the names in
//! [`told`], [`both`] and [`EXCEPTED`].

use crate::{
    rig::{STRAY_MODULE, TWINLESS},
    support::{self, failure, guarded},
    told::{group_of, on_one_of, place, told},
};
use gpu_pool::{
    CancelToken, Device, DeviceBuffer, Error, GpuPool, LaunchDims, PinnedBuffer, ReduceOp, Result, each_mut,
    gradients::GradientExchange,
};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, Topology};
use parking_lot::Mutex;

/// Functions that are not called wrongly here, and why.
#[rustfmt::skip]
const EXCEPTED: [(&str, &str); 26] = [
    ("Cuda::read", "it needs a GPU"),
    ("Cuda::write", "it needs a GPU"),
    ("Device::check", "it reports what others have failed with"),
    ("Device::trim", "only a device that is lost fails it: `what_a_lost_device_refuses_has_a_place`"),
    ("Device::world", "only a cluster can fail it"),
    ("Event::is_complete", "only a device that is lost fails it"),
    ("Explorer::run", "its failure is that of the closure"),
    ("GpuPool::explain", "its result is that of `Group::explain`; nothing fails it today"),
    ("Group::explain", "only a cluster can fail it"),
    ("Group::explain_norm", "only a cluster can fail it"),
    ("GradientExchange::reset", "it is the way out of failures"),
    ("Module::check", "it needs the feature `nvrtc`, and NVRTC"),
    ("JobHandle::wait", "it reports what the job has failed with"),
    ("JobSpec::try_submit", "its error is a `TrySubmitError`"),
    ("Jobs::close", "only a device without progress can fail it"),
    ("Jobs::submit", "only a closed or lost pool can fail it"),
    ("Jobs::try_submit", "its error is a `TrySubmitError`"),
    ("JobsWith::submit", "it fails as `Jobs::submit`"),
    ("PinnedBuffer::as_mut_slice", "only a deadline can fail it"),
    ("PinnedBuffer::as_slice", "only a deadline can fail it"),
    ("PinnedBuffer::slice", "it fails as `as_slice`"),
    ("ScopedJob::wait", "it reports what the job has failed with"),
    ("Tasks::wait", "it reports what tasks have failed with"),
    ("UnifiedBuffer::as_mut_slice", "only a deadline can fail it"),
    ("UnifiedBuffer::as_slice", "only a deadline can fail it"),
    ("Unpack::bytes", "it reads what another process has sent"),
];

/// The same call of a device and of a group.
macro_rules! both {
    ($dev:ident, $name:ident $(::<$Of:ty>)? ($($arg:expr),* $(,)?)) => {
        told(concat!("Device::", stringify!($name)), $dev.$name$(::<$Of>)?($($arg),*));
        told(concat!("Group::", stringify!($name)), group_of($dev).$name$(::<$Of>)?($($arg),*));
    };
}

/// Runs `f` on a device, with a buffer of another pool.
fn on_one<F>(f: F)
where
    F: Fn(&Device, &mut DeviceBuffer<f32>) -> Result<()> + Send + Sync + 'static,
{
    on_one_of(support::builder().module(&STRAY_MODULE), f);
}

const FAR: usize = usize::MAX / 64;

#[test]
fn a_devices_calls_have_places() {
    let other = support::builder().host(1).build().unwrap();
    let event = other.run(|dev, _| dev.record()).unwrap().remove(0);
    let their: PinnedBuffer<f32> = other.pinned(4).unwrap();
    on_one(move |dev, far| {
        let (mut x, mut pinned) = (dev.zeros::<f32>(4)?, dev.pinned::<f32>(3)?);
        told("Device::upload", dev.upload(&vec![0.0f32; 2 << 20]));
        told("Device::upload_into", dev.upload_into(&[0.0; 5], &mut x));
        told("Device::download", dev.download(far));
        told("Device::download_into", dev.download_into(&x, &mut [0.0; 5]));
        told("Device::upload_pinned", dev.upload_pinned(&their));
        told("Device::upload_pinned_into", dev.upload_pinned_into(&pinned, &mut x));
        told("Device::download_pinned", dev.download_pinned(&x, &mut pinned));
        told("Device::copy", dev.copy(far, &mut x));
        told("DeviceBuffer::copy_to", far.copy_to(dev));
        told("DeviceView::copy_to", far.slice(..).copy_to(dev));
        told("Device::wait", dev.wait(&event));
        told("Device::wait_on_host", dev.wait_on_host(&event));
        told("Device::zeros", dev.zeros::<f64>(FAR));
        // SAFETY: nothing is read.
        unsafe {
            told("Device::uninit", dev.uninit::<f64>(FAR));
            told("Device::uninit_aligned", dev.uninit_aligned::<u8>(1, 3));
            told("Device::adopt", dev.adopt::<f32>(0, 1, ()));
            told("Device::adopt_stream", dev.adopt_stream(u64::MAX));
        }
        #[cfg(feature = "dlpack")]
        {
            use gpu_pool::dlpack::dlpark::{DlpackFlags, versioned::Dlpack};
            let tensor = || dev.to_dlpack(dev.zeros::<f32>(4)?, &[4]);
            let read_only = tensor()?.into_raw();
            // SAFETY: a live tensor, which nothing else has; the stream is refused.
            unsafe {
                (*read_only).flags = DlpackFlags::READ_ONLY;
                let read_only = Dlpack::from_raw(read_only).map_err(Error::custom)?;
                told("DlpackTensor::into_buffer", dev.from_dlpack::<f32>(read_only)?.into_buffer());
                told("Device::from_dlpack", dev.from_dlpack::<i32>(tensor()?));
                told("Device::to_dlpack_on", dev.to_dlpack_on(dev.zeros::<f32>(4)?, &[4], u64::MAX));
            }
            told("Device::to_dlpack", dev.to_dlpack(dev.zeros::<f32>(4)?, &[5]));
            let shared = std::sync::Arc::new(dev.zeros::<f32>(4)?);
            told("Device::to_dlpack_part", dev.to_dlpack_part(&shared, 1.., &[5]));
            told("PinnedBuffer::into_dlpack", dev.pinned::<f32>(4)?.into_dlpack(&[5]));
        }
        told("Device::pinned", dev.pinned::<f64>(FAR));
        let mut words = dev.zeros::<u32>(4)?;
        // SAFETY: the kernel is not found.
        told("Device::launch", unsafe { dev.launch(&TWINLESS, LaunchDims::cover(4), (&mut words,)) });
        told("Device::group", dev.group(&[7]));
        told("Group::group", group_of(dev).group(&[7]));
        told("Event::elapsed_since", dev.record()?.elapsed_since(&dev.record()?));
        #[cfg(feature = "cuda")]
        told("Device::cuda", dev.cuda());
        let (graph, ()) = dev.capture(|dev| dev.fill(&mut x, 1.0))?;
        // What waits is refused in a capture.
        let captured = dev.capture(|dev| {
            told("Device::capture", dev.capture(|_| Ok(())));
            told("Device::launch_graph", dev.launch_graph(&graph));
            told("Device::stream", dev.stream());
            told("Device::stream_with_priority", dev.stream_with_priority(0));
            told("Device::record", dev.record());
            told("Device::record_timed", dev.record_timed());
            told("Device::synchronize", dev.synchronize());
            both!(dev, barrier());
            both!(dev, exchange(7));
            Ok(())
        });
        assert!(captured.is_err());
        Ok(())
    });
}

#[test]
fn collectives_have_places() {
    on_one(|dev, far| {
        let sum = ReduceOp::Sum;
        let (x, mut y) = (dev.zeros::<f32>(4)?, dev.zeros::<f32>(5)?);
        both!(dev, all_reduce(far, sum));
        both!(dev, all_reduce_into(&x, &mut y, sum));
        both!(dev, all_reduce_many([&mut *far], sum));
        both!(dev, reduce(far, sum, 7));
        both!(dev, reduce_scatter(&x, &mut y, sum));
        both!(dev, reduce_scatter_v(&x, &mut y, &[1], sum));
        both!(dev, reduce_scatter_in_place(far, sum));
        both!(dev, all_gather(&x, &mut y));
        both!(dev, all_gather_v(&x, &mut y, &[1]));
        both!(dev, all_gather_in_place(far));
        both!(dev, broadcast(far, 7));
        both!(dev, gather(&x, None, 7));
        both!(dev, gather_v(&x, None, &[1], 7));
        both!(dev, scatter(None, &mut y, 7));
        both!(dev, scatter_v(None, &mut y, &[1], 7));
        both!(dev, all_to_all(&x, &mut y));
        both!(dev, all_to_all_v(&x, &[1], &mut y, &[1]));
        both!(dev, send(&x, 7));
        both!(dev, recv(&mut y, 7));
        both!(dev, sendrecv(&x, 7, &mut y, 7));
        both!(dev, send_owned(dev.zeros::<f32>(1)?, 7));
        both!(dev, recv_any::<f32>(7));
        both!(dev, give(7, 7, 7));
        both!(dev, take::<u8>(7, 7));
        Ok(())
    });
}

#[test]
fn operations_have_places() {
    on_one(|dev, far| {
        let (x, mut y, mut wide) = (dev.zeros::<f32>(4)?, dev.zeros::<f32>(5)?, dev.zeros::<u128>(1)?);
        told("Device::fill", dev.fill(&mut wide, 1));
        told("Device::scale", dev.scale(far, 2.0));
        told("Device::axpy", dev.axpy(1.0, &x, &mut y));
        told("Device::sum", dev.sum(far));
        told("Device::dot", dev.dot(&x, &y));
        told("Device::cast", dev.cast::<f64, _>(far));
        Ok(())
    });
}

#[test]
#[cfg(feature = "blas")]
fn matrices_have_places() {
    use gpu_pool::{Matrix, MatrixMut};
    on_one(|dev, _| {
        let (x, mut y) = (dev.zeros::<f32>(4)?, dev.zeros::<f32>(4)?);
        let (a, b) = (Matrix::new(&x, 2, 2)?, Matrix::new(&x, 4, 1)?);
        told("Device::gemm", dev.gemm(1.0, a, b, 0.0, &mut y));
        told("Device::gemm_tf32", dev.gemm_tf32(1.0, a, b, 0.0, &mut y));
        told("Device::matmul", dev.matmul(a, b));
        told("Matrix::new", Matrix::new(&x, 3, 2));
        told("Matrix::strided", Matrix::strided(&x, 2, 2, 1));
        told("Matrix::columns", a.columns(1..7));
        told("Matrix::rows", a.rows(1..7));
        told("Matrix::split_rows", a.split_rows(3));
        told("Matrix::split_columns", a.split_columns(3));
        told("Matrix::batch", a.batch(7, 7));
        told("MatrixMut::new", MatrixMut::new(&mut y, 3, 2));
        told("MatrixMut::strided", MatrixMut::strided(&mut y, 2, 2, 1));
        told("MatrixMut::columns", MatrixMut::new(&mut y, 2, 2)?.columns(1..7));
        told("MatrixMut::rows", MatrixMut::new(&mut y, 2, 2)?.rows(1..7));
        told("MatrixMut::split_rows", MatrixMut::new(&mut y, 2, 2)?.split_rows(3));
        told("MatrixMut::split_columns", MatrixMut::new(&mut y, 2, 2)?.split_columns(3));
        told("MatrixMut::batch", MatrixMut::new(&mut y, 2, 2)?.batch(7, 7));
        Ok(())
    });
}

#[test]
fn gradients_have_places() {
    on_one(|dev, far| {
        let none = GradientExchange::builder().bucket_bytes(0);
        told("GradientExchangeBuilder::build", none.build(dev, &[3]));
        told("GradientExchangeBuilder::build_in", none.build_in(&group_of(dev), &[3]));
        let mut own = GradientExchange::builder().build(dev, &[3, 4])?;
        told("GradientExchange::grad_mut", own.grad_mut(7));
        told("GradientExchange::grads_mut", own.grads_mut([0, 0]));
        told("GradientExchange::grad", own.grad(7));
        told("GradientExchange::lend", own.lend(7, dev.zeros(3)?));
        told("GradientExchange::take", own.take(0));
        told("GradientExchange::set_weight", own.set_weight(0.5));
        told("GradientExchange::grads_in_bucket", own.grads_in_bucket(7));
        told("GradientExchange::broadcast_parameters", own.broadcast_parameters(dev, &mut [&mut *far], 7));
        told("GradientExchange::ready", own.ready(dev, 7));
        told("GradientExchange::ready_from", own.ready_from(dev, 7, dev.zeros(3)?));
        told("GradientExchange::finish_bucket", own.finish_bucket(dev, 7).map(drop));
        told("GradientExchange::finish", own.finish(dev).map(drop));
        let captured = dev.capture(|dev| {
            told("GradientExchange::join", own.join(dev, true));
            told("GradientExchange::verify_parameters", own.verify_parameters(dev, &[&*far]));
            Ok(())
        });
        assert!(captured.is_err());
        own.reset(dev)?;
        own.ready(dev, 0)?;
        told("GradientExchange::set_sync", own.set_sync(false));
        own.ready(dev, 1)?;
        told("Exchanged::grad", own.finish(dev)?.grad(7));
        Ok(())
    });
}

#[test]
fn scopes_and_state_have_places() {
    guarded(|| {
        let builder = || support::builder().host(2);
        told("Builder::build", builder().memory_limit(4 << 20).memory_reserve(8 << 20).build());
        told("Builder::build_global", builder().weights(&[1.0]).build_global());
        let pool = builder().record_memory(false).build().unwrap();
        told("GpuPool::leaks", pool.leaks());
        told("Run::run", pool.on(&[7]).run(|_, _| Ok(())));
        told("DeviceRun::run", pool.on_device(7).run(|_| Ok(())));
        told("DeviceRun::try_run", pool.on_device(7).try_run(|_| Ok::<_, Error>(())));
        told("GpuPool::run_mut", pool.run_mut(&mut [0; 5], 0, |_, _, _| Ok(())));
        told("Run::run", pool.with(each_mut(&mut [0; 3])).run(|_, _, _| Ok(())));
        told("Run::run", pool.on(&[0]).with(vec![0; 3]).run(|_, _, _| Ok(())));
        told("GpuPool::record_trace", pool.record_trace("/no folder/trace.json", || ()));
        told("GpuPool::unified", pool.unified::<u64>(usize::MAX));
        told("GpuPool::pinned", pool.pinned::<u64>(FAR));
        let state = Mutex::new(pool.per_device(|_, _| Ok(0)).unwrap());
        let spare = Mutex::new(Some(builder().build().unwrap()));
        let free = pool.per_device(|_, _| Ok(0)).unwrap();
        pool.on(&[0])
            .run(|dev, _| {
                told("GpuPool::run", pool.run(|_, _| Ok(())));
                told("GpuPool::run_until", pool.run_until(&CancelToken::new(), |_, _| Ok(())));
                told("Run::run", pool.named("a").run(|_, _| Ok(())));
                told("GpuPool::try_run", pool.try_run(|_, _| Ok::<_, Error>(())));
                told("GpuPool::scope", GpuPool::scope(|_, _| Ok(())));
                told("Run::try_run", pool.named("a").try_run(|_, _| Ok::<_, Error>(())));
                told("Run::try_run", pool.with(vec![0; 3]).try_run(|_, _, _| Ok::<_, Error>(())));
                told("GpuPool::global", GpuPool::global());
                told("GpuPool::per_device", pool.per_device(|_, _| Ok(())));
                told("GpuPool::survivors", pool.survivors());
                told("GpuPool::memory_snapshots", pool.memory_snapshots());
                told("GpuPool::trim", pool.trim());
                told("GpuPool::close", spare.lock().take().unwrap().close());
                let mut state = state.lock();
                told("PerDevice::reset", state.reset(|_, _| Ok(0)));
                told("PerDevice::clear_poison", state.clear_poison());
                told("PerDevice::run", state.run(|_, _, _| Ok(())));
                told("Run::run", state.on(&[0]).run(|_, _, _| Ok(())));
                told("Run::try_run", state.on(&[0]).try_run(|_, _, _| Ok::<_, Error>(())));
                told("PerDevice::try_run", state.try_run(|_, _, _| Ok::<_, Error>(())));
                let _held = free.borrow_mut(dev)?;
                told("PerDevice::borrow", free.borrow(dev));
                told("PerDevice::borrow_mut", free.borrow_mut(dev));
                Ok(())
            })
            .unwrap();
        let mut state = state.into_inner();
        assert!(state.run(|_, _, _| Err::<(), _>(Error::custom("a test"))).is_err());
        told("PerDevice::run", state.run(|_, _, _| Ok(())));
        // A closure's own call has its own name, and not the scope's.
        state.clear_poison().unwrap();
        told("Device::group", state.run(|dev, _, _| dev.group(&[7]).map(drop)));

        told("Topology::validate", Topology::new("nothing").validate());
        #[cfg(feature = "topology-files")]
        {
            told("Topology::parse", Topology::parse("devices = 7"));
            told("Topology::from_file", Topology::from_file("no such file"));
            told("Topology::to_toml", Topology::new("nothing").to_toml());
        }
    });
}

#[test]
fn jobs_have_places() {
    guarded(|| {
        let pool = support::builder().host(1).memory_limit(4 << 20).build().unwrap();
        told("JobsBuilder::build", pool.jobs().queue(0).build());
        let jobs = pool.jobs().build().unwrap();
        told("JobSpec::submit", jobs.job().memory(u64::MAX).submit(|_| Ok(())));
        pool.run(|_, _| {
            told("Jobs::scope", jobs.scope(|_| ()));
            Ok(())
        })
        .unwrap();
    });
}

#[test]
#[cfg(feature = "tasks")]
fn tasks_have_places() {
    guarded(|| {
        let pool = support::builder().host(1).memory_limit(4 << 20).build().unwrap();
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        pool.run(|_, _| {
            told("GpuPool::tasks", pool.tasks(|_| Ok(())));
            told("GpuPool::tasks_in", pool.tasks_in(&threads, |_| Ok(())));
            Ok(())
        })
        .unwrap();
        let taken = pool.tasks(|t| {
            let mut x = t.cpu().run((), |()| Ok(1));
            assert_eq!(t.take(&mut x)?, 1);
            told("Tasks::get", t.get(&x));
            told("Tasks::read", t.read(&x, |_| ()));
            told("Tasks::take", t.take(&mut x));
            Ok(())
        });
        assert!(taken.is_ok() || taken.is_err());
        // What a task fails with has the place that has given it out, or that of its closure's own call.
        let run = pool.tasks(|t| {
            let big = t.cpu().run((), |()| Ok(vec![0.0f32; 2 << 20]));
            let line = line!() + 1;
            let there = t.gpu(0).upload(&big);
            let uploaded = failure(t.read(&there, |_| ()));
            let (op, file, at) = place(&uploaded).unwrap();
            assert_eq!((op, &file[..], at), ("upload", file!(), line), "{uploaded}");
            let x = t.gpu(0).run((), |dev, ()| told_and_back(dev));
            t.get(&x)
        });
        assert!(!matches!(run, Err(Error::Panicked { .. })), "{run:?}");
    });
}

#[cfg(feature = "tasks")]
fn told_and_back(dev: &Device) -> Result<()> {
    told("Device::group", dev.group(&[7]));
    Ok(())
}

/// The place is in the report, and the request is named.
#[test]
fn memory_that_is_used_up_has_a_place() {
    guarded(|| {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::OutOfMemory).op(FaultOp::ManagedAlloc));
        let plan = plan.on(FaultRule::new(Injected::OutOfMemory).op(FaultOp::VmMap)).paused();
        let pool = support::builder().host(1).faults(plan.clone()).build().unwrap();
        plan.resume();
        let error = failure(pool.unified::<f32>(1 << 20));
        assert!(matches!(error, Error::OutOfMemory { requested, .. } if requested == 4 << 20), "{error}");
        told("GpuPool::unified", pool.unified::<f32>(1 << 20));
    });
}

#[test]
fn what_a_lost_device_refuses_has_a_place() {
    guarded(|| {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::DeviceLost)).paused();
        let pool = support::builder().host(1).faults(plan.clone()).build().unwrap();
        let lost = pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(4)?;
            plan.resume();
            told("Device::fill", dev.fill(&mut x, 1.0));
            let line = line!() + 1;
            let error = failure(dev.sum(&x));
            assert!(matches!(error, Error::DeviceLost { op: "sum", site: Some(site), .. } if site.line() == line));
            Ok(())
        });
        assert!(matches!(lost, Err(Error::DeviceLost { device: 0, .. })), "{lost:?}");
    });
}

/// The table of exceptions is read by `.ci/places.py`.
#[test]
fn exceptions_have_reasons() {
    assert!(EXCEPTED.iter().all(|(name, why)| !name.is_empty() && !why.is_empty()));
}
