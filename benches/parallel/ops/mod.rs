//! Each operation of `ops` against PyTorch's, as kernel time: both sides replay graphs of 20 operations on one GPU.
//!
//! The 20 operations of a graph have 20 inputs, and 20 outputs that stay alive, so that no operation finds its input in
//! the cache because the one before it has left it there. The memory is filled with normal noise on the GPU. Target: at
//! most 1.15 times torch's time, so a ratio of at least 0.87.
//!
//! Peers are PyTorch's functions without `torch.compile` (`torch`), and with it for a bias with GELU, which it fuses
//! (`torch.compile`; each shape costs seconds).
//!
//! On software GPUs, with 64 rows of 256, the numbers show only that the program works.

mod calls;
mod rig;

use std::cell::RefCell;

use gpu_pool::GpuPool;
use half::bf16;

use self::{
    calls::Call,
    rig::{Number, Rig},
};
use crate::{
    Machine,
    support::{Bench, MICROSECONDS, Side, child::Torch},
};

/// Operations in a graph.
const CHAIN: usize = 20;
/// How long a side's turn takes, in microseconds, if one launch is shorter.
const TURN: f64 = 8000.0;

pub fn run(bench: &mut Bench, machine: &Machine) {
    let pool = machine.pool(1);
    let mut torch = None;
    let columns: &[usize] = if machine.software { &[256] } else { &[1024, 4096, 8192] };
    for &cols in columns {
        of_type::<f32>(bench, machine, &pool, &mut torch, cols);
        of_type::<bf16>(bench, machine, &pool, &mut torch, cols);
    }
}

/// All operations on one type and width. Starts torch for the first case that is wanted.
fn of_type<T: Number>(
    bench: &mut Bench,
    machine: &Machine,
    pool: &GpuPool,
    torch: &mut Option<Option<Torch>>,
    cols: usize,
) {
    let case = |call: &Call<T>| format!("{}/ops/{}/{}/{cols}", machine.kind, call.name, T::NAME);
    let calls: Vec<_> = calls::all::<T>().into_iter().filter(|call| bench.wants(&case(call))).collect();
    if calls.is_empty() {
        return;
    }
    let torch = torch.get_or_insert_with(|| machine.torch("ops.py", 1)).as_ref();
    let rows = if machine.software { 64 } else { 4096 };
    let rig = pool.per_device(|dev, _| Rig::<T>::new(dev, rows, cols, CHAIN)).expect("memory for it");
    let rig = RefCell::new(rig);
    for call in calls {
        let captured = rig.borrow_mut().run(|dev, _, rig| rig.capture(dev, call.run));
        captured.unwrap_or_else(|error| panic!("{}: {error}", case(&call)));
        let time = |launches| {
            let times = rig.borrow_mut().run(|dev, _, rig| rig.time(dev, launches));
            times.expect("a launch")[0]
        };
        let launches = (TURN / CHAIN as f64 / time(1)).clamp(1.0, 50.0) as usize;
        // A product is long enough for few turns.
        bench.set_turns(1, bench.size(if call.name.starts_with("gemm") { 5 } else { 7 }, 3));
        let mut peers = Vec::new();
        for form in call.peers {
            let order = format!("{}:{form}:{}:{rows}:{cols}", call.name, T::NAME);
            match torch {
                Some(torch) if torch.ask(&order, 0).is_finite() => peers.push(torch.side(form, order, launches)),
                Some(_) => println!("{form} has no {}, see above", case(&call)),
                None => {}
            }
        }
        bench.compare(&case(&call), MICROSECONDS, Side::new("gpu-pool", || time(launches)), peers);
    }
}
