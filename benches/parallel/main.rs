//! Measures the jobs of `parallel` and the operations of `ops` against PyTorch, which runs in processes of its own and
//! takes its turns on command (`benches/peers`). Without torch or GPUs there is no peer.
//!
//! * `<gpu or software>/ops/<operation>/<f32 or bf16>/<columns>`: microseconds of one operation on 4096 rows, see `ops`
//! * `.../task/..`: microseconds of an empty task, see `task`
//! * `.../hop/..`, `.../pipeline/..`: microseconds of a hop, milliseconds of a step, see `pipeline`
//! * `.../data_parallel/<devices>/<rows>`, `.../step_sharded/..`, `.../step_sharded_graph/..`,
//!   `.../step_captured/..`: microseconds of a training step, see `data_parallel`
//! * `.../products/..`: 50 products of matrices, see `products`
//! * `.../tensor/..`, `.../tensor_blocks/..`: microseconds of a product and its exchange, see `tensor`
//!
//! `cargo bench --bench parallel -- ops/` runs one part; the others are `/task/`, `hop/`, `pipeline/`,
//! `data_parallel/`, `step_`, `products/`, `tensor/` and `tensor_blocks/`. All of them are planned to take less
//! than 6 minutes on 2 H200s, half of it for `ops/`.

#[path = "../support/mod.rs"]
mod support;

mod data_parallel;
mod machine;
mod ops;
mod pipeline;
mod products;
mod stack;
mod task;
mod tensor;

use machine::Machine;
use support::Bench;

fn main() {
    let mut bench = Bench::new("parallel");
    let machine = Machine::new();
    ops::run(&mut bench, &machine);
    task::run(&mut bench, &machine);
    pipeline::run(&mut bench, &machine);
    data_parallel::run(&mut bench, &machine);
    products::run(&mut bench, &machine);
    tensor::run(&mut bench, &machine);
    bench.finish();
}
