#!/usr/bin/env bash
# Each feature alone compiles without a warning, and so do all of them, with the oldest compiler that Cargo.toml
# promises. (`lint` has the newest one, and `test-bare` no feature at all.)
source "$(dirname "$0")/env.sh"

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if rustup toolchain install "$oldest" --profile minimal --no-self-update; then
    toolchain=+$oldest
else
    toolchain=+stable
    echo "note: Rust $oldest cannot be had here; $(cargo "$toolchain" --version) checks the features"
fi
features=$(sed -n '/^\[features\]/,/^\[dep/s/^\([a-z-]*\) = .*/\1/p' Cargo.toml | grep -v '^default$')
check() { RUSTFLAGS="-D warnings" cargo "$toolchain" check --quiet --locked --lib --target-dir target/oldest "$@"; }

for feature in $features; do
    echo "$feature"
    check --no-default-features --features "$feature"
done
check --all-features
