#!/usr/bin/env bash
# The documentation builds without a warning, also that of private items; the links of public pages lead somewhere, the
# public functions on these pages that can fail say where they were called, and the measured numbers are those in
# benches/results.
source "$(dirname "$0")/env.sh"

export RUSTDOCFLAGS="-D warnings"
cargo doc --workspace --no-deps --all-features --document-private-items
# Only public pages. Rustdoc makes links to a crate whose pages are there, and cargo runs it for all crates in parallel:
# the crates above are documented again when the runtime's pages are there.
rm -rf target/doc
cargo doc --workspace --no-deps --all-features
rm -rf target/doc/gpu_pool_*
cargo doc --workspace --no-deps --all-features
.ci/links.py target/doc/gpu_pool*
.ci/places.py
# Those of the README and of docs/src/measured.md, and the plots.
benches/tables.py --check
