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
    # -m: the files of a package are from 2006, and cargo would not compile them again.
    tar -xzmf "${package[0]}" -C "$check/$crate" --strip-components 1
done
# What the registry shows: all fields; and relative links only where it can make them absolute, by the address of the
# repository on one of the hosts that it knows.
cargo metadata --no-deps --offline --format-version 1 --manifest-path "$check/Cargo.toml" | python3 -c '
import json, pathlib, re, sys

for package in json.load(sys.stdin)["packages"]:
    folder = pathlib.Path(package["manifest_path"]).parent
    fields = "description license readme repository homepage documentation rust_version keywords categories".split()
    missing = [field for field in fields if not package[field]]
    missing += [name for name in ("LICENSE-MIT", "LICENSE-APACHE") if not (folder / name).is_file()]
    text = re.sub(r"^```.*?^```", "", (folder / package["readme"]).read_text(), flags=re.M | re.S)
    relative = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", link)]
    hosts = r"https://(github\.com|gitlab\.com|bitbucket\.org)/"
    if missing or relative and not re.match(hosts, package["repository"]):
        sys.exit("%s lacks %s; relative links of its README: %s" % (package["name"], missing, relative))
'
cargo check --workspace --offline --manifest-path "$check/Cargo.toml" --target-dir target
# Unit tests come along, with all that they need.
cargo check --workspace --lib --profile test --offline --manifest-path "$check/Cargo.toml" --target-dir target
