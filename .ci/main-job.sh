#!/usr/bin/env bash
# The main job on four devices, software GPUs where there is no hardware: it trains and checks what it reached.
source "$(dirname "$0")/env.sh"

cargo run --release --example train_digits -- --devices 4 --epochs 30 --check
