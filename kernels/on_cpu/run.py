#!/usr/bin/env python3
"""Compiles families of kernels for the CPU, with g++ and its sanitizers, and runs check.cpp on them.

    python3 kernels/on_cpu/run.py             all families, and mutants that must fail
    python3 kernels/on_cpu/run.py random      one family

A family is compiled once, with all of its mutants: the environment's MUTANT is the number of the one to be.
Kernels that meet run on several devices at once, by the programs in meeting/.

This finds wrong indices, ends, alignments and formulas without a GPU: an access beyond an array, or one of 16 bytes at
another address than a multiple of 16, ends the run. It does not find what only a GPU has: code that NVRTC gets wrong,
races within a warp, times. Instructions in PTX are replaced by functions of shim.h; one without a function does not
compile.
"""
import os
import pathlib
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parent
ROOT = KERNELS.parent
FOLDERS = [KERNELS, ROOT / "crates/train/kernels", *(ROOT / "examples" / name for name in ("prove", "gpt", "decode"))]
TARGET = ROOT / "target" / "kernels-on-cpu"
# Those that meet. Their sanitizers know no fibers.
MEETING = {"inbox": "check.cpp", "norm_inbox": "norm.cpp", "norm_pull": "norm.cpp", "sharded": "sharded.cpp"}
# Those that take longest to compile first.
FAMILIES = ["random", "pointwise", *MEETING, "columns", "order", "number", "elementwise", "embedding", "prove", "gpt"]
FAMILIES += ["decode"]
FLAGS = "-std=c++20 -O1 -ffp-contract=off -w -pthread -fsanitize=address,undefined -fno-sanitize-recover=all".split()
FLAGS += ["-U_FORTIFY_SOURCE"]  # It takes a longjmp to another stack for a mistake.
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

