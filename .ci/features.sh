#!/usr/bin/env bash
# Each feature alone of each crate compiles without a warning, and so do none and all of them, with the oldest compiler
# that Cargo.toml promises. (`lint` has the newest one.) They are 26 builds: here a third of them, another one at each
# commit. `PARTS=1 .ci/features.sh` builds all.
source "$(dirname "$0")/env.sh"

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if rustup toolchain install "$oldest" --profile minimal --no-self-update; then
    toolchain=+$oldest
else
    toolchain=+stable
    echo "note: Rust $oldest cannot be had here; $(cargo "$toolchain" --version) checks the features"
fi

# Unoptimised it builds in half a minute on two cores.
version=0.6.46
tools=$PWD/target/tools
if [[ $("$tools/bin/cargo-hack" hack --version 2>/dev/null) != "cargo-hack $version" ]]; then
    CARGO_PROFILE_DEV_DEBUG=0 cargo install cargo-hack --version "$version" --locked --debug --quiet --root "$tools" \
        --target-dir "$tools/build"
    rm -rf "$tools/build"
fi
export RUSTFLAGS="-D warnings" CARGO_TARGET_DIR=target/oldest
parts=${PARTS:-3}
part=$((0x$(git rev-parse --short=7 HEAD) % parts + 1))
PATH=$tools/bin:$PATH cargo "$toolchain" hack check --workspace --each-feature --exclude-features default --lib \
    --partition "$part/$parts" --quiet --locked
cargo "$toolchain" check --workspace --all-features --lib --quiet --locked
