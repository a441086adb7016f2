//! A value for another process covers what its giver has submitted before, and nothing else. Without a clock.

use crate::fleet::{Fleet, pool, say};
use gpu_pool::{Builder, DeviceBuffer, Error, LaunchDims, Module, kernel};
use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::Duration,
};

static OPEN: [AtomicBool; 2] = [AtomicBool::new(false), AtomicBool::new(false)];

/// Only software GPUs run this.
static MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");

kernel! {
    /// Waits until the program has opened gate `gate`, and then writes.
    static AWAIT: "await" in MODULE, fn(x: &mut [u32], gate: u64) |_dims| {
        while !OPEN[gate as usize].load(SeqCst) {
            thread::sleep(Duration::from_micros(100));
        }
        x.fill(7);
    }
}

pub fn child(builder: Builder) -> Result<(), Error> {
    let pool = pool(builder.module(&MODULE))?;
    let found = pool.run(|dev, _| {
        let world = dev.world()?;
        if world.rank() == 1 {
            let x = world.take::<DeviceBuffer<u32>>(0, 0)?;
            world.give((), 0, 1)?;
            return dev.download(&x);
        }
        let (mut x, mut other) = (dev.zeros::<u32>(1000)?, dev.zeros::<u32>(1)?);
        // SAFETY: the kernel fits its signature.
        unsafe { dev.launch(&AWAIT, LaunchDims::cover(1), (&mut x, 0u64))? };
        world.give(x, 1, 0)?;
        // Who waits for the device in `give` does not get here.
        OPEN[0].store(true, SeqCst);
        // SAFETY: as above.
        unsafe { dev.launch(&AWAIT, LaunchDims::cover(1), (&mut other, 1u64))? };
        // This comes while the second kernel runs.
        world.take::<()>(1, 1)?;
        OPEN[1].store(true, SeqCst);
        dev.download(&other)
    })?;
    say(format!("{:?}", (found[0].len(), found[0].iter().all(|x| *x == 7))));
    pool.close()
}

#[test]
fn a_value_waits_for_what_came_before_and_for_nothing_else() {
    let said = Fleet::start("value", &[1, 1]).said().concat();
    assert_eq!(said, ["(1, true)", "(1000, true)"]);
}
