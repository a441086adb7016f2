#!/usr/bin/env bash
# Runs the packed benches on a GPU machine, where there is no Rust toolchain:
#
#   . .gpu/env.sh; benches/run-gpu.sh [bench...]      default: scope copy launch check predict build data_parallel ring
#
# .gpu/<bench> are the stripped executables. For each bench the table goes to the output and to $OUT/tables.txt, and one
# JSON object per case and peer to $OUT/<bench>.json. A bench that hangs is ended after its limit and the next one runs;
# all limits together are under 8 minutes, and the whole takes about 3 on 8 x H200.
set -uo pipefail

: "${OUT:=benches/results}"
mkdir -p "$OUT"
benches=("$@")
[ ${#benches[@]} -gt 0 ] || benches=(scope copy launch check predict build data_parallel ring)

if [ -z "${GPU_POOL_MACHINE:-}" ]; then
  GPU_POOL_MACHINE=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null |
    sort | uniq -c | awk '{ n = $1; $1 = ""; printf "%s%d x%s", sep, n, $0; sep = " + " }')
fi
# Without nvidia-smi each bench names the CPU.
[ -z "$GPU_POOL_MACHINE" ] || export GPU_POOL_MACHINE

# Seconds that a bench may take.
limit() {
  case "$1" in
    build) echo 150 ;;
    data_parallel) echo 90 ;;
    *) echo 50 ;;
  esac
}

failed=()
for bench in "${benches[@]}"; do
  rm -f "$OUT/$bench.json"
  start=$SECONDS
  timeout -k 5 "$(limit "$bench")" ".gpu/$bench" --json "$OUT/$bench.json" ${QUICK:+--quick} 2>&1 | tee -a "$OUT/tables.txt"
  code=${PIPESTATUS[0]}
  echo "$bench: $((SECONDS - start)) s"
  [ "$code" -eq 0 ] || failed+=("$bench ($code)")
done
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
