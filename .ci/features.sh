#!/usr/bin/env bash
# Each feature alone of each crate compiles without a warning, and so do all of them, with the oldest compiler that
# Cargo.toml promises. (`lint` has the newest one, and no feature at all.)
source "$(dirname "$0")/env.sh"

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if rustup toolchain install "$oldest" --profile minimal --no-self-update; then
    toolchain=+$oldest
else
    toolchain=+stable
    echo "note: Rust $oldest cannot be had here; $(cargo "$toolchain" --version) checks the features"
fi
check() { RUSTFLAGS="-D warnings" cargo "$toolchain" check --quiet --locked --lib --target-dir target/oldest "$@"; }

# `cargo hack --each-feature` does the same, but a clean machine would have to compile it first.
cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
for package in json.load(sys.stdin)["packages"]:
    for feature in sorted(package["features"].keys() - {"default"}):
        print(package["name"], feature)
' | while read -r crate feature; do
    echo "$crate: $feature"
    check --package "$crate" --no-default-features --features "$feature"
done
check --workspace --all-features
