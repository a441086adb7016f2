#!/usr/bin/env python3
"""Compiles families of kernels for the CPU, with g++ and its sanitizers, and runs check.cpp on them.

    python3 kernels/on_cpu/run.py             all families, and mutants that must fail
    python3 kernels/on_cpu/run.py random      one family

Kernels that meet run on several devices at once, by the programs in meeting/.

This finds wrong indices, ends, alignments and formulas without a GPU: an access beyond an array, or one of 16 bytes at
another address than a multiple of 16, ends the run. It does not find what only a GPU has: code that NVRTC gets wrong,
races within a warp, times. Instructions in PTX are replaced by functions of shim.h; one without a function does not
compile.
"""
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parent
TARGET = KERNELS.parent / "target" / "kernels-on-cpu"
FAMILIES = ["elementwise", "pointwise", "random", "columns", "embedding"]
# Those that meet. Their sanitizers know no fibers.
MEETING = {"inbox": "check.cpp", "norm_inbox": "norm.cpp", "norm_pull": "norm.cpp", "sharded": "sharded.cpp"}
FLAGS = "-std=c++20 -O1 -ffp-contract=off -w -pthread -fsanitize=address,undefined -fno-sanitize-recover=all".split()
FLAGS_OF_MEETING = [flag for flag in FLAGS if "address" not in flag] + ["-fsanitize=undefined"]

# The beginning of a statement in PTX, and what takes its place.
PTX = {
    "cvt.f32.f16": "y = half_to_float(x.bits)",
    "cvt.rn.f16.f32": "y.bits = half_of(x)",
    "cvt.rn.f16.f64": "y.bits = half_of(x)",
    "ex2.approx.ftz.f32": "y = exp2_approx(x)",
    "rcp.approx.ftz.f32": "y = rcp_approx(x)",
    "sqrt.approx.ftz.f32": "r = sqrt_approx(square)",
    "{ .reg .u64 t; mul.wide.u32": "halves = wide_product(a, b)",
}
STATEMENT = re.compile(r'\basm\("([^"]*)"[^"]*(?:"[^"]*"[^";]*)*;')

