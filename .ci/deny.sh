#!/usr/bin/env bash
# Licences, banned crates and sources of the whole dependency tree. Advisories are not checked: their database would
# have to be fetched at run time.
source "$(dirname "$0")/env.sh"

# Unoptimised and without its network features it builds in under two minutes on two cores; the checks take a second.
version=0.19.0
tools=$PWD/target/tools
if [[ $("$tools/bin/cargo-deny" --version 2>/dev/null) != "cargo-deny $version" ]]; then
    CARGO_PROFILE_DEV_DEBUG=0 cargo install cargo-deny --version "$version" --locked --debug --no-default-features \
        --quiet --root "$tools" --target-dir "$tools/build"
    rm -rf "$tools/build"
fi
"$tools/bin/cargo-deny" --workspace check --hide-inclusion-graph licenses bans sources
