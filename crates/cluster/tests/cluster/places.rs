//! Each public function of this crate that can fail is called wrongly: its error names the function, and its call in
//! this file.
//!
//! `.ci/places.py` compares this table with rustdoc's pages, so that no function is forgotten: it reads the names in
//! [`told`] and [`EXCEPTED`].

use crate::{
    support::{builder, failure, guarded},
    told::{group_of, on_one_of, told},
};
use gpu_pool::Error;
use gpu_pool_cluster::prelude::*;
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::time::Duration;

/// Functions that are not called wrongly here, and why.
#[allow(dead_code, reason = "`.ci/places.py` reads it")]
#[rustfmt::skip]
const EXCEPTED: [(&str, &str); 4] = [
    ("Cluster::from_env", "it reads the process's environment; `Error::Cluster` names the variable"),
    ("Cluster::launched", "it reads the process's environment; `Error::Cluster` names the variable"),
    ("Cluster::tcp", "`Error::Cluster` names the setting"),
    ("Group::exchange_serde", "only a value that serde cannot write can fail it"),
];

#[test]
fn calls_with_memory_of_two_processes_have_places() {
    on_one_of(builder(), |dev, far| {
        told("Device::exportable", dev.exportable::<f64>(usize::MAX / 64));
        told("Device::wait_released", dev.wait_released(far, Duration::ZERO));
        told("DeviceBuffer::export", far.export());
        told("DeviceBuffer::export_mut", far.export_mut());
        told("DeviceBuffer::withdraw", far.withdraw());
        told("Group::register", group_of(dev).register(far));
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
