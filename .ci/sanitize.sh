#!/usr/bin/env bash
# Miri over the tests of src/sync and tests/sync and over one whole pool of software GPUs, and ThreadSanitizer over
# collectives.
#
# Both need a nightly toolchain. This step installs none: it says what it leaves out, and that is no failure.
source "$(dirname "$0")/env.sh"

# Rustup would fetch a toolchain that is not there, and `cargo miri` the sources of std.
export RUSTUP_AUTO_INSTALL=0
sources=$(rustc +nightly --print sysroot 2>/dev/null || true)/lib/rustlib/src/rust/library/Cargo.lock

# Miri's own clock, without the machine's files: a run is the same each time, and sleeping takes no time. Addresses of
# devices are numbers, so pointers are made from them: that is what the second flag allows.
if [[ -f $sources ]] && cargo +nightly miri --version 2>/dev/null; then
    flags="-Zmiri-isolation-error=hide -Zmiri-permissive-provenance -Zmiri-num-cpus=4"
    MIRIFLAGS="$flags -Zmiri-env-set=PROPTEST_CASES=4" \
        cargo +nightly miri test --package gpu-pool --no-default-features --target-dir target/sanitize/miri --lib -- \
        pool::tests::a_whole_life sync::
    MIRIFLAGS="$flags -Zmiri-env-set=PROPTEST_CASES=4" \
        cargo +nightly miri test --package gpu-pool --no-default-features --target-dir target/sanitize/miri --test sync
else
    echo "skipped: no nightly toolchain with miri"
fi

# The standard library is built again, because ThreadSanitizer must see its locks, too.
target=x86_64-unknown-linux-gnu
if [[ -f $sources && $(rustc +nightly --version --verbose 2>/dev/null) == *"host: $target"* ]]; then
    RUSTFLAGS="-Zsanitizer=thread" CARGO_PROFILE_DEV_OPT_LEVEL=1 \
        cargo +nightly test -Zbuild-std --target "$target" --package gpu-pool --no-default-features \
        --target-dir target/sanitize/thread --test collectives -- basics:: eager:: exchange:: groups:: many:: \
        point:: rings:: staged:: --skip every_collective_of_many_pieces
else
    echo "skipped: no nightly toolchain for $target with rust-src"
fi
