#!/usr/bin/env bash
# Tensors of numpy go to a software GPU and back by DLPack, from Python.
source "$(dirname "$0")/env.sh"

home=$PWD/target/tools/numpy
if [[ ! -x $home/bin/python ]] && ! { python3 -m venv "$home" && "$home/bin/pip" install --quiet numpy==2.4.6; }; then
    echo "skipped: numpy cannot be installed from PyPI"
    exit
fi
cargo build "${features[@]}" --example dlpack
library=${CARGO_TARGET_DIR:-target}/debug/examples/libdlpack.so
GPU_POOL_BACKEND=host:2 "$home/bin/python" examples/dlpack/demo.py "$library"
