#!/usr/bin/env bash
# Plain sentences in the guide and on rustdoc's public pages.
source "$(dirname "$0")/env.sh"

cargo doc --workspace --no-deps --all-features
.ci/prose.py
