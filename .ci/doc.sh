#!/usr/bin/env bash
# The documentation builds without a warning.
source "$(dirname "$0")/env.sh"

RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features
