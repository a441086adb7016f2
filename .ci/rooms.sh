#!/usr/bin/env bash
# In each crate no room uses a room above it (rooms.txt).
source "$(dirname "$0")/env.sh"

.ci/rooms.py
