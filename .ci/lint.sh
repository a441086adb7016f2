#!/usr/bin/env bash
# Clippy has nothing to say, with any of the features; and under cfg(loom) nothing in src/ slips past sync/shim.rs
# (the disallowed types of loom_tests/lint/clippy.toml: only in loom mode do the shim's own types differ from std's).
source "$(dirname "$0")/env.sh"

# The runtime alone: with the others it would get the features that their tests ask for. (`features` has the others.)
cargo clippy --package gpu-pool --all-targets --no-default-features -- -D warnings
cargo clippy --workspace --all-targets --all-features -- -D warnings
cargo loom-lint
