#!/usr/bin/env bash
# Without features: the crate builds, and its unit tests pass, with no trace of CUDA or BLAS.
source "$(dirname "$0")/env.sh"

cargo build --no-default-features
cargo test --no-default-features --lib
