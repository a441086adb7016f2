#!/usr/bin/env bash
# Runs packed test binaries on a GPU machine, where there is no Rust toolchain:
#
#   . .gpu/env.sh; benches/test-gpu.sh [binary...]
#   default: ops prove graphs gradients collectives memory basics faults driver_conformance train.ops train.norm
#   train.parallel train.gpt lab.bug_zoo, and the unit tests of all crates
#
# benches/pack-tests.sh makes .gpu/t/<binary>. Of each one the tests of GPUs run (`cuda` in their name). Then each of
# compute-sanitizer's four tools runs the tests of the operations' kernels, at once. SANITIZE= leaves them out; LIMIT is
# the time for each binary in seconds (200). Logs go to $OUT/test-gpu.tar.xz, a line for each binary to the output. On
# 2 x H200 the default takes about 12 minutes, more than half of it for `collectives` and `memory`. `GPU_POOL_SHARE=2`
# gives more devices than GPUs.
set -uo pipefail

: "${OUT:=.}" "${LIMIT:=200}" "${SANITIZE=memcheck racecheck initcheck synccheck}"
logs=$(mktemp -d)
binaries=("$@")
[ ${#binaries[@]} -gt 0 ] ||
  binaries=(ops prove graphs gradients collectives memory basics faults driver_conformance train.ops train.norm
    train.parallel train.gpt lab.bug_zoo gpu_pool gpu_pool_train gpu_pool_cluster gpu_pool_lab)
failed=0

for binary in "${binaries[@]}"; do
  start=$SECONDS
  timeout "$LIMIT" ".gpu/t/$binary" cuda >"$logs/$binary.log" 2>&1
  code=$?
  echo "$binary: exit $code, $((SECONDS - start)) s, $(grep -ac '^test .* ok$' "$logs/$binary.log") passed," \
    "$(grep -ac 'skipped: no CUDA device' "$logs/$binary.log") skipped"
  grep -aE '^test .*FAILED|panicked at' "$logs/$binary.log"
  [ "$code" -eq 0 ] || failed=1
done

# Rows, pointwise, number and embedding have the kernels that share memory between threads.
pids=()
for tool in $SANITIZE; do
  {
    code=0
    for binary in ops train.ops prove; do
      timeout "$LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 ".gpu/t/$binary" \
        rows::cuda pointwise::cuda number::cuda embedding::cuda shape::cuda cast::cuda random::cuda \
        cuda::a_commitment --test-threads 2 \
        >>"$logs/$tool.log" 2>&1 || code=$?
    done
    echo "$tool: exit $code, $(grep -ac '^test .* ok$' "$logs/$tool.log") passed," \
      "$(grep -a ' SUMMARY: ' "$logs/$tool.log" | tail -n 1)"
    exit "$code"
  } &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done

tar -C "$logs" -cJf "$OUT/test-gpu.tar.xz" .
exit "$failed"
