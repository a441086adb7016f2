//! Measures data-parallel training steps of a perceptron 784-2048-2048-10 in `f32` (no TF32), with stochastic gradient
//! descent: how much of the gradient exchange is exposed after the backward pass.
//!
//! The peer is PyTorch's DistributedDataParallel with bucket views, started by torchrun (`peers/ddp.py`): one process
//! per GPU, on the same GPUs, in turn. Both sides have DDP's bucket sizes, the same shapes, weights in torch's layout,
//! and cuBLAS for the products. Without torch there is no peer. Times are of many steps in a row, from idle devices to
//! idle devices, of the slowest member.
//!
//! * `<gpu or software>/step/<devices>/<batch>`: microseconds per step, `batch` rows over all devices
//! * `.../alone/...`: the same without exchange (DDP's `no_sync`)
//! * `.../exposed/...`: the difference of the two, in each turn

#[path = "support/perceptron.rs"]
mod perceptron;
mod support;

use std::{cell::RefCell, time::Instant};

use gpu_pool::{GpuPool, PerDevice};
use perceptron::Replica;
use support::{Bench, MICROSECONDS, Side, child::Process, gpus};

/// Microseconds per step, over `steps` in a row.
fn time(model: &mut PerDevice<Replica>, sync: bool, steps: usize) -> f64 {
    let times = model.run(|dev, _, replica| {
        replica.set_sync(sync)?;
        dev.synchronize()?;
        dev.barrier()?;
        let clock = Instant::now();
        (0..steps).try_for_each(|_| replica.step(dev))?;
        dev.synchronize()?;
        Ok(clock.elapsed().as_secs_f64() * 1e6)
    });
    times.expect("steps").into_iter().fold(0.0, f64::max) / steps as f64
}

/// Replicas with the same steps are equal, bit for bit.
fn assert_equal(model: &mut PerDevice<Replica>) {
    let weights = model.run(|dev, _, replica| replica.last_weights(dev));
    let weights = weights.expect("the weights");
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(weights.iter().all(|x| x[0].is_finite() && bits(x) == bits(&weights[0])), "the replicas drifted apart");
}

/// Sends the peer an order, and returns its answer.
fn ask(peer: &RefCell<Process>, batch: usize, sync: bool, steps: usize) -> f64 {
    let mut peer = peer.borrow_mut();
    peer.order(&format!("{batch}:{}", if sync { "step" } else { "alone" }), steps);
    peer.answer()
}

fn main() {
    let mut bench = Bench::new("overlap");
    let hardware = gpus::count();
    let software = hardware == 0;
    let case = if software { "software" } else { "gpu" };
    bench.set_turns(2, bench.size(15, 3));
    for devices in gpus::powers(if software { 2 } else { hardware }) {
        let batches: &[usize] = if software { &[64] } else { &[8192, 65536] };
        let name = |what: &str, batch: usize| format!("{case}/{what}/{devices}/{batch}");
        if !batches.iter().any(|&batch| ["step", "alone", "exposed"].iter().any(|what| bench.wants(&name(what, batch))))
        {
            continue;
        }
        let peer = if software { None } else { Process::torch("ddp.py", devices, &[&devices.to_string()], &[]) };
        let peer = peer.map(RefCell::new);
        for &batch in batches {
            let builder = GpuPool::builder();
            let builder = match software {
                true => builder.host(devices),
                false => builder.cuda().devices(&(0..devices).collect::<Vec<_>>()),
            };
            let pool = builder.build().expect("the devices can be opened");
            let mut model = pool.per_device(|dev, _| Replica::new(&dev.world()?, batch)).expect("memory for it");
            time(&mut model, true, 3);
            assert_equal(&mut model);
            let model = RefCell::new(model);
            let steps = bench.size((200_000 / batch).clamp(5, 20), 2);
            // Without exchange replicas drift apart, which does not change the time.
            let ours = |sync| time(&mut model.borrow_mut(), sync, steps);
            for (what, sync) in [("step", true), ("alone", false)] {
                let theirs = |peer| Side::new("DDP", move || ask(peer, batch, sync, steps));
                let peers = peer.iter().map(theirs).collect();
                bench.compare(&name(what, batch), MICROSECONDS, Side::new("gpu-pool", || ours(sync)), peers);
            }
            if devices > 1 {
                let theirs =
                    |peer| Side::new("DDP", move || ask(peer, batch, true, steps) - ask(peer, batch, false, steps));
                let peers = peer.iter().map(theirs).collect();
                let ours = Side::new("gpu-pool", || ours(true) - ours(false));
                bench.compare(&name("exposed", batch), MICROSECONDS, ours, peers);
            }
        }
    }
    bench.finish();
}