# A family, a text in its sources, and what the mutant has instead.
MUTANTS = [
    ("pointwise", "for (u64 i = begin + grid_index(); i < n;", "for (u64 i = n; i < n;"),
    ("pointwise", "return bits % 16 == 0 ? n / tile * tile : 0;", "return n / tile * tile;"),
    ("elementwise", "(16 - (u64)x % 16) % 16 / sizeof(T)", "0"),
    ("random", "(16 - (u64)y % 16) % 16 / sizeof(T)", "0"),
    ("random", "(lane_id < 31 && to < end)", "to < end"),
    ("random", "(lane_id < 31 && to < end)", "lane_id < 31"),
    ("random", "whole ? *(const uint4*)", "true ? *(const uint4*)"),
    ("random", "end + 16 * lane_id", "end"),
    ("random", "words & 2", "words & 4"),
    ("random", "i - body < head ? i - body : i", "i"),
    ("columns", "for (u32 w = 1; w < WARPS; w++) sum += shared[0][w][i];", ""),
    ("columns", "cols % LANES<T> == 0;", "true;"),
    ("embedding", "if (begin + k * next < total)", "if (true)"),
    # What is taken is not removed.
    ("inbox", "wipe<T>(at(k));", ""),
    # Sends without a credit; a kernel that ends before all is taken; a credit that is no release, or comes too early.
    ("inbox", "if (taken > 0 && !__syncthreads_and(hear_taken(meet, desk.epoch, taken))) return false;", ""),
    ("inbox", "return hear_taken(meet, desk.epoch, steps);", "return true;"),
    ("inbox", "store_release(to, (u64)epoch[rank] << 32", "store_relaxed(to, (u64)epoch[rank] << 32"),
    ("inbox", "tell_taken(meet, desk.epoch, p + 1);", "tell_taken(meet, desk.epoch, p + 2);"),
    # The last credit of a member that is in its next kernel already.
    ("inbox", " || in == following(epoch[rank])", ""),
    # A credit of the meeting before.
    ("inbox", "(in == epoch[rank] && (u32)seen >= count)", "((u32)seen >= count)"),
    # The reserved word is sent: by one trip, of two and of more, and by slots.
    ("inbox", "put<T>(out + i * 16, guarded<T>(unit));", "put<T>(out + i * 16, unit);"),
    ("inbox", "put<T>(lines.out[rank] + i * 16, guarded<T>(unit[k]));", "put<T>(lines.out[rank] + i * 16, unit[k]);"),
    ("inbox", "* 16, guarded<T>(unit[u]));", "* 16, unit[u]);"),
    ("inbox", "result = guarded<T>(result);", ""),
    # One parity.
    ("inbox", "2 * (from < to ? from : from - 1) + (epoch & 1)", "2 * (from < to ? from : from - 1)"),
    # Words that come one by one; elements of f64 in halves.
    ("inbox", "high && unit.x != EMPTY && unit.z != EMPTY", "high"),
    ("inbox", "if constexpr (sizeof(T) == 8) store_halves(at, unit);", "if constexpr (false) {}"),
    ("inbox", "sizeof(T) == 8 ? high : high && unit.x", "high && unit.x"),
    # Sums in the slot of the pieces.
    ("inbox", "(2 * (p % 2) + 1) * desk.slot", "2 * (p % 2) * desk.slot"),
    # Nothing is sent to a member that is to wait.
    ("inbox", "(route.receives(rank) || i == 0)", "route.receives(rank)"),
    # Sends without a credit; a kernel that ends before all is taken; credits that come too early.
    ("norm_inbox", "if (slots && taken > 0 && !__syncthreads_and(hear(taken))) return;", ""),
    ("norm_inbox", "if (slots) hear(pieces + behind);", ""),
    ("norm_inbox", "tell(p + 1);", "tell(p + 2);"),
    # Two steps ahead where slots are for one; sums in the slot of the pieces.
    ("norm_inbox", "owners ? 1 : 2;", "2;"),
    ("norm_inbox", "place(p, row, k) + slot", "place(p, row, k)"),
    # The reserved word is sent; the norm comes before all parts are there; a row that does not exist; rows that share
    # what their threads exchange.
    ("norm_inbox", "guarded<T>(*(const uint4*)(own.x + at(row, k)));", "*(const uint4*)(own.x + at(row, k));"),
    ("norm_inbox", "(done + 1) % parts != 0", "false"),
    ("norm_inbox", "if (row < plan.rows) finish(row, packs);", "finish(row, packs);"),
    ("norm_inbox", "width(plan.way == BY_OWNERS ? meet.count : 1)", "width(1)"),
    # Reads before the others have begun; sums in another order; rows that have another owner on each member.
    ("norm_pull", "!first || hear(meet, START, epoch, false)", "true"),
    ("norm_pull", "desk.x[from + j] + offset", "desk.x[(from + j + 1) % meet.count] + offset"),
    ("norm_pull", "const u64 row = row_of(p, meet.me);", "const u64 row = row_of(p, meet.me / 2);"),
    # A norm before the others are through with the wave; a kernel that ends before they are; a credit that is no
    # release, comes too early, or is of the meeting before.
    ("norm_pull", "hear_taken(meet, desk.epoch, p)))", "hear_taken(meet, desk.epoch, p - 1)))"),
    ("norm_pull", "if (!__syncthreads_and(", "if (p < waves && !__syncthreads_and("),
    ("norm_pull", "store_release(to, (u64)epoch[rank] << 32", "store_relaxed(to, (u64)epoch[rank] << 32"),
    ("norm_pull", "tell_taken(meet, desk.epoch, p + 1);", "tell_taken(meet, desk.epoch, p + 2);"),
    ("norm_pull", "(in == epoch[rank] && (u32)seen >= count)", "((u32)seen >= count)"),
    # The last credit of a member that is in its next kernel already; a wave that is not fetched.
    ("norm_pull", " || in == following(epoch[rank])", ""),
    ("norm_pull", "fetch(p + 1, other);", "fetch(p, other);"),
    # An empty part that begins in the middle of a chunk; a norm before all squares are there; a meeting whose words may
    # be of one before.
    ("sharded", "(state.begin + CHUNK - 1) / CHUNK", "state.begin / CHUNK"),
    ("sharded", "if (!meet_all(meet, desk)) return false;", "__syncthreads();"),
    ("sharded", "store_release(to, word_of", "store_relaxed(to, word_of"),
    ("sharded", "return (u64)desk.epoch[rank] << 32 | 1;", "return 1;"),
    # Of buckets: a piece too far; parameters behind the end; units at places that are not aligned; others' squares.
    ("sharded", "pieces.at(k + 1, START_AT) <= i) k++;", "pieces.at(k + 1, START_AT) <= i + W) k++;"),
    ("sharded", "if (j >= len) continue;", ""),
    ("sharded", "if (most == W && to % 16 == 0) {", "if (most == W) {"),
    ("sharded", "if (rank != meet.me) store(desk.sums[rank] + at, squares);", ";"),
    ("sharded", "(chunk + pieces.at(pieces.of(chunk * CHUNK), SHIFT))", "chunk"),
    ("sharded", "if (!is_finite(found)) return true;", ""),
]


