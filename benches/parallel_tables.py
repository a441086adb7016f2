"""Tables of the bench `parallel`, for `tables.py`: the operations, and all other cases."""
import re

KERNEL = re.compile(r"gpu/ops/(\w+)/(f32|bf16)/(\d+)")
# Every case that is no operation: by part, the pattern of its cases.
PARTS = {
    "pipeline": r"(gpu|software)/(pipeline|hop)/.*",
    "data_parallel": r"gpu/(data_parallel|step_sharded|step_sharded_graph|step_captured)/.*",
    "tensor": r"gpu/tensor/.*",
    "tasks": r"(gpu|software)/task/.*|gpu/products/.*",
}

TARGETS = [
    ("operations: torch's time / here, worst", ">= 0.87", r"gpu/ops/.*", "torch"),
    ("host cost of a hop", "<= 10 us", r"software/hop/.*", None),
    ("host cost of a task, 10,000 empty ones", "<= 2 us", r"software/task/.*", None),
    ("1F1B, 4 layers of 2048, 4096 rows: best time / here", ">= 0.97", r"gpu/pipeline/1f1b/4x2048x4096", "best"),
    ("the same with 512 rows", ">= 0.96", r"gpu/pipeline/1f1b/4x2048x512", "best"),
    ("the same: times as fast as torch", ">= 1", r"gpu/pipeline/1f1b/4x2048x\d+", "torch"),
    ("1F1B, small stages: times as fast as torch", ">= 4", r"gpu/pipeline/1f1b/(1x256x16|2x1024x64)", "torch"),
    ("pipelines of 10 ms kernels on software GPUs: simulated time / here, worst", ">= 0.91",
     r"software/pipeline/sleep/.*", "simulate"),
    ("pipelines in virtual time: simulated time / here, worst", ">= 0.99", r"software/pipeline/virtual/.*", "simulate"),
    ("`DataParallel`, step of 8192: DDP's / here", ">= 1", r"gpu/data_parallel/.*/8192", "DDP"),
    ("the same, sharded AdamW, bf16: DDP's with fused AdamW / here", ">= 1.05",
     r"gpu/step_sharded/bf16/([2-9]|\d\d)/8192", "DDP, fused AdamW"),
    ("the same, sharded AdamW, bf16: DDP's in a CUDA graph / here", ">= 1.05",
     r"gpu/step_sharded/bf16/([2-9]|\d\d)/8192", "DDP in a graph"),
    ("the same as a graph with `ShardedOptimizer`: DDP's in a CUDA graph / here", ">= 1.1",
     r"gpu/step_sharded_graph/bf16/([2-9]|\d\d)/8192", "DDP in a graph"),
    ("the same by `DataParallel::launch_steps`: DDP's in a CUDA graph / here", ">= 1.1",
     r"gpu/step_captured/bf16/([2-9]|\d\d)/8192", "DDP in a graph"),
    ("the same, sharded AdamW, bf16: ZeroRedundancyOptimizer's / here", ">= 1.2",
     r"gpu/step_sharded/bf16/([2-9]|\d\d)/8192", "ZeroRedundancyOptimizer"),
    ("`RowLinear`, 8192 rows, 4096 columns of each GPU: torch's with NCCL / here", ">= 1.25",
     r"gpu/tensor/row_forward/8192x8192x4096", "torch, NCCL"),
    ("tensor parallel, all calls and sizes: the best of torch / here, worst", ">= 1", r"gpu/tensor/.*", "torch"),
    ("50 products on each of two GPUs", "<= 135 ms", r"gpu/products/\w+/two", None),
    ("50 products on one GPU, results to page-locked memory", "<= 140 ms", r"gpu/products/\w+/copy_one", None),
]


def kernels(rows, number):
    """A line for each operation: times, and how many times as long the best form of torch takes."""
    found = {}
    for row in rows:
        case = KERNEL.fullmatch(row["case"])
        if case:
            name, dtype, cols = case.groups()
            found.setdefault(row["machine"], {}).setdefault(name, {}).setdefault((dtype, int(cols)), []).append(row)
    out = []
    for machine, by_name in found.items():
        columns = sorted({at for cases in by_name.values() for at in cases}, key=lambda at: (at[0] != "f32", at[1]))
        head = [machine, *(f"{dtype}, {cols}" for dtype, cols in columns)]
        blank = out[-1:] and [""]
        out += [*blank, f"| {' | '.join(head)} |", "|---" + "|---:" * len(columns) + "|"]
        for name, cases in by_name.items():
            cells = [cell(cases.get(at, []), number) for at in columns]
            out.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(out or ["(not measured yet)"]) + "\n"


def cell(rows, number):
    """`12.3 us (1.05)`"""
    if not rows:
        return ""
    ratios = [row["ratio"] for row in rows if row.get("ratio") is not None]
    return f"{number(rows[0]['value'])} us" + (f" ({min(ratios):.2f})" if ratios else "")


def part(rows, name):
    """The rows of a part."""
    return [row for row in rows if re.fullmatch(PARTS[name], row["case"])]
