//! What a device does after its launch. Kernels that spin there are on GPUs only (`tests/processes/crowd.rs`).

use super::LaunchWindow;
use crate::driver::gate;
use std::{sync::mpsc, thread};

#[test]
fn who_shares_a_gpu_goes_on_when_all_have_launched() {
    gate::launches().open(3);
    let (tell, told) = mpsc::channel();
    thread::scope(|s| {
        s.spawn(move || {
            drop(LaunchWindow { shares: true });
            tell.send(()).unwrap();
        });
        // One that has a GPU for itself goes on at once.
        drop(LaunchWindow { shares: false });
        // Its own launch is over, and it waits.
        while !gate::launches().is_blocked() {
            thread::yield_now();
        }
        assert!(told.try_recv().is_err(), "it went on before the third one");
        drop(LaunchWindow { shares: false });
        told.recv().unwrap();
    });
}
