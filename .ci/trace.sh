#!/usr/bin/env bash
# The trace of the main job is one that viewers read: every slice lies in or behind the others of its row, waits name
# their causes, arrows have both ends. Perfetto's own trace processor is asked, too, where it installs.
source "$(dirname "$0")/env.sh"

trace=$PWD/target/trace.json
GPU_POOL_BACKEND=host:2 GPU_POOL_TRACE=$trace \
    cargo run --release --example train_digits -- --epochs 2 >/dev/null

home=$PWD/target/tools/perfetto
install() { python3 -m venv "$home" && "$home/bin/pip" install --quiet perfetto==0.59.1; }
if [[ ! -x $home/bin/python ]] && ! install; then
    rm -rf "$home"
    echo "skipped: perfetto cannot be installed from PyPI"
    home=
fi
"${home:+$home/bin/}python3" .ci/trace.py "$trace"