# A family, a text in its sources (an expression, or statements up to a semicolon), and what stands there instead.
MUTANTS = [
    ("gpt", "part * width + h * head + at", "h * head + at"),
    ("gpt", "(z * heads + h) * context + place", "(h * sequences + z) * context + place"),
    ("gpt", "p + i <= place", "p + i < place"),
    ("gpt", "(place / block + 1) * block", "place + 8"),
    ("gpt", "context <= KEPT * blockDim.x * LANES<T>", "true"),
    ("pointwise", "begin + grid_index()", "n"),
    ("pointwise", "bits % 16 == 0 ? n / tile * tile : 0", "n / tile * tile"),
    ("pointwise", "larger(x, -FAR<A>)", "x"),
    ("pointwise", "-larger(-larger(x, -far), -far)", "x"),
    ("pointwise", "QUICK ? A(10) : FAR<A>", "FAR<A>"),
    ("number", "((u64)x | (u64)y | (u64)z) % (4 * sizeof(T)) == 0", "true"),
    ("number", "is_aligned(x) ? n / LANES<W> : 0", "n / LANES<W>"),
    ("number", "y == -1 ? (T)((BitsOf<T>)0 - (BitsOf<T>)x) : (T)(x / y)", "(T)(x / y)"),
    ("number", "(W)(y & (W)~SIGN<W>) > infinity", "false"),
    ("number", "kind == SIGNED || !(bits & SIGN<W>)", "true"),
    ("order", "(Sum)offsets[tile]", "(Sum)0"),
    ("order", "exclusive ? sum : next", "next"),
    ("order", "rank.count(digit);", ";"),
    ("order", "(i - begin[digit])", "i"),
    ("order", "threadIdx.x < step ? own : (A)(sums[from][threadIdx.x - step] + own)", "own"),
    ("elementwise", "(16 - (u64)x % 16) % 16 / sizeof(T)", "0"),
    ("random", "(16 - (u64)y % 16) % 16 / sizeof(T)", "0"),
    ("random", "(lane_id < 31 && to < end)", "to < end"),
    ("random", "(lane_id < 31 && to < end)", "lane_id < 31"),
    ("random", "whole ? *(const uint4*)(x + at_of(to)) : load_pack(x, at_of(to), n, false)",
     "*(const uint4*)(x + at_of(to))"),
    ("random", "end + 16 * lane_id", "end"),
    ("random", "words & 2", "words & 4"),
    ("random", "i - body < head ? i - body : i", "i"),
    ("columns", "for (u32 w = 1; w < WARPS; w++) sum += shared[0][w][i];", ""),
    ("columns", "cols % LANES<T> == 0", "true"),
    ("embedding", "begin + k * next < total", "true"),
    # Carries of the field; values that are not canonical; the twiddle factors; columns and nodes that do not exist.
    ("prove", "sum < a || sum >= P", "sum >= P"),
    ("prove", "if (low < high) sum -= EPSILON;", ";"),
    ("prove", "if (sum < rest) sum += EPSILON;", ";"),
    ("prove", "canonical(x[row * columns + column])", "x[row * columns + column]"),
    ("prove", "row * (column % done)", "row * column"),
    ("prove", "column >= columns", "false"),
    ("prove", "i < width && block * width + i < count", "i < width"),
    # The key without the others; a place too far or too few; another one's head; a word that is later; parts too short.
    ("decode", "k[at * DIM + j] = narrow<T>(a), k[at * DIM + half + j] = narrow<T>(b);", ";"),
    ("decode", "at + 1", "at"),
    ("decode", "at + 1", "at + 2"),
    ("decode", "heads + groups + own", "heads + own"),
    ("decode", "expf(score[h][p] - most)", "expf(score[h][p])"),
    ("decode", "bits >> 31 ? ~bits : bits | 0x80000000u", "bits | 0x80000000u"),
    ("decode", "~word", "word"),
    ("decode", "(words + PARTS - 1) / PARTS", "words / PARTS"),
    ("decode", "begin + each < words ? begin + each : words", "begin + each"),
    ("decode", "place[0] < given", "place[0] <= given"),
    # What is taken is not removed.
    ("inbox", "wipe<T>(at(k));", ""),
    ("inbox", "wipe<T>(in + u * step);", ""),
    # Sends without a credit; a kernel that ends before all is taken; a credit that is no release, or comes too early.
    ("inbox", "if (taken > 0 && !__syncthreads_and(hear_taken(meet, desk.epoch, taken))) return false;", ""),
    ("inbox", "return hear_taken(meet, desk.epoch, steps);", "return true;"),
    ("inbox", "store_release(to, (u64)epoch[rank] << 32 | count);",
     "store_relaxed(to, (u64)epoch[rank] << 32 | count);"),
    ("inbox", "tell_taken(meet, desk.epoch, p + 1);", "tell_taken(meet, desk.epoch, p + 2);"),
    # The last credit of a member that is in its next kernel already.
    ("inbox", "in == following(epoch[rank])", "false"),
    # A credit of the meeting before.
    ("inbox", "(in == epoch[rank] && (u32)seen >= count)", "(u32)seen >= count"),
    # The reserved word is sent: by one trip, of two and of more, and by slots.
    ("inbox", "put<T>(out + (u64)(moved + u * step) * 16, guarded<T>(unit[u]));",
     "put<T>(out + (u64)(moved + u * step) * 16, unit[u]);"),
    ("inbox", "put<T>(lines.out[rank] + i * 16, guarded<T>(unit[k]));", "put<T>(lines.out[rank] + i * 16, unit[k]);"),
    ("inbox", "put<T>(pad[k] + rooms + (u64)(out_place + parity) * (u32)(whole >> 32), guarded<T>(unit[k]));",
     "put<T>(pad[k] + rooms + (u64)(out_place + parity) * (u32)(whole >> 32), unit[k]);"),
    ("inbox", "put<T>(to + (i + u * share.step) * 16, guarded<T>(unit[u]));",
     "put<T>(to + (i + u * share.step) * 16, unit[u]);"),
    ("inbox", "result = guarded<T>(result);", ""),
    # The own copy has another NaN than the one that was sent.
    ("inbox", "take_and_fold<T>(meet, op, ending, factor, guarded<T>(own), at, result)",
     "take_and_fold<T>(meet, op, ending, factor, own, at, result)"),
    # Members that there are not.
    ("inbox", "if (k < meet.count) acc = acc + wide_lane<T>(unit[k], w);", "acc = acc + wide_lane<T>(unit[k], w);"),
    # One parity.
    ("inbox", "epoch[k] & 1u", "0u"),
    ("inbox", "2 * (from < to ? from : from - 1) + (epoch & 1)", "2 * (from < to ? from : from - 1)"),
    ("inbox", "epoch & 1u", "0u"),
    # Words that come one by one; elements of f64 in halves, and whose low words count.
    ("inbox", "high && unit.x != EMPTY && unit.z != EMPTY", "high"),
    ("inbox", "if constexpr (sizeof(T) == 8) store_halves(at, unit);\n    else store_packet(at, unit);",
     "store_packet(at, unit);"),
    ("inbox", "unit.y != EMPTY && unit.w != EMPTY",
     "unit.x != EMPTY && unit.y != EMPTY && unit.z != EMPTY && unit.w != EMPTY"),
    # Sums in the slot of the pieces.
    ("inbox", "(2 * (p % 2) + 1) * desk.slot", "2 * (p % 2) * desk.slot"),
    # Nothing is sent to a member that is to wait.
    ("inbox", "(route.receives(rank) || i == 0)", "route.receives(rank)"),
    # Sends without a credit; a kernel that ends before all is taken; credits that come too early.
    ("norm_inbox", "if (slots && taken > 0 && !__syncthreads_and(hear(taken))) return;", ""),
    ("norm_inbox", "if (slots) hear(pieces + behind);", ""),
    ("norm_inbox", "tell(p + 1);", "tell(p + 2);"),
    # Two steps ahead where slots are for one; sums in the slot of the pieces.
    ("norm_inbox", "owners ? 1 : 2", "2"),
    ("norm_inbox", "place(p, row, k) + slot", "place(p, row, k)"),
    # The reserved word is sent; the norm comes before all parts are there; a row that does not exist; rows that share
    # what their threads exchange.
    ("norm_inbox", "guarded<T>(*(const uint4*)(own.x + at(row, k)))", "*(const uint4*)(own.x + at(row, k))"),
    ("norm_inbox", "(done + 1) % parts != 0", "false"),
    ("norm_inbox", "if (row < plan.rows) finish(row, packs, gamma);", "finish(row, packs, gamma);"),
    ("norm_inbox", "owners ? meet.count : 1", "1"),
    # The sums of a row's blocks: those of an earlier kernel, of other warps, of the other sum.
    ("norm_inbox", "word >> 32 != number", "false"),
    ("norm_inbox", "split && ticket == gridDim.x - 1", "false"),
    ("norm_inbox", "thread / 32 * plan.split + blockIdx.x % plan.split",
     "blockIdx.x % plan.split * (threads() / 32) + thread / 32"),
    ("norm_inbox", "MEAN ? all(TAKEN, sum(packs, [](f32 x) { return x; })) / f32(plan.cols) : 0.0f",
     "MEAN ? all(DONE, sum(packs, [](f32 x) { return x; })) / f32(plan.cols) : 0.0f"),
    # Reads before the others have begun; sums in another order; rows that have another owner on each member.
    ("norm_pull", "!first || hear(meet, START, epoch, false)", "true"),
    ("norm_pull", "desk.x[from + j] + offset", "desk.x[(from + j + 1) % meet.count] + offset"),
    ("norm_pull", "row_of(p, meet.me)", "row_of(p, meet.me / 2)"),
    # A norm before the others are through with the wave; a kernel that ends before they are; a credit that is no
    # release, comes too early, or is of the meeting before.
    ("norm_pull", "__syncthreads_and(hear(p))", "__syncthreads_and(hear(p - 1))"),
    ("norm_pull", "__syncthreads_and(hear(p))", "__syncthreads_and(p == waves || hear(p))"),
    ("norm_pull", "store_release(to, (u64)epoch[rank] << 32 | count);",
     "store_relaxed(to, (u64)epoch[rank] << 32 | count);"),
    ("norm_pull", "tell_taken(meet, desk.epoch, p + 1);", "tell_taken(meet, desk.epoch, p + 2);"),
    ("norm_pull", "(in == epoch[rank] && (u32)seen >= count)", "(u32)seen >= count"),
    # The same of two members in place. (Here a load is complete at once, so it has to be two waves too early.)
    ("norm_pull", "p < 2 || hear(p - 1)", "p < 3 || hear(p - 3)"),
    ("norm_pull", "p < 2 || hear(p - 1)", "p < 2 || p == waves + 1 || hear(p - 1)"),
    ("norm_pull", "tell_read(p + 1);", "tell_read(p + 3);"),
    # Two members apart: a kernel that ends before the other one is through; one that says too early that it is; members
    # that do not agree on it; a member in place.
    ("norm_pull", "hear(1);", ""),
    ("norm_pull", "p == last", "p == 0"),
    ("norm_pull", "desk.x[0] != desk.y[0] && desk.x[1] != desk.y[1]", "desk.x[meet.me] != desk.y[meet.me]"),
    ("norm_pull", "desk.x[0] != desk.y[0] && desk.x[1] != desk.y[1]", "true"),
    # A wave that is not fetched.
    ("norm_pull", "fetch(p + 1, coming);", "fetch(p, coming);"),
    # An empty part that begins in the middle of a chunk; a norm before all squares are there; a meeting whose words may
    # be of one before.
    ("sharded", "(from + CHUNK - 1) / CHUNK", "from / CHUNK"),
    ("sharded", "if (!meet_all(work.meet, desk)) return false;", "__syncthreads();"),
    ("sharded", "store_release(to, word_of(meet, desk, threadIdx.x));",
     "store_relaxed(to, word_of(meet, desk, threadIdx.x));"),
    ("sharded", "return (u64)desk.epoch[rank] << 32 | 1;", "return 1;"),
    # Units of another chunk.
    ("sharded", "work.fetch(walk.i, 0, next.in);", "work.fetch(i, 0, next.in);"),
    ("sharded", "work.load_kept(walk.i, next);", "work.load_kept(i, next);"),
    # Packets of which one half has come; of a call before; of another chunk.
    ("sharded", "x[k].y == flag && x[k].w == flag", "x[k].y == flag"),
    ("sharded", "desk.epoch[rank == meet.me ? (rank + 1) % meet.count : rank]", "1"),
    ("sharded", "(at - begin)", "at"),
    # The own sums of other threads before they are there.
    ("sharded", "if (!__syncthreads_and(come)) return false;", "if (!come) return false;"),
    # Of buckets: a piece too far; parameters behind the end; units at places that are not aligned; others' squares.
    ("sharded", "start(middle) <= i", "start(middle) <= i + 8"),
    ("sharded", "len - spot.at < FOUR ? (u32)(len - spot.at) : FOUR", "FOUR"),
    ("sharded", "WHERE::aligned || to % sizeof(Four) == 0", "true"),
    ("sharded", "if (rank != meet.me) store(desk.sums[rank] + at, squares);", ";"),
    ("sharded", "chunk + word(spot(chunk * CHUNK).piece, SHIFT)", "chunk"),
    ("sharded", "work.changing = changes(desk.rule, found);", "work.changing = true;"),
    ("sharded", "later != nullptr ? *later : rule", "rule"),
    # Those that are not added up yet: not those of all; a step after one that was not finite.
    ("sharded", "word(spot.piece, BY_RANK + rank) + spot.at * sizeof(T)",
     "word(spot.piece, BY_RANK + meet.me) + spot.at * sizeof(T)"),
    ("sharded", "adds && !is_finite(*norm)", "false"),
]


