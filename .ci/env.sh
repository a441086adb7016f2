# Sourced by every step: the same behaviour by hand and in CI, from the root of the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CI=true CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=never
# Each target is built once here: incremental state would only be written, never used.
export CARGO_INCREMENTAL=0
# Backtraces keep their lines; full debug information doubles what the test binaries weigh on the linker.
export CARGO_PROFILE_DEV_DEBUG=line-tables-only
# RUSTFLAGS in the environment replaces the configured flags, `--cfg loom` among them: loom would pass on nothing.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS
