//! Exhibits: programs in which everyone waits for everyone.

use super::bare::{Gpu, Mem, Stream};
use super::prelude::*;
use gpu_pool::{ReduceOp, extend::driver::DriverResult};

/// Numbers in a buffer.
const N: usize = 1 << 12;

exhibits! { "waits.rs"

"crossing": "Two models, two threads, the same two devices" {
    "Each model's collective spins on a device until the other device has come to it. Two threads launch theirs on \
     the two devices in opposite order, and each device spins for what the other has queued behind."
    seen "pytorch/pytorch" issues 8388: "two `DataParallel`s at once lock up all GPUs"
    wrong crossing_wrong, "fn meet(" => Caught::Deadlock, Never
    right crossing_right =>
        "Scopes that share devices reach them in one order, whatever threads and pools they come from."
}

"nested-scope": "A scope within a scope" {
    "A helper that uses all devices is called from code that runs on a device: the device's thread would wait for \
     work that only it can do."
    seen "rayon-rs/rayon" issues 446: "nested `install` calls deadlock"
    wrong nested_scope_wrong => Caught::Error(Refusal::NestedScope), Runs
    right nested_scope_right => "The helper takes the device token and a collective instead of a pool."
}

}

/// A device's part of a collective: says that it is there, and spins until the other is.
#[track_caller]
fn meet(gpu: &Gpu, stream: Stream, mine: Mem, theirs: Mem) -> DriverResult {
    gpu.raise(mine, 1, stream)?;
    gpu.spin(theirs, 1, stream)
}

fn crossing_wrong(ground: &Ground) -> Outcome {
    let [a, b] = ground.bare()?;
    a.enable_peer(&b)?;
    b.enable_peer(&a)?;
    let (s, t) = (a.stream()?, b.stream()?);
    let red = [a.alloc(2)?, b.alloc(2)?]; // a flag on each device, for the first model
    let blue = [a.alloc(2)?, b.alloc(2)?]; // and for the second
    for flag in [red[0], blue[0]] {
        a.fill(flag, 0.0, s)?;
    }
    for flag in [red[1], blue[1]] {
        b.fill(flag, 0.0, t)?;
    }
    a.sync(s)?;
    b.sync(t)?;
    meet(&a, s, red[0], red[1])?; // one thread is first on device 0,
    meet(&b, t, blue[1], blue[0])?; // the other on device 1
    meet(&a, s, blue[0], blue[1])?;
    meet(&b, t, red[1], red[0])?;
    a.sync(s)?;
    b.sync(t)?;
    Ok(Seen::Right)
}

fn crossing_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let step = |devices: [usize; 2]| {
        pool.on(&devices).run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; N])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        })
    };
    let both = std::thread::scope(|threads| {
        let crossing = [[0, 1], [1, 0]].map(|devices| threads.spawn(move || step(devices)));
        crossing.map(|thread| thread.join().expect("scopes do not panic"))
    });
    let [red, blue] = both;
    Ok(Seen::all(&[red?, blue?].concat().concat(), 2.0))
}

fn nested_scope_wrong(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let helper = |x: f32| pool.run(|dev, _| dev.download(&dev.upload(&[x])?));
    let sums = pool.run(|_, shard| Ok(helper(shard.index() as f32)?.concat()))?;
    Ok(Seen::all(&sums.concat(), 1.0))
}

fn nested_scope_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let sums = pool.run(|dev, shard| {
        let mut x = dev.upload(&[shard.index() as f32])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    })?;
    Ok(Seen::all(&sums.concat(), 1.0))
}
