#!/usr/bin/env bash
# The documentation builds without a warning, its links lead somewhere, and the measured numbers are those in
# benches/results.
source "$(dirname "$0")/env.sh"

RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features
.ci/links.py
# Those of the README and of docs/src/measured.md, and the plots.
benches/tables.py --check
