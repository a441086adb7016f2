#!/usr/bin/env python3
"""Writes the README's measured tables from benches/results/<machine>/<bench>.json.

`benches/tables.py` rewrites README.md, `benches/tables.py --check` fails if it would change. What the README shows is
what the files say; nothing is typed by hand.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MARK = re.compile(r"(<!-- measured:(\w+) -->\n).*?(<!-- end -->)", re.S)


def number(value):
    """Three significant digits, without an exponent for everyday sizes."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(bench):
    rows = []
    for path in sorted(ROOT.glob(f"benches/results/*/{bench}.json")):
        for line in path.read_text().splitlines():
            if line.strip():
                rows.append(json.loads(line))
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
    new = MARK.sub(lambda m: m[1] + table(m[2]) + m[3], old)
    if "--check" in sys.argv[1:]:
        if new != old:
            sys.exit("README.md does not show what benches/results holds: run benches/tables.py")
    else:
        README.write_text(new)


if __name__ == "__main__":
    main()
