//! The prediction: the copy-engine ring that was measured on 8 x H200, on the model of that
//! machine.

use super::ring::{self, Ring, Timing};
use gpu_pool::extend::driver::host::{self, ExecutionOrder, HostConfig, MachineConfig};
use gpu_pool_lab::{Topology, topology::HostCosts};
use std::sync::Arc;

const MB: usize = 1 << 20;

fn predict(machine: &Topology, bytes: usize, pieces: usize) -> Timing {
    let settings = MachineConfig {
        schedule: ExecutionOrder::Virtual,
        topology: Some(Arc::new(machine.clone())),
        dry: true,
        ..MachineConfig::default()
    };
    let gpus = host::machine_with(&machine.host_configs(), &settings).unwrap();
    Ring::new(&gpus, bytes, pieces).unwrap().run(4).unwrap()
}

#[test]
fn the_ring_that_is_predicted_adds_up() {
    for devices in [2, 3, 4] {
        let gpus = host::machine(&vec![HostConfig::default(); devices]);
        for pieces in [1, 2, 3] {
            ring::check(&gpus, pieces).unwrap();
        }
    }
}

#[test]
fn the_ring_adds_up_in_virtual_time_too() {
    let machine = Topology::nvswitch(4);
    let settings = MachineConfig {
        schedule: ExecutionOrder::Virtual,
        topology: Some(Arc::new(machine.clone())),
        ..MachineConfig::default()
    };
    ring::check(&host::machine_with(&machine.host_configs(), &settings).unwrap(), 2).unwrap();
}

/// `wait_us` was chosen so that 256 MB comes out right, in sight of both numbers, which leave the same time for each
/// copy beyond its bytes. So 256 MB agrees by construction, and 1 GB shows no more than that the two are consistent.
/// The issue asks for 15 %; the narrower bound keeps the model from drifting.
#[test]
fn the_measured_times_are_predicted() {
    let machine = Topology::nvswitch(8);
    for (bytes, measured) in [(256 * MB, 1355.0), (1024 * MB, 4947.0)] {
        let predicted = predict(&machine, bytes, 2).call;
        let off = predicted / measured - 1.0;
        println!("{} MB: {predicted:.1} us predicted, {measured} measured, {:+.2} %", bytes / MB, 100.0 * off);
        assert!(off.abs() < 0.15, "{bytes} bytes: {predicted} us predicted, {measured} measured");
        assert!(off.abs() < 0.02, "worse than when the model was made: {predicted} us");
    }
}

/// The one test of the model with numbers that it was not made from: the same program
/// (a ring of copies, two pieces) on 4 H200s of another day. The predictions were made before it was
/// run.
#[test]
fn four_devices_are_predicted_that_the_model_was_not_made_from() {
    let machine = Topology::nvswitch(4);
    for (bytes, measured) in [(64, 328.2), (128, 582.5), (256, 1099.3), (512, 2123.5), (1024, 4172.9)] {
        let predicted = predict(&machine, bytes * MB, 2).call;
        let off = predicted / measured - 1.0;
        println!("{bytes} MB: {predicted:.1} us predicted, {measured} measured, {:+.2} %", 100.0 * off);
        assert!(off.abs() < 0.03, "{bytes} MB: {predicted} us predicted, {measured} measured");
    }
}

/// A lower bound that holds whatever the latencies: every device sends 2 (n - 1) / n of the buffer over one link.
#[test]
fn no_prediction_beats_the_links() {
    for devices in [2, 8, 16] {
        for bytes in [64 * MB, 1024 * MB] {
            let predicted = predict(&Topology::nvswitch(devices), bytes, 2).call;
            let least = 2.0 * (devices - 1) as f64 / devices as f64 * bytes as f64 / 392.5e3;
            assert!(predicted > least, "{devices} devices, {bytes} bytes: {predicted} us, at least {least}");
            assert!(
                predicted < 2.0 * least + 500.0,
                "{devices} devices, {bytes} bytes: {predicted} us, at least {least}"
            );
        }
    }
}

#[test]
fn the_same_program_takes_the_same_time() {
    let machine = Topology::nvswitch(4).with_device(2, |device| device.speed = 0.7);
    let first = predict(&machine, 8 * MB, 2);
    for _ in 0..3 {
        assert_eq!(predict(&machine, 8 * MB, 2), first);
    }
}

/// Pieces let one addition hide behind the next copy, and cost a latency each: worth it for large buffers, not for
/// small.
#[test]
fn two_pieces_pay_for_large_buffers_only() {
    let machine = Topology::nvswitch(8).with_host(|host| *host = HostCosts::FREE);
    let time = |bytes, pieces| predict(&machine, bytes, pieces).call;
    assert!(time(1024 * MB, 2) < time(1024 * MB, 1));
    assert!(time(MB, 1) < time(MB, 2));
}

/// A ring is as fast as its slowest link.
#[test]
fn the_network_sets_the_pace_of_two_nodes() {
    let bytes = 256 * MB;
    let one = predict(&Topology::nvswitch(16), bytes, 2).call;
    let two = predict(&Topology::two_nodes(8, 50.0, 10.0), bytes, 2).call;
    let fast = predict(&Topology::two_nodes(8, 392.5, 1.9), bytes, 2).call;
    let network = 2.0 * 15.0 / 16.0 * bytes as f64 / 50e3;
    assert!(two > network && two < 1.1 * network, "{two} us over a network that needs {network}");
    assert!((fast / one - 1.0).abs() < 0.02, "a network like the switch: {fast} us, {one} on one switch");
}
