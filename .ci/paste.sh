#!/usr/bin/env bash
# The programs of the pages that people read first, pasted into fresh crates, compile and run. So do the tests of
# examples/own_kernel, which is a package outside of the workspace.
source "$(dirname "$0")/env.sh"

# Not the target folder of the tests: fresh crates ask for other features of the dependencies.
export CARGO_TARGET_DIR=$PWD/target/paste CARGO_PROFILE_DEV_DEBUG=0
.ci/paste.py