def replaced(match):
    for beginning, function in PTX.items():
        if match[1].startswith(beginning):
            return function + ";"
    return "instruction_without_a_function_in_run_py();"


def compiled(family, name, old="", new=""):
    """The executable of a family, with `old` replaced by `new` in its sources."""
    folder = TARGET / name
    folder.mkdir(parents=True, exist_ok=True)
    found = 0
    for source in [*KERNELS.glob("*.cuh"), KERNELS / f"{family}.cu"]:
        text = source.read_text()
        if source.name == "access.cuh":
            continue
        if family not in MEETING and source.name in ("meet.cuh", "move.cuh", "combine.cuh"):
            continue
        found += bool(old) and text.count(old)
        text = STATEMENT.sub(replaced, text.replace(old, new) if old else text)
        (folder / source.name).write_text(re.sub(r"#pragma unroll.*", "", text))
    if old and not found:
        sys.exit(f"{family}: the mutant's text is not there any more: {old}")
    program = folder / "check"
    meets = family in MEETING
    here, flags = (HERE / "meeting", [*FLAGS_OF_MEETING, "-DMEETING"]) if meets else (HERE, FLAGS)
    check = here / MEETING.get(family, "check.cpp")
    sources = [f"-DFAMILY_{family}", f'-DSOURCE="{folder / family}.cu"', f"-I{folder}", f"-I{here}", check]
    subprocess.run(["g++", *flags, *sources, "-o", program], check=True)
    return program


def test(family):
    run = subprocess.run([compiled(family, family)], capture_output=True, text=True, timeout=600)
    return f"{family}: {run.stdout}{run.stderr[:4000]}", run.returncode == 0


def mutant(number, family, old, new):
    run = subprocess.run([compiled(family, f"mutant{number}", old, new)], capture_output=True, text=True, timeout=600)
    return f"mutant of {family} {'lives' if run.returncode == 0 else 'dies'}: {old}", run.returncode != 0


def main():
    families = sys.argv[1:] or FAMILIES + list(MEETING)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(test, family) for family in families]
        jobs += [pool.submit(mutant, i, *m) for i, m in enumerate(MUTANTS) if m[0] in families]
        results = [job.result() for job in jobs]
    for said, _ in results:
        print(said.strip())
    sys.exit(0 if all(good for _, good in results) else 1)


if __name__ == "__main__":
    main()
