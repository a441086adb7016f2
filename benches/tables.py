#!/usr/bin/env python3
"""Writes the measured numbers and plots of the book and the README from benches/results/<machine>/<bench>.json.

`benches/tables.py` rewrites README.md, these pages of docs/src: measured.md, measured/*.md, guide/testing.md, and most
of plots/*.svg;
`benches/tables.py --check` fails if one of them would change. All numbers come from the files; only the targets are
typed by hand.

The pages have comments that choose the text between them and `<!-- end -->`:

* `measured:<bench>`: a table of everything in the files.
* `targets:<bench>`: the targets and the results. A machine with targets but without results says "not measured".
* `sweeps:<bench>`: a line for each sweep over sizes (cases `gpu/<operation>/<type>/<devices>/<bytes>`, also
  `gpu/graph/..` and `gpu/no_peer/..`).
* `sizes:<bench>`: every size of the all-reduce of f32 on the most devices of each machine.
* `fused:<bench>`: a line for each case of what one kernel does here instead of several calls.
* `algorithms:<bench>`: the time of each algorithm of all-reduces by itself, by type, devices and size.
* `rest:<bench>`: all other cases that are no sweeps, with the 99th percentiles.
* `kernels:parallel`: a line for each operation. `part:<name>`: the other cases of `parallel`.
* `world:cluster`: every size of the all-reduces of two processes on GPUs, with what is allowed.
* `headlines:all`: the README's table. `hosts:predict_hosts`: a line for each machine of `predict --hosts`.
* `behind:sweeps`, `behind:targets`, `behind:cases`: every size of a sweep, every target and every other case where this
  crate is behind, of all benches. `behind:areas`: their numbers, and the heads of the list of reasons in measured.md.
* `value <bench>; <machine>; <case>`, within a sentence: the value of a case, or with `; <peer>` the peer's value.
* `ratio <machine>; <operation>; <type>; <devices>; worst|mean`, within a sentence: the best peer's time / time here, of
  a sweep.
* `spread <bench>; <cases>`, within a sentence: the lowest and the highest ratio of the peer to here.
"""
import json
import math
import pathlib
import re
import sys
import textwrap