def mutants_of(family):
    """The numbers of a family's mutants, and a function that makes a source of all of them, which `mutant` selects."""
    numbered = [(number, old, new) for number, (of, old, new) in enumerate(MUTANTS, 1) if of == family]
    seen = {old: 0 for _, old, _ in numbered}

    def choice(match):
        code = old = match[0]
        seen[old] += 1
        for number, _, new in [one for one in numbered if one[1] == old]:
            if old.endswith(";"):
                code = f"if (mutant == {number}) {{ {new} }} else {{ {code} }}"
            else:
                code = f"(mutant == {number} ? ({new}) : ({code}))"
        return code

    def mutate(text):
        return re.sub("|".join(re.escape(old) for old in seen), choice, text) if seen else text

    return [number for number, _, _ in numbered], seen, mutate


def replaced(match):
    for beginning, function in PTX.items():
        if match[1].startswith(beginning):
            return function + ";"
    return "instruction_without_a_function_in_run_py();"


def compiled(family):
    """The program of a family, with all of its mutants."""
    folder = TARGET / family
    folder.mkdir(parents=True, exist_ok=True)
    _, seen, mutate = mutants_of(family)
    (code,) = (folder / f"{family}.cu" for folder in FOLDERS if (folder / f"{family}.cu").exists())
    for source in [*KERNELS.glob("*.cuh"), code]:
        if source.name == "access.cuh":
            continue
        if family not in MEETING and source.name in ("meet.cuh", "move.cuh", "combine.cuh"):
            continue
        text = STATEMENT.sub(replaced, mutate(source.read_text()))
        (folder / source.name).write_text(re.sub(r"#pragma unroll.*", "", text))
    gone = [old for old, times in seen.items() if times == 0]
    if gone:
        sys.exit(f"{family}: a mutant's text is not there any more: {gone[0]}")
    program = folder / "check"
    meets = family in MEETING
    here, flags = (HERE / "meeting", [*FLAGS_OF_MEETING, "-DMEETING"]) if meets else (HERE, FLAGS)
    check = here / MEETING.get(family, "check.cpp")
    sources = [f"-DFAMILY_{family}", f'-DSOURCE="{folder / family}.cu"', f"-I{folder}", f"-I{here}", check]
    subprocess.run(["g++", *flags, *sources, "-o", program], check=True)
    return program


def run(family, program, number):
    """Runs a family (0) or a mutant, which must fail. What to say of it, and whether it is as it should be."""
    start = time.monotonic()
    environment = {**os.environ, "MUTANT": str(number)}
    run = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=600)
    good = (run.returncode == 0) == (number == 0)
    took = f"{time.monotonic() - start:.1f} s"
    if number == 0:
        return f"{family}, {took}: {run.stdout}{run.stderr[:4000]}", good
    return f"mutant {number} of {family} {'dies' if good else 'lives'}, {took}: {MUTANTS[number - 1][1]}", good


def main():
    families = sys.argv[1:] or FAMILIES
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(compiled, families))
        # The families first, since they take longest.
        runs = [(family, program, 0) for family, program in zip(families, programs)]
        runs += [(*of, number) for of in zip(families, programs) for number in mutants_of(of[0])[0]]
        results = list(pool.map(lambda one: run(*one), runs))
    for said, _ in results:
        print(said.strip())
    sys.exit(0 if all(good for _, good in results) else 1)


if __name__ == "__main__":
    main()
