"""Tables of the bench `cluster`, for `tables.py`: all-reduces of two processes with a GPU each, and targets."""
import re

SUM = re.compile(r"gpu/(as_is|forced|sockets)/all_reduce/f32/(\d+)")
WAYS = {"as_is": "as it is", "forced": "over NCCL alone", "sockets": "over sockets"}

TARGETS = [
    ("`barrier` of two processes", "<= 15 us", r"(software|gpu)/meeting", None),
    *(
        (f"`all_reduce` of 16 MiB, 2 x 2 software GPUs, {words}: time of `MPI_Allreduce` / here", ">= 1",
         rf"software/{way}/all_reduce/f32/{16 << 20}", "MPI")
        for way, words in [("shm", "shared memory"), ("mpi", "MPI")]
    ),
    ("a process is killed: the other one knows", "<= 1,000 ms", r"software/killed/known", None),
    ("the same: the other one has ended", "<= 5,000 ms", r"software/killed/ended", None),
    *(
        (f"training step of {batch} rows, {words}: DDP's / here", ">= 1.05", rf"gpu/{way}/step/{batch}", "DDP")
        for way, words in WAYS.items() if way != "forced" for batch in (8192, 65536)
    ),
]


def allowed(way, size, nccl):
    """Microseconds that a sum may take where NCCL alone takes so many."""
    if size > 64 << 10:
        return nccl / 0.98 if way == "sockets" else nccl
    return nccl + {"as_is": 0, "forced": 5, "sockets": 15}[way]


def sums(rows, number, size_name):
    """By machine and way a table: every size with NCCL's times and what is allowed."""
    found = {}
    for row in rows:
        if case := SUM.fullmatch(row["case"]):
            sizes = found.setdefault((row["machine"], case[1]), {})
            sizes.setdefault(int(case[2]), (row["value"], {}))[1][row["peer"]] = row["peer_value"]
    out = []
    for (machine, way), sizes in found.items():
        out += [*(out[-1:] and [""]), f"| {machine}, {WAYS[way]} | here | NCCL | allowed | polled NCCL |"]
        out.append("|---" + "|---:" * 4 + "|")
        for size, (here, peers) in sorted(sizes.items()):
            nccl = peers["NCCL"]
            cells = [here, nccl, allowed(way, size, nccl), peers["polled NCCL"]]
            out.append(f"| {size_name(size)} | " + " | ".join(f"{number(cell)} us" for cell in cells) + " |")
    return "\n".join(out or ["(not measured yet)"]) + "\n"
