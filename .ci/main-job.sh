#!/usr/bin/env bash
# The main job on four devices, software GPUs where there is no hardware: it trains and checks what it reached.
source "$(dirname "$0")/env.sh"

cargo run --release --example train_digits -- --devices 4 --epochs 30 --check

# Small examples that are in no test. They check their results: the loss of `pipeline` falls in each step.
for example in quickstart optimizer_loop pipeline; do
    cargo run --release --example "$example" | tail -n 2
done
cargo run --release --example memory_map -- target/release/memory_map.pickle

# A trace of it is one that viewers read.
.ci/trace.sh
