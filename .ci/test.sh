#!/usr/bin/env bash
# The tests, as the README says to run them, and with all cases of the long ones; doc tests are among them. So are those
# of machine files, which `cargo test` alone leaves out.
source "$(dirname "$0")/env.sh"

GPU_POOL_LONG=1 cargo test "${features[@]}"
# Processes of one machine meet in shared memory; here as those of several machines do.
program=$(test_program crates/cluster cluster)
cd crates/cluster
GPU_POOL_MEETING=hub "$program"
