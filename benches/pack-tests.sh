#!/usr/bin/env bash
# Packs test binaries for benches/test-gpu.sh: `benches/pack-tests.sh [cargo flags]`, by default all of the workspace.
#
#   benches/pack-tests.sh -p gpu-pool-train --test ops --test parallel
#
# Each is stripped, and stands in .gpu/t under its target's name; unit tests have their crate's name. Targets of one
# name in two packages are told from each other by the second one's crate: `gpu_pool_train.attacks`.
set -euo pipefail

flags=("$@")
[ ${#flags[@]} -gt 0 ] || flags=(--workspace --lib --tests)
rm -rf .gpu/t
mkdir -p .gpu/t
cargo test --no-run "${flags[@]}" --message-format=json-render-diagnostics | python3 -c '
import json, sys, tomllib
taken = set()
for message in map(json.loads, sys.stdin):
    if message["reason"] == "compiler-artifact" and message["executable"] and message["profile"]["test"]:
        name = message["target"]["name"]
        if name in taken:
            with open(message["manifest_path"], "rb") as manifest:
                name = tomllib.load(manifest)["package"]["name"].replace("-", "_") + "." + name
        taken.add(name)
        print(message["executable"], name)
' | while read -r executable name; do
  strip -o ".gpu/t/$name" "$executable"
done
ls -1 .gpu/t
