#!/usr/bin/env python3
"""PyTorch's side of what one kernel of ours does in `collectives`: a sum, a residual and a norm; a step of ZeRO-1.

    python3 benches/peers/fused.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `ORDER NUMBER` with the microseconds of one
operation of the slowest process. NUMBER is that of calls, or of launches of a graph with 20 operations. ORDER is

* `norm:TYPE:HIDDEN:ROWS:FORM`: `all_reduce`, the addition to a residual, `torch.nn.functional.rms_norm`. FORM is
  `calls` or `graph`, and `compiled` or `compiled_graph`: what follows the sum is compiled by torch
* `zero:PARAMETERS:CLIP:FORM`: gradients and parameters of bf16: `reduce_scatter_tensor` (mean), fused AdamW on the own
  part in f32, `all_gather_into_tensor`. CLIP is `clip` or `plain`. FORM is `calls` or `graph`
* `compiles`: answers 1 if torch can compile here, else 0
"""

import gc
import os

import ranks

IN_GRAPH = 20
# As in the NCCL processes of the bench. Variables that its threads need, and processes must not have, go.
os.environ["NCCL_NVLS_ENABLE"] = "0"
for name in ("NCCL_SINGLE_PROC_MEM_REG_ENABLE", "NCCL_GRAPH_REGISTER"):
    os.environ.pop(name, None)


def setup(torch, dist):
    rank, count = dist.get_rank(), dist.get_world_size()
    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    torch.set_grad_enabled(False)
    # The last operands, what they are for, and the graphs on them.
    held = {"for": None, "graphs": {}}

    def all_agree(mine):
        votes = torch.tensor([float(mine)], device="cuda")
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return votes.item() == 1.0

    def behind(x, residual, gamma):
        residual.add_(x)
        return torch.nn.functional.rms_norm(residual, gamma.shape, weight=gamma, eps=1e-5)

    def compiles():
        try:
            x = torch.ones(2, 64, device="cuda")
            torch.compile(behind)(x, x.clone(), x[0])
            works = True
        except Exception as error:  # Without Triton, or a compiler for it.
            print(f"torch compiles nothing here: {type(error).__name__}")
            works = False
        return float(all_agree(works))

    def norm(dtype, hidden, rows):
        """The operation, plain and compiled, and what prepares a turn."""
        shape = int(rows), int(hidden)
        # Survives many sums before it overflows.
        given = (torch.randn(shape, device="cuda") * 2.0**-104).to(types[dtype])
        x, residual = given.clone(), torch.zeros_like(given)
        gamma = torch.ones(shape[1], dtype=types[dtype], device="cuda")
        compiled = torch.compile(behind)

        def by(rest):
            def once():
                dist.all_reduce(x)
                rest(x, residual, gamma)

            return once

        return {"calls": by(behind), "compiled": by(compiled)}, lambda: x.copy_(given)

    def zero(params, clip):
        """A step, and what prepares a turn."""
        part = int(params) // count
        grads = torch.full((part * count,), 1e-3, dtype=torch.bfloat16, device="cuda")
        weights = torch.zeros_like(grads)
        own, mine = torch.empty_like(grads[:part]), weights[rank * part:(rank + 1) * part]
        master = torch.nn.Parameter(torch.zeros(part, device="cuda"))
        master.grad = torch.zeros_like(master)
        # The update of one tensor is one kernel.
        optimizer = torch.optim.AdamW([master], lr=1e-4, fused=True, capturable=True)

        def once():
            dist.reduce_scatter_tensor(own, grads, op=dist.ReduceOp.AVG)
            if clip == "clip":
                square = torch.linalg.vector_norm(own, dtype=torch.float32).square().reshape(1)
                dist.all_reduce(square)
                torch.mul(own, square.rsqrt().clamp(max=1.0), out=master.grad)
            else:
                master.grad.copy_(own)
            optimizer.step()
            mine.copy_(master)
            dist.all_gather_into_tensor(weights, mine)

        return {"calls": once}, lambda: None

    def captured(once):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                once()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The thread that watches NCCL asks for events of earlier calls meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(IN_GRAPH):
                once()
        return graph

    def measure(order, number, clock):
        what, *words = order.split(":")
        if what == "compiles":
            return compiles()
        *operands, form = words
        if held["for"] != (what, operands):
            # Frees memory and graphs first.
            held.clear()
            gc.collect()
            torch.cuda.empty_cache()
            # Sizes are constants to what is compiled.
            torch.compiler.reset()
            forms, prepare = {"norm": norm, "zero": zero}[what](*operands)
            held.update({"for": (what, operands), "forms": forms, "prepare": prepare, "graphs": {}})
        in_graph = form.endswith("graph")
        once = held["forms"]["compiled" if form.startswith("compiled") else "calls"]
        held["prepare"]()
        if in_graph:
            graphs = held["graphs"]
            if form not in graphs:
                graphs[form] = captured(once)
            once = graphs[form].replay
        once()
        held["prepare"]()

        def body():
            for _ in range(number):
                once()

        return clock(body) * 1e6 / (number * (IN_GRAPH if in_graph else 1))

    return measure


if __name__ == "__main__":
    ranks.run(__file__, setup)