import cluster_tables
import fused_tables
import parallel_tables
import plots

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md", ROOT / "docs/src/measured.md", *sorted(ROOT.glob("docs/src/measured/*.md")),
    ROOT / "docs/src/guide/testing.md",
]
PICTURES = ROOT / "docs/src/plots"
NAMES = "measured|targets|sweeps|sizes|fused|algorithms|rest|kernels|part|world|headlines|hosts|behind"
MARK = re.compile(rf"(<!-- ({NAMES}):(\w+) -->\n).*?(<!-- end -->)", re.S)
INLINE = re.compile(r"(<!-- (value|ratio|spread) ([^>]*) -->).*?(<!-- end -->)", re.S)

# Targets: words, the target, the pattern of the cases (in their order in the file), and the beginning of a peer's name:
# with a peer the ratio counts, without one the value. With many cases only the worst is shown.
TARGETS = {
    "memory": [
        ("4 KiB from the pool and back, one device thread", "<= 30 ns", r"gpu/small/pair_4K/one", None),
        ("the same on all device threads together: rate of each, for that of one alone",
         ">= 0.95", r"gpu/small/pair_4K/all", "one thread"),
        ("the same: times as fast as `cuMemAllocAsync` + `cuMemFreeAsync`",
         ">= 200", r"gpu/small/pair_4K/all", "cuMemAllocAsync"),
        ("the same: times as fast as PyTorch's allocator", ">= 5", r"gpu/small/pair_4K/all", "PyTorch"),
        ("large blocks, split and joined, with 10, 100, 1000 and 10,000 live", "<= 100 ns", r"gpu/large/\d+", None),
        ("drop on a plain thread; with three of them", "<= 50 ns", r"gpu/remote/thread/\d", None),
        ("drop on another device's thread; on three", "<= 10 ns", r"gpu/remote/device/\d", None),
        ("another stream's memory, in use: waits put into the stream, for each block",
         "<= 1", r"gpu/steal/in_flight/waits", None),
        ("the same, ordered already or over", "0", r"gpu/steal/(ordered|over)/waits", None),
        ("`random_allocations`: driver calls of the second replay, most of 12",
         "0", r"gpu/rmm_random/\d+/\d+/driver_calls", None),
        ("`random_allocations`: bytes held for bytes needed, worst of 12",
         "<= 1.10", r"gpu/rmm_random/\d+/\d+/reserved", None),
        ("the same with `memory_slack(1.1)`, which moves memory: from 256 MiB requests on, worst of 6",
         "<= 1.10", r"gpu/rmm_random/.*/slack/reserved", None),
        ("`random_allocations`: times as fast as the driver's pool, worst of 12",
         "> 1", r"gpu/rmm_random/\d+/\d+", "cuMemAllocAsync"),
        ("the same with `memory_slack(1.1)`, worst of 6", "> 1", r"gpu/rmm_random/.*/slack", "cuMemAllocAsync"),
        ("`multi_stream_allocations`, fresh against prewarmed, 1, 2 and 4 streams",
         "1", r"gpu/rmm_streams/\d", "prewarmed"),
        ("the loops of pytorch#193400 and #35901 under a limit: requests refused, most of 3",
         "0", r"gpu/fragmentation/.*/refused", None),
        ("asking whether work is over", "<= 5 ns", r"gpu/words/is_complete", None),
    ],
    # Sweeps, on all devices of a machine: the curve, and which of the ratios best peer / here over its sizes counts.
    "collectives": [
        *(
            (f"{words}: best peer / here, {what}", target, curve, what)
            for words, curve, wanted in [
                ("`all_reduce` f32", ("all_reduce", "f32"), (">= 1", ">= 1.2")),
                ("`all_reduce` bf16", ("all_reduce", "bf16"), (">= 1", ">= 1.2")),
                ("`all_reduce` f32 in graphs", ("graph/all_reduce", "f32"), (">= 1", ">= 1.2")),
                ("`all_reduce` bf16 in graphs", ("graph/all_reduce", "bf16"), (">= 1", ">= 1.2")),
                ("`reduce_scatter`", ("reduce_scatter", "f32"), (">= 1",)),
                ("`all_gather`", ("all_gather", "f32"), (">= 1",)),
                ("`broadcast`", ("broadcast", "f32"), (">= 1",)),
                ("`all_to_all`", ("all_to_all", "f32"), (">= 1",)),
                ("`all_reduce` without peer access", ("no_peer/all_reduce", "f32"), (">= 1", ">= 1.2")),
            ]
            for what, target in zip(("worst", "mean"), wanted)
        ),
        *(
            (f"`all_reduce` f32 of {words} on 8 GPUs", f"<= {micros} us", rf"gpu/all_reduce/f32/8/{size}", None)
            for words, size, micros in [
                ("1 KB", 1 << 10, 6.2), ("16 KB", 1 << 14, 6.3),
                ("64 KB", 1 << 16, 7.5), ("256 KB", 1 << 18, 8.5), ("1 MB", 1 << 20, 12.5),
                ("4 MB", 1 << 22, 29), ("16 MB", 1 << 24, 97),
                ("64 MB", 1 << 26, 335), ("256 MB", 1 << 28, 1290), ("1 GB", 1 << 30, 4900),
            ]
        ),
        *(
            (f"`all_reduce` f32 of {words} on 8 GPUs, in a graph", f"<= {micros} us",
             rf"gpu/graph/all_reduce/f32/8/{size}", None)
            for words, size, micros in [
                ("1 KB", 1 << 10, 4.0), ("16 KB", 1 << 14, 5.0),
                ("64 KB", 1 << 16, 7.5), ("256 KB", 1 << 18, 8.5), ("1 MB", 1 << 20, 12.5),
            ]
        ),
        ("set-up of a further pool, until its first all-reduce is over", "<= 50 ms", r"gpu/setup/\d+", None),
        ("the same: MB of each GPU", "<= 16", r"gpu/setup/\d+/memory", None),
        ("`barrier`: the meeting, there and back (aimed at for 8 threads)", "<= 1.5 us", r"gpu/meeting/\d+", None),
    ],
    "overlap": [
        ("step of batch 8192 on 8 GPUs", "<= 1,430 us", r"gpu/step/8/8192", None),
        ("step of batch 65536 on 8 GPUs", "<= 5,870 us", r"gpu/step/8/65536", None),
        ("exposed at 65536 on 8 GPUs", "<= 60 us", r"gpu/exposed/8/65536", None),
        ("step of batch 8192, all GPUs: DDP's / here", ">= 1", r"gpu/step/{n}/8192", "DDP"),
        ("step of batch 65536, all GPUs: DDP's / here", ">= 1", r"gpu/step/{n}/65536", "DDP"),
    ],
    "jobs": [
        ("a job, from `submit` to the woken waiter", "<= 5 us", r"latency/\d", None),
        ("the same: time of a channel by hand / here", ">= 1", r"latency/\d", "crossbeam-channel"),
        ("the same: time of tokio by hand / here", ">= 1", r"latency/\d", "tokio"),
        ("an empty job, two devices, four submitting threads", "<= 2000 ns", r"throughput/2", None),
        ("commitments on two GPUs: time of one / here", ">= 1.95", r"prove/2", "one device"),
    ],
    "candle": [
        ("a training step of a perceptron, 8192 rows: time of candle on one GPU / here", ">= 1.75",
         r"gpu/candle_step/2/8192", "candle"),
        ("a tensor of candle as a buffer, and its drop", "<= 1 us", r"gpu/candle_adopt/2", None),
    ],
    "decode": [
        ("tokens of a Llama-shaped model on two GPUs: rate here / torch's, worst", ">= 1",
         r"gpu/decode/2/\d+/tokens_per_s", "torch"),
        ("from the start to the first token: time of torch / here", ">= 3", r"gpu/decode/2/first_token_ms", "torch"),
    ],
    "candle_decode": [
        ("tokens of a Llama-shaped model: rate here / candle's", ">= 1.15", r"gpu/candle_decode/2/tokens_per_s",
         "candle"),
        ("from the start to the first token: time of candle / here", ">= 3", r"gpu/candle_decode/2/first_token_ms",
         "candle"),
    ],
    "parallel": parallel_tables.TARGETS,
    "cluster": cluster_tables.TARGETS,
}

