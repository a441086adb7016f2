#!/usr/bin/env bash
# The sources of all crates are formatted as rustfmt.toml says.
source "$(dirname "$0")/env.sh"

cargo fmt --all --check
rustfmt --edition 2024 --check examples/own_kernel/*/*.rs
