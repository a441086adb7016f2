#!/usr/bin/env python3
"""Writes the README's measured tables from benches/results/<machine>/<bench>.json.

`benches/tables.py` rewrites README.md, `benches/tables.py --check` fails if it would change. What the README shows is
what the files say; nothing is typed by hand but what was aimed at.

`measured:<bench>` is a table of everything in the files, `targets:<bench>` one of what was aimed at and what came of it.
"""
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MARK = re.compile(r"(<!-- (measured|targets):(\w+) -->\n).*?(<!-- end -->)", re.S)

# What was aimed at: words, the target, the cases (all that match, in their order in the file), and of each the value or, against
# a peer whose name begins so, the ratio. Where there are many cases, only the worst is shown.
TARGETS = {
    "memory": [
        ("4 KiB from the pool and back, one device thread", "<= 30 ns", r"gpu/small/pair_4K/one", None),
        ("the same on all device threads at once: rate of each, for that of one alone", ">= 0.95", r"gpu/small/pair_4K/all", "one thread"),
        ("the same: times as fast as `cuMemAllocAsync` + `cuMemFreeAsync`", ">= 200", r"gpu/small/pair_4K/all", "cuMemAllocAsync"),
        ("the same: times as fast as PyTorch's allocator", ">= 5", r"gpu/small/pair_4K/all", "PyTorch"),
        ("large blocks, split and joined, with 10, 100, 1000 and 10,000 live", "<= 100 ns", r"gpu/large/\d+", None),
        ("drop on a plain thread; with three of them", "<= 50 ns", r"gpu/remote/thread/\d", None),
        ("drop on another device's thread; on three", "<= 10 ns", r"gpu/remote/device/\d", None),
        ("another stream's memory, in use: waits put into the stream, for each block", "<= 1", r"gpu/steal/in_flight/waits", None),
        ("the same, ordered already or over", "0", r"gpu/steal/(ordered|over)/waits", None),
        ("`random_allocations`: driver calls of the second replay, most of 12", "0", r"gpu/rmm_random/\d+/\d+/driver_calls", None),
        ("`random_allocations`: bytes held for bytes needed, worst of 12", "<= 1.10", r"gpu/rmm_random/\d+/\d+/reserved", None),
        ("the same with `memory_slack(1.1)`, which moves memory: from 256 MiB requests on, worst of 6", "<= 1.10", r"gpu/rmm_random/.*/slack/reserved", None),
        ("`random_allocations`: times as fast as the driver's pool, worst of 12", "> 1", r"gpu/rmm_random/\d+/\d+", "cuMemAllocAsync"),
        ("the same with `memory_slack(1.1)`, worst of 6", "> 1", r"gpu/rmm_random/.*/slack", "cuMemAllocAsync"),
        ("`multi_stream_allocations`, fresh against prewarmed, 1, 2 and 4 streams", "1", r"gpu/rmm_streams/\d", "prewarmed"),
        ("the loops of pytorch#193400 and #35901 under a limit: requests refused, most of 3", "0", r"gpu/fragmentation/.*/refused", None),
        ("asking whether work is over", "<= 5 ns", r"gpu/words/is_complete", None),
    ],
}


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
    machines = list(dict.fromkeys(row["machine"] for row in rows if row["case"].startswith("gpu/")))
    if not machines:
        return "(not measured yet)\n"
    out = ["| | target | " + " | ".join(machines) + " |", "|---|---|" + "---:|" * len(machines)]
    for words, target, cases, peer in TARGETS[bench]:
        cells = [met([row for row in rows if row["machine"] == machine], target, cases, peer) for machine in machines]
        out.append(f"| {words} | {target} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def met(rows, target, cases, peer):
    """What these rows say of a target."""
    rows = [row for row in rows if re.fullmatch(cases, row["case"])]
    if peer is None:
        # A case has a row for each peer, with the same value of ours.
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


def table(bench):
    rows = read(bench)
    if not rows:
        return "(not measured yet)\n"
    out = ["| case | machine | here | peer | | ratio |", "|---|---|---:|---|---:|---:|"]
    for row in rows:
        peer, unit = row.get("peer") or "", row["unit"]
        theirs = f"{number(row.get('peer_value'))} {unit}" if row.get("peer_value") is not None else ""
        ratio = f"{row['ratio']:.2f}" if row.get("ratio") is not None else ""
        out.append(f"| {row['case']} | {row['machine']} | {number(row['value'])} {unit} | {peer} | {theirs} | {ratio} |")
    return "\n".join(out) + "\n"


def main():
    old = README.read_text()
    write = {"measured": table, "targets": targets}
    new = MARK.sub(lambda m: m[1] + write[m[2]](m[3]) + m[4], old)
    if "--check" in sys.argv[1:]:
        if new != old:
            sys.exit("README.md does not show what benches/results holds: run benches/tables.py")
    else:
        README.write_text(new)


if __name__ == "__main__":
    main()