# Machines with targets.
WANTED = {"collectives": ["8 x NVIDIA H200"], "overlap": ["8 x NVIDIA H200"], "cluster": ["2 x NVIDIA H200"]}
# Machines without such cases are left out of targets; without cases of GPUs, if a bench is not here.
MEASURED = {"cluster": "", "jobs": ""}


def number(value):
    """Three significant digits, without an exponent for everyday sizes."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def read(bench):
    rows = []
    for path in sorted(ROOT.glob(f"benches/results/*/{bench}.json")):
        for line in path.read_text().splitlines():
            if line.strip():
                rows.append(json.loads(line))
    return rows


def targets(bench):
    rows = read(bench)
    begin = MEASURED.get(bench, "gpu/")
    machines = list(dict.fromkeys(row["machine"] for row in rows if row["case"].startswith(begin)))
    if not machines:
        return "(not measured yet)\n"
    machines += [machine for machine in WANTED.get(bench, []) if machine not in machines]
    out = ["| | target | " + " | ".join(machines) + " |", "|---|---|" + "---:|" * len(machines)]
    for words, target, cases, peer in TARGETS[bench]:
        cells = [cell(bench, rows, machine, target, cases, peer) for machine in machines]
        out.append(f"| {words} | {target} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def cell(bench, rows, machine, target, cases, peer):
    """The result for a target on a machine."""
    rows = [row for row in rows if row["machine"] == machine]
    if not rows:
        return "not measured"
    devices = int(machine.split()[0]) if machine.split()[0].isdigit() else 1
    if isinstance(cases, tuple):
        ratios = best_ratios(curves(bench).get((machine, *cases, devices), {})).values()
        if not ratios:
            return "not measured"
        return f"{min(ratios) if peer == 'worst' else mean_of(ratios):.2f}"
    return met(rows, target, cases.replace("{n}", str(devices)), peer)


def met(rows, target, cases, peer):
    """The result for a target in these rows."""
    rows = [row for row in rows if re.fullmatch(cases, row["case"])]
    if peer is None:
        # A case has a row for each peer, with the same value for this crate.
        values, unit = list({row["case"]: row["value"] for row in rows}.values()), rows[0]["unit"] if rows else ""
    else:
        values = [row["ratio"] for row in rows if (row.get("peer") or "").startswith(peer)]
        unit = ""
    values = [value for value in values if value is not None and math.isfinite(value)]
    if not values:
        return ""
    if len(values) > 4:
        values = [min(values) if target.startswith(">") else max(values)]
    shown = " / ".join(number(value) for value in values)
    return f"{shown} {unit}" if unit in ("ns", "us", "ms") else shown


def best_ratios(points):
    """By size: how many times as long the best of the peers takes."""
    return {size: min(peers.values()) / here for size, (here, peers) in points.items() if peers}


def mean_of(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def kernels(bench):
    return parallel_tables.kernels(read(bench), number)


def world(bench):
    return cluster_tables.sums(read(bench), number, size_name)


def part(name):
    return listed(parallel_tables.part(read("parallel"), name))


def table(bench):
    return listed(read(bench))


def listed(rows):
    if not rows:
        return "(not measured yet)\n"
    out = ["| case | machine | here | peer | | ratio |", "|---|---|---:|---|---:|---:|"]
    for row in rows:
        peer, unit = row.get("peer") or "", row["unit"]
        theirs = f"{number(row.get('peer_value'))} {unit}" if row.get("peer_value") is not None else ""
        ratio = f"{row['ratio']:.2f}" if row.get("ratio") is not None else ""
        ours = f"{number(row['value'])} {unit}"
        out.append(f"| {row['case']} | {row['machine']} | {ours} | {peer} | {theirs} | {ratio} |")
    return "\n".join(out) + "\n"


SWEEP = re.compile(r"gpu/((?:graph/|no_peer/)?(?!zero)\w+)/(f32|bf16)/(\d+)/(\d+)")
# The kind of a sweep, in words.
WHERE = {"graph": " in graphs", "no_peer": " without peer access"}
# nccl-tests' bus bandwidth: bytes per second times this factor, times (devices - 1) / devices except for broadcast.
BUS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


def bus(operation, devices, size, micros):
    operation = operation.rpartition("/")[2]
    factor = BUS[operation] * (devices - 1) / devices if operation in BUS else 1
    return factor * size / micros / 1e3


def curves(bench):
    """By machine and sweep, by size: the time of this crate, and of each peer by name, of its fastest version."""
    found = {}
    for row in read(bench):
        case = SWEEP.fullmatch(row["case"])
        if case:
            key = (row["machine"], case[1], case[2], int(case[3]))
            here, peers = found.setdefault(key, {}).setdefault(int(case[4]), (row["value"], {}))
            if row.get("peer"):
                name = re.sub(r"^NCCL [\d.]+", "NCCL", row["peer"])
                peers[name] = min(row["peer_value"], peers.get(name, math.inf))
    return {key: dict(sorted(sizes.items())) for key, sizes in found.items()}


def size_name(size):
    for unit in ("GB", "MB", "KB"):
        scale = 1 << {"GB": 30, "MB": 20, "KB": 10}[unit]
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def sweeps(bench):
    out = []
    for (machine, operation, dtype, devices), sizes in curves(bench).items():
        least, most = min(sizes), max(sizes)
        ratios = best_ratios(sizes)
        mean = worst = ""
        if ratios:
            at = min(ratios, key=ratios.get)
            mean = f"{mean_of(ratios.values()):.2f}"
            worst = f"{ratios[at]:.2f} at {size_name(at)}"
        small, (large, _) = sizes[least][0], sizes[most]
        bandwidth = number(bus(operation, devices, most, large))
        cells = (f"{number(small)} us ({size_name(least)})", f"{bandwidth} GB/s ({size_name(most)})", mean, worst)
        where, _, name = operation.rpartition("/")
        out.append(f"| `{name}` {dtype}{WHERE.get(where, '')} | {devices} | {machine} | {' | '.join(cells)} |")
    if not out:
        return "(not measured yet)\n"
    head = "| | devices | machine | smallest | bus bandwidth, largest | best peer / here: mean | worst |"
    return "\n".join([head, "|---|---:|---|---:|---:|---:|---|", *out]) + "\n"


def sizes(bench):
    found = {key: sizes for key, sizes in curves(bench).items() if key[1:3] == ("all_reduce", "f32")}
    # Multiprocessors that our kernels use, if the file has the number.
    blocks = {(row["machine"], row["case"]): row["blocks"] for row in read(bench) if "blocks" in row}
    out = []
    for machine in dict.fromkeys(key[0] for key in found):
        devices = max(key[3] for key in found if key[0] == machine)
        points = found[machine, "all_reduce", "f32", devices]
        names = list(dict.fromkeys(name for _, peers in points.values() for name in peers))
        blank = out[-1:] and [""]
        told = any(at == machine for at, _ in blocks)
        head = [f"{devices} of {machine}", "here", "bus bandwidth", *["SMs"][: told], *names, "best / here"]
        out += [*blank, f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for size, (here, peers) in points.items():
            cells = [f"{number(here)} us", f"{number(bus('all_reduce', devices, size, here))} GB/s"]
            if told:
                cells.append(number(blocks.get((machine, f"gpu/all_reduce/f32/{devices}/{size}"))))
            cells += [f"{number(peers[name])} us" if name in peers else "" for name in names]
            cells.append(f"{min(peers.values()) / here:.2f}" if peers else "")
            out.append(f"| {size_name(size)} | {' | '.join(cells)} |")
    return "\n".join(out or ["(not measured yet)"]) + "\n"


def fused(bench):
    return fused_tables.table(read(bench), number)


ALGORITHM = re.compile(r"gpu/algorithm/(\w+)/(\w+)/(\d+)/(\d+)")


def algorithms(bench):
    names, times = [], {}
    for row in read(bench):
        if found := ALGORITHM.fullmatch(row["case"]):
            name, dtype, devices, size = found.groups()
            names += [name] if name not in names else []
            times.setdefault((row["machine"], int(devices), dtype, int(size)), {})[name] = row["value"]
    if not times:
        return "(not measured yet)\n"
    out = [f"| machine | GPUs | type | bytes | {' | '.join(names)} |", "|---|---:|---|---:|" + "---:|" * len(names)]
    for (machine, devices, dtype, size), by_name in sorted(times.items()):
        cells = " | ".join(f"{number(by_name[name])} us" if name in by_name else "" for name in names)
        out.append(f"| {machine} | {devices} | {dtype} | {size_name(size)} | {cells} |")
    return "\n".join(out) + "\n"


def rest(bench):
    others = (SWEEP, ALGORITHM, fused_tables.CASE)
    rows = [row for row in read(bench) if row["case"].startswith("gpu/")]
    rows = [row for row in rows if not any(case.fullmatch(row["case"]) for case in others)]
    if not rows:
        return "(not measured yet)\n"
    out = ["| case | machine | here | p99 | peer | | p99 | ratio |", "|---|---|---:|---:|---|---:|---:|---:|"]
    for row in rows:
        peer = row.get("peer") or ""
        ratio = f"{row['ratio']:.2f}" if row.get("ratio") is not None else ""
        times = [number(row.get(key)) for key in ("value", "p99", "peer_value", "peer_p99")]
        here, p99, theirs, their_p99 = (f"{time} {row['unit']}" if time else "" for time in times)
        out.append(f"| {row['case']} | {row['machine']} | {here} | {p99} | {peer} | {theirs} | {their_p99} | {ratio} |")
    return "\n".join(out) + "\n"


# The README's numbers: words, source (bench, machine, case, peer), and page of tables.
HEADLINES = [
    ("a closure on both GPUs and back, against `rayon::broadcast`",
     ("scope", "2 x NVIDIA H200", "gpu/2", "rayon"), "scope"),
    ("4 KiB of memory and back on 4 threads, against PyTorch's allocator",
     ("memory", "4 x NVIDIA H200", "gpu/small/pair_4K/all", "PyTorch"), "memory"),
    ("a training step of GPT-2 small on 2 GPUs, against DDP with `torch.compile`",
     ("gpt", "2 x NVIDIA H200", "gpu/gpt/2/step", "DDP, torch.compile"), "training"),
    ("tokens of a Llama-shaped model on 2 GPUs, 8 sequences, against `torch.compile` and NCCL in a graph",
     ("decode", "2 x NVIDIA H200", "gpu/decode/2/8/tokens_per_s", "torch.compile"), "decode"),
]


def headlines(_):
    out = ["| | here | other | times as fast | |", "|---|---:|---:|---:|---|"]
    link = lambda page: f"[how](docs/src/measured/{page}.md)"
    means = " / ".join(ratio(f"{n} x NVIDIA H200", "all_reduce", "f32", str(n), "mean") for n in (2, 4, 8))
    words = "`all_reduce` of f32, mean of 1 KB to 1 GB, 2 / 4 / 8 GPUs, against NCCL"
    out.append(f"| {words} | | | {means} | {link('collectives')} |")
    for words, at, section in HEADLINES:
        row = case(*at)
        here, other = (f"{number(row[key])} {row['unit']}" for key in ("value", "peer_value"))
        out.append(f"| {words} | {here} | {other} | {number(row['ratio'])} | {link(section)} |")
    return "\n".join(out) + "\n"


def hosts(bench):
    machines = {}
    for row in read(bench):
        machines.setdefault((row["nics"], row["hosts"]), {})[row["bytes"]] = row
    if not machines:
        return "(not predicted yet)\n"
    sizes = list(next(iter(machines.values())))
    head = ["hosts of 8", "NICs of each", *map(size_name, sizes), "the flat ring wins", "model off by, at most"]
    out = [f"| {' | '.join(head)} |", "|---:|---:|" + "---|" * len(sizes) + "---|---:|"]
    for (nics, count), rows in machines.items():
        ran = all(row["flat_ran"] for row in rows.values())
        cells = []
        for row in rows.values():
            flat, hierarchy = (row[way + ("_ran" if ran else "")] for way in ("flat", "hierarchy"))
            cells.append(f"{flat:,.0f} / {hierarchy:,.0f}{' *' if ran else ''}")
        wins = next(iter(rows.values()))["flat_wins_from"]
        off = max((abs(row[way] / row[f"{way}_ran"] - 1) for row in rows.values() for way in ("flat", "hierarchy")),
                  default=0) if ran else None
        cells += [f"from {wins / (1 << 30):.1f} GB on" if wins else "nowhere", f"{100 * off:.1f} %" if ran else ""]
        out.append(f"| {count} | {nics} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def sweeps_behind():
    """The sizes at which the best of the peers is faster, to two digits."""
    out = ["| | GPUs | NCCL is ahead at | worst |", "|---|---:|---|---:|"]
    for (machine, operation, dtype, devices), points in curves("collectives").items():
        ratios = best_ratios(points)
        slower = {size: ratio for size, ratio in ratios.items() if round(ratio, 2) < 1}
        if slower:
            where, _, name = operation.rpartition("/")
            of = "" if machine.startswith(f"{devices} x") else f" of {machine}"
            told = ", ".join(size_name(a) + (f" to {size_name(b)}" if a < b else "") for a, b in runs(ratios, slower))
            at = min(slower, key=slower.get)
            words = f"`{name}` {dtype}{WHERE.get(where, '')}"
            out.append(f"| {words} | {devices}{of} | {told} | {slower[at]:.2f} at {size_name(at)} |")
    return "\n".join(out) + "\n"


def runs(all_sizes, some):
    """The first and the last size of each run of neighbours."""
    found, last = [], None
    for size in all_sizes:
        if size in some:
            found = [*found[:-1], (found[-1][0], size)] if last in some else [*found, (size, size)]
        last = size
    return found


def misses(target, cell):
    """Whether a cell of a table of targets misses its target. A target without a sign is met within 10 %."""
    sign, wanted = re.match(r"([<>]=?)? ?([\d.,]+)", target).groups()
    wanted = float(wanted.replace(",", ""))
    meets = {
        "<=": lambda value: value <= wanted,
        ">=": lambda value: value >= wanted,
        ">": lambda value: value > wanted,
        None: lambda value: abs(value - wanted) <= 0.1 * wanted,
    }[sign]
    return not all(meets(float(value)) for value in re.findall(r"[\d.]+", cell.replace(",", "")))


def targets_behind():
    out = ["| | target | machine | result |", "|---|---|---|---:|"]
    for bench in TARGETS:
        rows, first = read(bench), ""
        for machine in dict.fromkeys(row["machine"] for row in rows):
            for said, target, cases, peer in TARGETS[bench]:
                # "the same" means the last one with words of its own.
                first = first if said.startswith("the same") else said.partition(": ")[0]
                words = said.replace("the same", first, 1)
                result = cell(bench, rows, machine, target, cases, peer)
                if result not in ("", "not measured") and misses(target, result):
                    out.append(f"| {words} | {target} | {machine} | {result} |")
    return "\n".join(out) + "\n"


# With peers that are no part of this crate.
COMPARED = (
    "scope collectives copy launch memory ring data_parallel build overlap parallel cluster decode gpt jobs candle "
    "candle_decode"
).split()


def cases_behind():
    """Cases that are no sweeps and where a peer is ahead by more than 5 %."""
    known = lambda row: row.get("ratio") is not None
    rows = [row for bench in COMPARED for row in read(bench) if known(row) and row["ratio"] < 0.95]
    # The sums of `cluster` have lower limits than their peer, which its page counts; those above them are listed.
    left_out = (SWEEP, re.compile(r"gpu/host/.*"))
    rows = [row for row in rows if not any(case.fullmatch(row["case"]) for case in left_out)]
    return listed([row for row in rows if not row["peer"].startswith("gpu-pool")])


def areas_behind():
    """The README's list: counts from the results, and the bold heads of the reasons in measured.md."""
    sizes = []
    for n in (2, 4, 8):
        ratios = [best_ratios(points) for key, points in curves("collectives").items() if key[0].startswith(f"{n} x")]
        ratios = [round(ratio, 2) for points in ratios for ratio in points.values()]
        sizes.append(f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}")
    missed, cases = (table.count("\n") - 2 for table in (targets_behind(), cases_behind()))
    reasons = (ROOT / "docs/src/measured.md").read_text().partition(REASONS)[2].partition("<details>")[0]
    heads = [" ".join(head.split()).rstrip(".") for head in re.findall(r"^- \*\*(.+?)\*\*", reasons, re.M | re.S)]
    if len(heads) < 2:
        sys.exit(f"docs/src/measured.md has no list of reasons under {REASONS}")
    link = f"docs/src/measured.md#{REASONS.strip('# ').lower().replace(' ', '-')}"
    text = (
        f"NCCL is ahead at {sizes[0]} sizes of collectives on 2 GPUs, {sizes[1]} on 4 and {sizes[2]} on 8. {missed} "
        f"targets are missed, and a peer is ahead by more than 5 % in {cases} other cases. [Where, and why]({link}): "
        f"{'; '.join(heads)}."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


REASONS = "## Where this crate is behind"
BEHIND = {"sweeps": sweeps_behind, "targets": targets_behind, "cases": cases_behind, "areas": areas_behind}


def case(bench, machine, name, peer=""):
    """The row of a case. An unknown case or peer is an error."""
    rows = [row for row in read(bench) if (row["machine"], row["case"]) == (machine, name)]
    rows = [row for row in rows if (row.get("peer") or "").startswith(peer)]
    if not rows:
        sys.exit(f"benches/results has no {name} of {bench} on {machine} {peer}")
    return rows[0]


def value(bench, machine, name, peer=None):
    row = case(bench, machine, name, peer or "")
    return f"{number(row['value' if peer is None else 'peer_value'])} {row['unit']}"


def ratio(machine, operation, dtype, devices, what):
    ratios = best_ratios(curves("collectives")[machine, operation, dtype, int(devices)])
    return f"{mean_of(ratios.values()) if what == 'mean' else min(ratios.values()):.2f}"


def spread(bench, cases):
    ratios = [row["peer_value"] / row["value"] for row in read(bench) if re.fullmatch(cases, row["case"])]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def filled(page):
    """The page with the text that its comments choose."""
    write = {
        "measured": table, "targets": targets, "sweeps": sweeps, "sizes": sizes, "fused": fused, "rest": rest,
        "algorithms": algorithms, "kernels": kernels, "part": part, "world": world, "headlines": headlines,
        "hosts": hosts, "behind": lambda name: BEHIND[name](),
    }
    inline = {"value": value, "ratio": ratio, "spread": spread}
    page = MARK.sub(lambda m: m[1] + write[m[2]](m[3]) + m[4], page)
    return INLINE.sub(lambda m: m[1] + inline[m[2]](*re.split(r"; ", " ".join(m[3].split()))) + m[4], page)


def ages():
    """The dates of each machine's runs, which benches/results/README.md has."""
    found = {}
    text = (ROOT / "benches/results/README.md").read_text()
    for folder, words in re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.M):
        dates = re.search(r"\d{4}-\d\d-\d\d((, \d\d)* (and|to) \d\d)?", words)
        for path in (ROOT / "benches/results" / folder).glob("*.json"):
            machines = re.findall(r'"machine": ?"([^"]*)"', path.read_text()) if dates else []
            found |= dict.fromkeys(machines, dates[0] if dates else "")
    return found


