#!/usr/bin/env bash
# Runs the packed benches on a GPU machine, where there is no Rust toolchain:
#
#   . .gpu/env.sh; benches/run-gpu.sh [bench...]
#   default: scope copy launch check predict build data_parallel ring memory
#
# For `memory`, PyTorch's side is built here from benches/peers/torch_allocator.cpp, with the headers and libraries of
# python3's torch. If that fails, the Python program stands in for it, and the output says so.
#
# `collectives` is no default, since it takes minutes: `benches/run-gpu.sh collectives`. Its peers are NCCL, if
# libnccl.so.2 is on LD_LIBRARY_PATH, and for what one kernel of ours does python3's torch; PART=all_reduce_norm and
# PART=zero are best runs of their own. Its pictures come as $OUT/collectives-plots.tar.gz. `overlap` is no default for
# the same reason. Its peer is PyTorch's DDP, started by torchrun if python3 has torch. Run it from the root of the
# repository.
#
# `parallel` is no default either: less than 6 minutes on 2 GPUs. Its peer is python3's torch; where it takes a process
# for each GPU, the peer starts `torch.distributed.run` itself. `PART=ops/ benches/run-gpu.sh parallel` runs the cases
# whose name contains `ops/`, and adds them to the file.
#
# `decode` is no default: 150 s on 2 GPUs. Its peer is python3's torch with NCCL, which it starts itself.
#
# `gpt` is no default: less than 3 minutes on 2 GPUs, most of them for PyTorch's side to start and to compile. Run it
# from the root of the repository, too.
#
# `cluster` is no default: two processes with a GPU each, with libnccl.so.2 on LD_LIBRARY_PATH; training steps against
# DDP, if python3 has torch. `PART=sockets MOST=$((64 << 20))` runs some of it.
#
# `benches/run-gpu.sh many` measures all rows of a machine, the most telling ones first, in steps of three minutes at
# most. It ends when SECONDS_LEFT (420) have passed, and prints the name of the step to go on with:
# `FROM=zero benches/run-gpu.sh many` in a second call.
#
# `benches/run-gpu.sh pair` does that on the first two GPUs in 280 s, with short turns. Its results go to
# $OUT/2x<GPU>/<bench>.json; on H200s that is $OUT/2xH200, from which the tables are made.
#
# .gpu/<bench> are the stripped executables. For each bench the table goes to the output and to $OUT/tables.txt, and one
# JSON object per case and peer to $OUT/<bench>.json. A bench that hangs is ended after its limit, and the next one
# runs. The limits of the default benches are under 8 minutes together, without `memory`, whose limit is 3 minutes more.
# On 8 x H200 all of them take about 3 minutes without `memory`.
set -uo pipefail

: "${OUT:=benches/results}"
mkdir -p "$OUT"
benches=("$@")
[ ${#benches[@]} -gt 0 ] || benches=(scope copy launch check predict build data_parallel ring memory)

# The GPUs that name the machine.
gpus=()
if [ "${benches[*]}" = pair ]; then
  benches=(many)
  gpus=(-i 0,1)
  SECONDS_LEFT=280
  QUICK=1
  CUDA_VISIBLE_DEVICES=$(cut -d, -f1,2 <<<"${CUDA_VISIBLE_DEVICES:-0,1}")
  export CUDA_VISIBLE_DEVICES
  gpu=$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader 2>/dev/null | sed 's/^NVIDIA *//; s/ /-/g')
  OUT=$OUT/2x${gpu:-GPU}
  mkdir -p "$OUT"
fi

if [ -z "${GPU_POOL_MACHINE:-}" ]; then
  GPU_POOL_MACHINE=$(nvidia-smi "${gpus[@]}" --query-gpu=name --format=csv,noheader 2>/dev/null |
    sort | uniq -c | awk '{ n = $1; $1 = ""; printf "%s%d x%s", sep, n, $0; sep = " + " }')
fi
# Without nvidia-smi each bench names the CPU.
[ -z "$GPU_POOL_MACHINE" ] || export GPU_POOL_MACHINE

# Limit per bench, in seconds.
limit() {
  case "$1" in
    build) echo 150 ;;
    data_parallel) echo 90 ;;
    memory) echo 180 ;;
    collectives) echo 480 ;;
    cluster) echo 420 ;;
    decode) echo 170 ;;
    overlap) echo 300 ;;
    gpt) echo 180 ;;
    parallel) echo 420 ;;
    *) echo 50 ;;
  esac
}

# Compiler flags for the headers and libraries of python3's torch, and of the CUDA runtime that it was built for.
torch_flags() {
  python3 - <<'PYTHON'
import glob, os
import torch

home = os.path.dirname(torch.__file__)
site = os.path.dirname(home)
cuda = [f"{site}/nvidia/cu{torch.version.cuda.split('.')[0]}", f"{site}/nvidia/cuda_runtime", "/usr/local/cuda"]
headers = [f"{home}/include"] + [f"{root}/include" for root in cuda]
libraries = [f"{home}/lib"] + [path for root in cuda for path in (f"{root}/lib", f"{root}/lib64")]
runtime = [file for path in libraries for file in sorted(glob.glob(f"{path}/libcudart.so*"))]
flags = [f"-I{path}" for path in headers if os.path.isdir(path)]
for path in filter(os.path.isdir, libraries):
    flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
flags += ["-lc10_cuda", "-lc10", runtime[0] if runtime else "-lcudart"]
flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
print(" ".join(flags))
PYTHON
}

# PyTorch's side of `memory`: the first program that allocates and frees.
torch_side() {
  local here built flags
  here=$(dirname "${BASH_SOURCE[0]}")/peers
  built=$(mktemp -d)/torch_allocator
  # The flags are several words.
  # shellcheck disable=SC2086
  if flags=$(torch_flags) && g++ -std=c++20 -O2 "$here/torch_allocator.cpp" -o "$built" $flags -pthread &&
    allocates "$built"; then
    echo "$built"
  elif allocates python3 "$here/torch_allocator.py"; then
    echo "$here/torch_allocator.py"
  fi
}

allocates() { [[ $(echo "pair:4096:1 10" | timeout 60 "$@") =~ ^[0-9.]+$ ]]; }

# Steps of `many`: name, bench, part, limit in seconds, further arguments. N is the number of GPUs.
steps() {
  cat <<'STEPS'
graphs collectives graph/all_reduce/f32/N 60
graphs_bf16 collectives graph/all_reduce/bf16/N 60
plain collectives gpu/all_reduce/f32/N 45 --case-ms 150
plain_bf16 collectives gpu/all_reduce/bf16/N 45 --case-ms 150
algorithms collectives gpu/algorithm 75
norm collectives all_reduce_norm/bf16/N/4096 75
norm_by collectives norm_by/ 30
reduce_scatter collectives gpu/reduce_scatter/f32/N 40 --case-ms 100
all_gather collectives gpu/all_gather/f32/N 40 --case-ms 100
broadcast collectives gpu/broadcast/f32/N 40 --case-ms 100
all_to_all collectives gpu/all_to_all/f32/N 40 --case-ms 100
setup collectives setup/N 30
no_peer collectives no_peer/all_reduce/f32/N 60 --case-ms 100
scope scope - 50
meeting collectives meeting/N 30
late collectives late_1ms 30
host collectives host/ 30
zero collectives zero/bf16/N 140
zero_clip collectives zero_clip/bf16/N 140
step overlap /N/8192 60
pipeline parallel pipeline/ 75
products parallel products/ 60
sharded parallel /step_ 90
tensor parallel tensor/ 150
jobs jobs prove 60
memory memory - 180
STEPS
}

if [ "${benches[*]}" = many ]; then
  count=$(nvidia-smi "${gpus[@]}" --query-gpu=name --format=csv,noheader | wc -l)
  ended=$((SECONDS + ${SECONDS_LEFT:-420}))
  while read -r name bench part most more; do
    [ -z "${FROM:-}" ] || [ "$FROM" = "$name" ] || continue
    FROM=
    if [ $((SECONDS + most / 2)) -gt $ended ]; then
      echo "go on with FROM=$name"
      break
    fi
    start=$SECONDS
    [ "$part" != - ] || part=
    # The arguments are several words.
    # shellcheck disable=SC2086
    timeout -k 5 "$most" ".gpu/$bench" --json "$OUT/$bench.json" $more ${QUICK:+--quick} ${part:+"${part/N/$count}"} \
      >>"$OUT/tables.txt" 2>&1 </dev/null
    echo "$name: exit $?, $((SECONDS - start)) s"
  done < <(steps)
  exit 0
fi

failed=()
for bench in "${benches[@]}"; do
  [ -n "${PART:-}" ] || rm -f "$OUT/$bench.json"
  if [ "$bench" = memory ] && [ -z "${GPU_POOL_TORCH:-}" ]; then
    GPU_POOL_TORCH=$(torch_side 2>"$OUT/torch_allocator.log")
    export GPU_POOL_TORCH
    if [[ $GPU_POOL_TORCH == *.py || -z $GPU_POOL_TORCH ]]; then
      echo "torch_allocator.cpp was not built:"
      tail -n 20 "$OUT/torch_allocator.log"
    fi
  fi
  start=$SECONDS
  pictures=()
  options=()
  [ -z "${MOST:-}" ] || options=(--max "$MOST")
  if [ "$bench" = collectives ]; then
    pictures=(--plot "$(mktemp -d)")
  fi
  timeout -k 5 "$(limit "$bench")" ".gpu/$bench" --json "$OUT/$bench.json" "${pictures[@]}" \
    "${options[@]}" ${QUICK:+--quick} ${PART:+"$PART"} 2>&1 | tee -a "$OUT/tables.txt"
  code=${PIPESTATUS[0]}
  [ ${#pictures[@]} -eq 0 ] || tar -C "${pictures[1]}" -czf "$OUT/$bench-plots.tar.gz" .
  echo "$bench: $((SECONDS - start)) s"
  [ "$code" -eq 0 ] || failed+=("$bench ($code)")
done
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
