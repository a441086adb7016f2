#!/usr/bin/env bash
# Other sets of features than the default one. Without any: the crate builds, and its unit tests pass, with no trace of
# CUDA or BLAS.
source "$(dirname "$0")/env.sh"

cargo build --no-default-features
cargo test --no-default-features --lib

# What is behind a feature that `cargo test` does not have: machines from files.
cargo test --features topology-files --test schedules virtual_time::
cargo test --features topology-files --doc topology
