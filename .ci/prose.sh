#!/usr/bin/env bash
# Plain sentences in the guide and on rustdoc's public pages.
source "$(dirname "$0")/env.sh"

public_pages
.ci/prose.py
