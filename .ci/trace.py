#!/usr/bin/env python3
"""Checks a trace of a pool: `trace.py FILE`. By itself, and by Perfetto's trace processor if that can be had (it is
loaded from the network when it is first used)."""

import collections
import json
import sys

events = json.load(open(sys.argv[1]))
assert events[0]["name"] == "gpu_pool_trace" and events[0]["args"]["version"] == 1, events[0]
slices = [event for event in events if event["ph"] == "X"]
kinds = collections.Counter(event["cat"] for event in slices)
print("slices:", dict(kinds))
for kind in ("scope", "closure", "op", "collective", "kernel", "copy", "wait"):
    assert kinds[kind] > 0, f"no {kind}"

rows = collections.defaultdict(list)
for event in slices:
    start = round(1000 * event["ts"])
    rows[event["pid"], event["tid"]].append((start, start + round(1000 * event["dur"]), event["name"]))
for row, spans in rows.items():
    ends = []
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or end <= ends[-1], f"{row}: {name} at {start} ns leaves the slice around it"
        ends.append(end)

named = sum("cause" in event["args"] for event in slices if event["cat"] == "wait")
arrows = collections.Counter(event["ph"] for event in events if event["ph"] in "sf")
assert arrows["s"] == arrows["f"] > 0, arrows
assert any(event["ph"] == "C" and event["args"]["used"] > 0 for event in events if event["name"] == "GPU 0 memory")
print(f"waits with a cause: {named} of {kinds['wait']}, arrows: {arrows['s']}")

try:
    from perfetto.trace_processor import TraceProcessor

    processor = TraceProcessor(trace=sys.argv[1])
except Exception as error:
    print(f"skipped: Perfetto's trace processor cannot be had: {str(error)[:100]}")
    sys.exit()


def ask(query):
    return list(processor.query(query))


found = {row.category: row.n for row in ask("select category, count(*) as n from slice group by category")}
assert found == dict(kinds), (found, kinds)
bad = ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
assert not bad, [(row.name, row.value) for row in bad]
flows = ask("select count(*) as n from flow")[0].n
assert flows == arrows["s"], (flows, arrows)
deepest = ask("select max(depth) as n from slice")[0].n
inner = ask(
    "select count(*) as n from slice s join slice p on s.parent_id = p.id where s.category in ('op', 'collective') "
    "and p.category = 'closure'"
)[0].n
assert deepest >= 2 and inner > 0, (deepest, inner)
print(f"Perfetto agrees: {sum(found.values())} slices, {flows} flows, depth {deepest}")
