#!/usr/bin/env bash
# The script of the page that `MemorySnapshot::to_html` makes: its functions are tested without a browser.
source "$(dirname "$0")/env.sh"

if command -v node >/dev/null; then
    node .ci/viewer.mjs
else
    echo "skipped: no node"
fi
