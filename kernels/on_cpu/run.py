#!/usr/bin/env python3
"""Compiles families of kernels for the CPU, with g++ and its sanitizers, and runs check.cpp on them.

    python3 kernels/on_cpu/run.py             all families, and mutants that must fail
    python3 kernels/on_cpu/run.py random      one family

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
FLAGS = "-std=c++20 -O1 -ffp-contract=off -w -pthread -fsanitize=address,undefined -fno-sanitize-recover=all".split()

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
        if source.name in ("access.cuh", "meet.cuh", "move.cuh", "combine.cuh"):
            continue
        found += bool(old) and text.count(old)
        text = STATEMENT.sub(replaced, text.replace(old, new) if old else text)
        (folder / source.name).write_text(re.sub(r"#pragma unroll.*", "", text))
    if old and not found:
        sys.exit(f"{family}: the mutant's text is not there any more: {old}")
    program = folder / "check"
    sources = [f"-DFAMILY_{family}", f'-DSOURCE="{folder / family}.cu"', f"-I{folder}", f"-I{HERE}", HERE / "check.cpp"]
    subprocess.run(["g++", *FLAGS, *sources, "-o", program], check=True)
    return program


def test(family):
    run = subprocess.run([compiled(family, family)], capture_output=True, text=True, timeout=600)
    return f"{family}: {run.stdout}{run.stderr[:4000]}", run.returncode == 0


def mutant(number, family, old, new):
    run = subprocess.run([compiled(family, f"mutant{number}", old, new)], capture_output=True, text=True, timeout=600)
    return f"mutant of {family} {'lives' if run.returncode == 0 else 'dies'}: {old}", run.returncode != 0


def main():
    families = sys.argv[1:] or FAMILIES
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(test, family) for family in families]
        jobs += [pool.submit(mutant, i, *m) for i, m in enumerate(MUTANTS) if m[0] in families]
        results = [job.result() for job in jobs]
    for said, _ in results:
        print(said.strip())
    sys.exit(0 if all(good for _, good in results) else 1)


if __name__ == "__main__":
    main()
