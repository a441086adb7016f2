//! Each public function of this crate that can fail is called wrongly: its error names the function, and its call in
//! this file.
//!
//! `.ci/places.py` compares this table with rustdoc's pages, so that no function is forgotten: it reads the names in
//! [`told`] and [`EXCEPTED`].

use crate::support::{builder, failure, guarded};
use gpu_pool::{
    Error, Result,
    testing::{FaultOp, FaultPlan, FaultRule, Injected},
};
use gpu_pool_cluster::prelude::*;
use std::{panic::Location, time::Duration};

/// Functions that are not called wrongly here, and why.
#[allow(dead_code, reason = "`.ci/places.py` reads it")]
#[rustfmt::skip]
const EXCEPTED: [(&str, &str); 4] = [
    ("Cluster::from_env", "it reads the process's environment; `Error::Cluster` names the variable"),
    ("Cluster::launched", "it reads the process's environment; `Error::Cluster` names the variable"),
    ("Cluster::tcp", "`Error::Cluster` names the setting"),
    ("Group::exchange_serde", "only a value that serde cannot write can fail it"),
];

/// The operation that an error names, and its place: file and line.
fn place(error: &Error) -> Option<(&'static str, String, u32)> {
    use Error::*;
    match error {
        InvalidArgument { op, site, .. } | WrongPool { op, site, .. } => {
            Some((op, site.file().to_owned(), site.line()))
        }
        OutOfMemory { op, report, .. } => {
            report.site.as_ref().map(|site| (*op, site.file.clone().into_owned(), site.line))
        }
        _ => None,
    }
}

#[track_caller]
fn told<T>(name: &str, result: Result<T>) {
    let here = Location::caller();
    let Err(error) = result else { panic!("{name} at {here} has not failed") };
    let Some((op, file, line)) = place(&error) else { panic!("{name} at {here}: no place in {error}") };
    assert_eq!(file, file!(), "{name}: {error}");
    assert!((here.line()..here.line() + 12).contains(&line), "{name} at {here}: {error}");
    assert_eq!(op.rsplit("::").next(), name.rsplit("::").next(), "{name}: {error}");
    assert!(error.to_string().contains(&format!("{file}:{line}")), "{name}: no place in the text: {error}");
}

#[test]
fn calls_with_memory_of_two_processes_have_places() {
    guarded(|| {
        let other = builder().host(1).build().unwrap();
        let mut far = other.run(|dev, _| dev.zeros::<f32>(4)).unwrap().remove(0);
        let pool = builder().host(1).memory_limit(4 << 20).build().unwrap();
        let far = parking_lot::Mutex::new(&mut far);
        pool.run(|dev, _| {
            let far = &mut **far.lock();
            told("Device::exportable", dev.exportable::<f64>(usize::MAX / 64));
            told("Device::wait_released", dev.wait_released(far, Duration::ZERO));
            told("DeviceBuffer::export", far.export());
            told("DeviceBuffer::export_mut", far.export_mut());
            told("DeviceBuffer::withdraw", far.withdraw());
            told("Group::register", dev.group(&[0])?.register(far));
            let x = dev.exportable::<f32>(3)?;
            let ipc = x.export()?;
            told("Device::import", dev.import::<f64>(&ipc));
            let imported = dev.import::<f32>(&ipc)?;
            let captured = dev.capture(|dev| {
                told("Imported::release", imported.release(dev));
                Ok(())
            });
            assert!(captured.is_err());
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn memory_that_is_used_up_has_a_place() {
    guarded(|| {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::OutOfMemory).op(FaultOp::VmMap)).paused();
        let pool = builder().host(1).faults(plan.clone()).build().unwrap();
        plan.resume();
        pool.run(|dev, _| {
            let error = failure(dev.exportable::<f32>(1 << 20));
            assert!(matches!(error, Error::OutOfMemory { requested, .. } if requested >= 4 << 20), "{error}");
            told("Device::exportable", dev.exportable::<f32>(1 << 20));
            Ok(())
        })
        .unwrap();
    });
}
