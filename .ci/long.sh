#!/usr/bin/env bash
# `.ci/test.sh` runs each test binary by this: all cases of long tests for the crate $LONG.
if [[ $LONG == all || $LONG == "${CARGO_PKG_NAME:-}" ]]; then export GPU_POOL_LONG=1; fi
exec "$@"
