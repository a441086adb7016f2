#!/usr/bin/env bash
# Without any features: the crate builds, and its unit tests pass, with no trace of CUDA or BLAS.
source "$(dirname "$0")/env.sh"

# Not what the tests build: their dependencies have more features.
cargo check --no-default-features
cargo test --no-default-features --lib
