#!/usr/bin/env python3
"""Draws a part of a trace as a picture: `timeline.py TRACE PICTURE.svg [--from MS] [--ms MS] [--rows REGEX]`.

The time counts from the first closure. Rows are those of the trace, slices in slices stand below each other, arrows
lead from the cause of a wait to the wait."""

import argparse
import collections
import html
import json
import re

COLOURS = {
    "scope": "#b0bec5", "closure": "#cfd8dc", "job": "#cfd8dc", "task": "#d7ccc8", "op": "#90caf9",
    "collective": "#ce93d8", "kernel": "#81c784", "copy": "#ffcc80", "wait": "#ef9a9a",
}
WIDTH, LEFT, HIGH, GAP = 1000, 128, 17, 7


def depths(slices):
    """Each slice with the number of slices around it."""
    ends = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"] + 1e-4:
            ends.pop()
        yield event, len(ends)
        ends.append(event["ts"] + event["dur"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("picture")
    parser.add_argument("--from", dest="begin", type=float, default=0, help="milliseconds")
    parser.add_argument("--ms", type=float, default=5)
    parser.add_argument("--rows", default="")
    options = parser.parse_args()

    events = json.load(open(options.trace))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    zero = min(e["ts"] for e in slices if e["cat"] == "closure") + 1000 * options.begin
    length = 1000 * options.ms
    x = lambda time: LEFT + (WIDTH - LEFT - 8) * (time - zero) / length
    rows = collections.defaultdict(list)
    for event in slices:
        key = (event["pid"], event["tid"])
        if event["ts"] < zero + length and event["ts"] + event["dur"] > zero and re.search(options.rows, names[key]):
            rows[key].append(event)

    out, y, places = [], 8, {}
    for key in sorted(rows):
        drawn = list(depths(rows[key]))
        out.append(f'<text x="6" y="{y + 12}" class="row">{html.escape(names[key])}</text>')
        for event, depth in drawn:
            left = max(x(event["ts"]), LEFT)
            wide = max(min(x(event["ts"] + event["dur"]), WIDTH - 8) - left, 0.6)
            top = y + HIGH * depth
            tip = html.escape(f'{event["name"]}: {event["dur"]:.1f} us {json.dumps(event["args"])}')
            out.append(f'<g><title>{tip}</title><rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{HIGH - 2}" '
                       f'fill="{COLOURS[event["cat"]]}"/>')
            text = event["args"].get("op", event["name"]) if event["cat"] in ("wait", "collective") else event["name"]
            text = f"wait: {text}" if event["cat"] == "wait" and event["name"] != "wait" else text
            text = text if len(text) * 5.6 < wide else text[: int(wide / 5.6) - 1] + "…" if wide > 22 else ""
            out.append((f'<text x="{left + 2:.1f}" y="{top + 11}">{html.escape(text)}</text>' if text else "") + "</g>")
        deepest = max(depth for _, depth in drawn)
        places[key] = [(event["ts"], event["ts"] + event["dur"], y + HIGH * depth) for event, depth in drawn]
        y += HIGH * (deepest + 1) + GAP
        out.append(f'<line x1="0" x2="{WIDTH}" y1="{y - 4}" y2="{y - 4}" class="rule"/>')

    def place(end):
        at = [top for start, stop, top in places.get((end["pid"], end["tid"]), []) if start <= end["ts"] <= stop + 1e-3]
        return (x(end["ts"]), max(at) + HIGH / 2) if at and zero <= end["ts"] <= zero + length else None

    ends = collections.defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    for pair in ends.values():
        a, b = place(pair["s"]), place(pair["f"])
        if a and b and abs(a[1] - b[1]) > HIGH:
            out.append(f'<path d="M{a[0]:.1f},{a[1]:.1f} L{b[0]:.1f},{b[1]:.1f}" class="flow" '
                       'marker-end="url(#tip)"/>')

    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if options.ms / step <= 10)
    ticks = [i * step for i in range(int(options.ms / step) + 1)]
    for tick in ticks:
        at = x(zero + 1000 * tick)
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{y}" class="rule"/>'
                   f'<text x="{at + 2:.1f}" y="{y + 10}">{tick:g} ms</text>')
    y += 16
    kinds = [kind for kind in COLOURS if any(event["cat"] == kind for row in rows.values() for event in row)]
    for i, kind in enumerate(kinds):
        out.append(f'<rect x="{LEFT + 90 * i}" y="{y + 2}" width="12" height="12" fill="{COLOURS[kind]}"/>'
                   f'<text x="{LEFT + 90 * i + 16}" y="{y + 12}">{kind}</text>')
    size = f'{WIDTH} {y + 20}'
    style = ("text{font:10px sans-serif;fill:#111}.row{font-weight:bold;font-size:11px}"
             ".rule{stroke:#ccc;stroke-width:.5}.flow{fill:none;stroke:#c62828;stroke-width:1}")
    marker = ('<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" '
              'orient="auto"><path d="M0,0 L6,3 L0,6 z" fill="#c62828"/></marker></defs>')
    with open(options.picture, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><style>{style}</style>{marker}'
                   f'<rect width="{WIDTH}" height="{y + 20}" fill="white"/>' + "\n".join(out) + "</svg>\n")


main()
