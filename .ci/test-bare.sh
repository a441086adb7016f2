#!/usr/bin/env bash
# The runtime alone, without any features: it builds, and its unit tests pass, with no trace of CUDA or BLAS.
source "$(dirname "$0")/env.sh"

# Not what the tests build: their dependencies have more features.
cargo check --package gpu-pool --no-default-features
cargo test --package gpu-pool --no-default-features --lib
