#!/usr/bin/env bash
# The book builds, alone and with rustdoc in one tree, and no link in it or in the README is broken. (Its programs are
# doctests: `.ci/test.sh` runs them.)
source "$(dirname "$0")/env.sh"

# Unoptimised and without its server it builds in about three minutes on two cores.
version=0.5.4
tools=$PWD/target/tools/mdbook
if [[ $("$tools/bin/mdbook" --version 2>/dev/null) != "mdbook v$version" ]]; then
    CARGO_PROFILE_DEV_DEBUG=0 nice -n 19 cargo install mdbook --version "$version" --locked --debug \
        --no-default-features --features search --quiet --root "$tools" --target-dir "$tools/build"
    rm -rf "$tools/build"
fi
"$tools/bin/mdbook" build docs

# Pages link to the items of the crates.
public_pages
python3 docs/check.py
# People read these pages, here or on a server.
.ci/links.py target/book
docs/site.py
.ci/links.py target/site/book target/site/doc/gpu_pool*
