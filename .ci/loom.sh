#!/usr/bin/env bash
# The models under loom_tests/, at the preemption bound of .cargo/config.toml.
source "$(dirname "$0")/env.sh"

cargo loom
