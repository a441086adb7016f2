#!/usr/bin/env bash
# Clippy has nothing to say, with any of the features; and under cfg(loom) nothing in src/ slips past sync/shim.rs
# (the disallowed types of loom_tests/lint/clippy.toml: only in loom mode do the shim's own types differ from std's).
source "$(dirname "$0")/env.sh"

# One by one: together, one crate would get the features that another one's tests ask for. Tests of the crates above
# have features of the runtime in any case.
cargo clippy --package gpu-pool --all-targets --no-default-features -- -D warnings
for crate in "${crates[@]:1}"; do
    cargo clippy --package "$crate" --lib --bins --no-default-features -- -D warnings
done
cargo clippy --workspace --all-targets --all-features -- -D warnings
cargo loom-lint
