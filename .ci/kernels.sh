#!/usr/bin/env bash
# The committed PTX and cubins are what the CUDA sources give: by their digests, and an eighth of them by compiling.
source "$(dirname "$0")/env.sh"

python3 kernels/build.py --check --quick
# What they compute, without a GPU: families compiled for the CPU, with sanitizers.
python3 kernels/on_cpu/run.py
