#!/usr/bin/env bash
# The documentation builds without a warning, and the README is up to date.
source "$(dirname "$0")/env.sh"

RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features
# The README's tables show what benches/results holds.
benches/tables.py --check
