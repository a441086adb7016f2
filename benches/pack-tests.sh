#!/usr/bin/env bash
# Packs test binaries for benches/test-gpu.sh: `benches/pack-tests.sh [cargo flags]`, by default all of the workspace.
#
#   benches/pack-tests.sh -p gpu-pool-train --test ops --test parallel
#
# Each is stripped, and stands in .gpu/t: `<target>` of the runtime, `train.<target>` of gpu-pool-train, and so on; unit
# tests have their crate's name.
set -euo pipefail

flags=("$@")
[ ${#flags[@]} -gt 0 ] || flags=(--workspace --lib --tests)
rm -rf .gpu/t
mkdir -p .gpu/t
cargo test --no-run "${flags[@]}" --message-format=json-render-diagnostics | python3 -c '
import json, pathlib, sys
for message in map(json.loads, sys.stdin):
    if message["reason"] == "compiler-artifact" and message["executable"] and message["profile"]["test"]:
        folder = pathlib.Path(message["manifest_path"]).parent
        above = folder.parent.name == "crates" and "lib" not in message["target"]["kind"]
        print(message["executable"], (folder.name + "." if above else "") + message["target"]["name"])
' | while read -r executable name; do
  strip -o ".gpu/t/$name" "$executable"
done
ls -1 .gpu/t
