#!/usr/bin/env bash
# The tests, as the README says to run them; doc tests are among them. So are those of machine files, which `cargo test`
# alone leaves out. All cases of the long ones take 40 minutes: here those of one crate, of another one at each commit.
# `LONG=all .ci/test.sh` takes those of all.
source "$(dirname "$0")/env.sh"

turns=(gpu-pool gpu-pool-train gpu-pool-cluster)
export LONG=${LONG:-${turns[0x$(git rev-parse --short=7 HEAD) % 3]}}
echo "all cases of long tests: $LONG"
cargo test "${features[@]}" --config "target.'cfg(all())'.runner='$PWD/.ci/long.sh'"
# Processes of one machine meet in shared memory; here as those of several machines do.
program=$(test_program crates/cluster cluster)
cd crates/cluster
GPU_POOL_MEETING=mesh "$program"
