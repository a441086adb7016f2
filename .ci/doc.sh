#!/usr/bin/env bash
# The documentation builds without a warning, its links lead somewhere, and the README is up to date.
source "$(dirname "$0")/env.sh"

RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features
.ci/links.py
# The README's tables show what benches/results holds.
benches/tables.py --check
