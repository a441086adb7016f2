# Sourced by every step: the same behaviour by hand and in CI, from the root of the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CI=true CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=never
# Each target is built once here: incremental state would only be written, never used.
export CARGO_INCREMENTAL=0
# The crates of the workspace.
crates=(gpu-pool gpu-pool-train gpu-pool-cluster gpu-pool-lab gpu-pool-cli)
# What the steps with tests build: one set of features, so that they have their artifacts in common.
features=(--features gpu-pool-lab/topology-files,gpu-pool/dlpack,gpu-pool/metrics)
# RUSTFLAGS in the environment replaces the configured flags, `--cfg loom` among them: loom would pass on nothing.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS

# The executable of an integration test, as `cargo test` builds it in any case: `test_program CRATE_FOLDER NAME`.
test_program() {
    cargo test "${features[@]}" --no-run --message-format=json --test "$2" | grep "/$1/Cargo.toml" |
        sed -n 's/.*"executable":"\([^"]*\/deps\/[^"]*\)".*/\1/p'
}

# Rustdoc's pages of all crates, only the public ones. Rustdoc makes links to a crate whose pages are there, and cargo
# runs it for all crates in parallel: the crates above are documented again when the runtime's pages are there. In a
# whole run they are made once, by the step `doc`.
public_pages() {
    if [[ -n ${PAGES_ARE_THERE:-} ]]; then return; fi
    local -x RUSTDOCFLAGS="-D warnings"
    rm -rf target/doc
    cargo doc --workspace --no-deps --all-features
    rm -rf target/doc/gpu_pool_*
    cargo doc --workspace --no-deps --all-features
}
