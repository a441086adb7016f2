#!/usr/bin/env bash
# The documentation builds without a warning, also that of private items; the links of public pages lead somewhere, the
# public functions on these pages that can fail say where they were called, and the measured numbers are those in
# benches/results.
source "$(dirname "$0")/env.sh"

export RUSTDOCFLAGS="-D warnings"
cargo doc --workspace --no-deps --all-features --document-private-items
public_pages
.ci/links.py target/doc/gpu_pool*
.ci/places.py
# Those of the README and of docs/src/measured.md, and the plots.
benches/tables.py --check
