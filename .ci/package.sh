#!/usr/bin/env bash
# The packages that a registry would get: each has all files that its library needs, and at most 5 MB.
source "$(dirname "$0")/env.sh"

most=5000000
folder=$PWD/target/package
rm -rf "$folder"
cargo package --workspace --no-verify --allow-dirty --offline --quiet
# `cargo package` would compile all dependencies again for each of them. So they are a workspace of their own here, with
# the lock file and the profile of this one, whose compiled dependencies it uses.
check=$folder/check
mkdir "$check"
cp Cargo.lock "$check"
{
    printf '[workspace]\nmembers = ["*"]\nresolver = "3"\n[profile.dev]\ndebug = "line-tables-only"\n'
    echo "[patch.crates-io]"
    for crate in "${crates[@]}"; do echo "$crate = { path = \"$crate\" }"; done
} >"$check/Cargo.toml"
for crate in "${crates[@]}"; do
    package=("$folder/$crate"-[0-9]*.crate)
    size=$(stat -c %s "${package[0]}")
    printf '%-18s %9d bytes\n' "$crate" "$size"
    ((size <= most)) || { echo "$crate: more than $most bytes; its \`include\` takes too much"; exit 1; }
    mkdir "$check/$crate"
    tar -xzf "${package[0]}" -C "$check/$crate" --strip-components 1
done
cargo check --workspace --offline --manifest-path "$check/Cargo.toml" --target-dir target
