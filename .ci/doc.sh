#!/usr/bin/env bash
# The documentation builds without a warning, its links lead somewhere, the public functions on its pages that can fail
# say where they were called, and the measured numbers are those in benches/results.
source "$(dirname "$0")/env.sh"

RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features
.ci/links.py
.ci/places.py
# Those of the README and of docs/src/measured.md, and the plots.
benches/tables.py --check