def pictures():
    """The text of each plot, by file name."""
    dates = ages()
    found = {f"{bench}.svg": plots.dots(bench, read(bench), dates) for bench in plots.LINES}
    for name, operation, heading in [
        ("all_reduce_ratio.svg", "all_reduce", "all-reduce of f32 against NCCL, called one by one"),
        ("all_reduce_graph_ratio.svg", "graph/all_reduce", "all-reduce of f32 against NCCL, in CUDA graphs"),
    ]:
        by_devices = {
            f"{machine} ({dates[machine]})": best_ratios(sizes)
            for (machine, of, dtype, devices), sizes in curves("collectives").items()
            if (of, dtype) == (operation, "f32") and machine.startswith(f"{devices} x")
        }
        found[name] = plots.curves(heading, dict(sorted(by_devices.items())), size_name)
    for (machine, of, dtype, devices), sizes in curves("collectives").items():
        if (of, dtype) == ("all_reduce", "f32") and machine.startswith(f"{devices} x") and devices < 8:
            times = {"gpu-pool": {size: here for size, (here, _) in sizes.items()}}
            for size, (_, peers) in sizes.items():
                for peer, time in peers.items():
                    times.setdefault(peer, {})[size] = time
            heading = f"all-reduce of f32 on {machine}, multicast off ({dates[machine]})"
            bandwidth = lambda size, micros, devices=devices: bus("all_reduce", devices, size, micros)
            found[f"all_reduce_f32_{devices}_gpus.svg"] = plots.sweep(heading, times, bandwidth, size_name)
    return found


def main():
    texts = {page: filled(page.read_text()) for page in PAGES}
    texts |= {PICTURES / name: text for name, text in pictures().items()}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            sys.exit(f"not what benches/results holds: {names}. Run benches/tables.py")
    else:
        for path in stale:
            path.write_text(texts[path])


if __name__ == "__main__":
    main()
