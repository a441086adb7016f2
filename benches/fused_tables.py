"""The table of what one kernel does here instead of several calls, of the bench `collectives`, for `tables.py`."""
import math
import re

CASE = re.compile(r"gpu/(graph/)?(all_reduce_norm|zero|zero_clip)/(f32|bf16)/(\d+)/(\d+)(/\d+)?")
# How the names of peers begin, and a word for each kind.
KINDS = {"gpu-pool": "our three calls", "NCCL": "NCCL's best, our kernels", "torch": "torch's best"}


def table(rows, number):
    """A line for each shape: the time here, and how many times as long the best of each kind of peers takes."""
    found = {}
    for row in rows:
        if CASE.fullmatch(row["case"]) and row.get("peer"):
            _, peers = found.setdefault((row["case"], row["machine"]), (row["value"], {}))
            kind = next(kind for kind in KINDS if row["peer"].startswith(kind))
            peers[kind] = min(row["peer_value"], peers.get(kind, math.inf))
    if not found:
        return "(not measured yet)\n"
    heads = [f"{words} / here" for words in KINDS.values()]
    out = [f"| case | machine | here | {' | '.join(heads)} |", "|---|---" + "|---:" * (1 + len(heads)) + "|"]
    for (case, machine), (here, peers) in found.items():
        ratios = [f"{peers[kind] / here:.2f}" if kind in peers else "" for kind in KINDS]
        out.append(f"| {case} | {machine} | {number(here)} us | {' | '.join(ratios)} |")
    return "\n".join(out) + "\n"
