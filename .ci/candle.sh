#!/usr/bin/env bash
# crates/candle, which is a package outside of the workspace: its CPU half is formatted, has nothing to say to clippy,
# passes its tests, and its programs reach what they check. Its feature `cuda` needs nvcc.
source "$(dirname "$0")/env.sh"

# Not the target folder of the tests: this package has other dependencies, and optimises them.
export CARGO_TARGET_DIR=$PWD/target/candle CARGO_PROFILE_DEV_DEBUG=0
cd crates/candle
cargo fmt --check
cargo clippy --all-targets -- -D warnings
cargo test
for example in candle_digits candle_llama candle_serve; do
    GPU_POOL_BACKEND=host:3 cargo run --example "$example"
done
RUSTDOCFLAGS="-D warnings" cargo doc --no-deps
