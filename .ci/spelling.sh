#!/usr/bin/env bash
# No usual misspelling in any file. Words that are none stand in .typos.toml.
source "$(dirname "$0")/env.sh"

version=1.52.0
tools=$PWD/target/tools/typos
if [[ $("$tools/bin/typos" --version 2>/dev/null) != "typos-cli $version" ]]; then
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet "typos==$version"
fi
"$tools/bin/typos"
