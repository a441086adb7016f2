#!/usr/bin/env python3
"""PyTorch's side of what one kernel of ours does in `collectives`: a sum; a sum with a residual and a norm; a step of
ZeRO-1.

    python3 benches/peers/fused.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `ORDER NUMBER` with the microseconds of one
operation of the slowest process. NUMBER is that of calls, or of launches of a graph with 20 operations. ORDER is

* `sum:TYPE:BYTES:FORM`: a sum in symmetric memory by torch's own kernels. FORM is `one_shot` or `two_shot`, each also
  with `_graph` behind it
* `norm:TYPE:HIDDEN:ROWS:FORM`: `all_reduce`, the addition to a residual, `torch.nn.functional.rms_norm`. FORM is
  `calls` or `graph`, and `compiled` or `compiled_graph`: what follows the sum is compiled by torch. `symmetric` and
  `symmetric_graph`: compiled, behind a sum in one shot in symmetric memory
* `zero:PARAMETERS:CLIP:FORM`: gradients and parameters of bf16: `reduce_scatter_tensor` (mean), fused AdamW on the own
  part in f32, `all_gather_into_tensor`. CLIP is `clip` or `plain`. FORM is as above; compiled are the sum of squares,
  and all from the clipping to the parameters of bf16 (there AdamW is written out, since torch compiles no fused one)
* `compiles`, `symmetric`: answers 1 if torch can compile here, or has symmetric memory, else 0
"""

import gc
import os

import ranks

IN_GRAPH = 20
RATE = 1e-4
# No NVLS (multicast), as on our side: on a shared host it can put other users' GPUs out of service.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
# The bench's threads need these variables, and processes must not have them.
for name in ("NCCL_SINGLE_PROC_MEM_REG_ENABLE", "NCCL_GRAPH_REGISTER"):
    os.environ.pop(name, None)


def setup(torch, dist):
    rank, count = dist.get_rank(), dist.get_world_size()
    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    torch.set_grad_enabled(False)
    # The last operands, what they are for, and the graphs on them.
    held = {"for": None, "graphs": {}}

    def squares_of(own):
        return torch.linalg.vector_norm(own, dtype=torch.float32).square().reshape(1)

    def adamw(own, square, master, first, second, steps, mine):
        """A step of AdamW with torch.optim's defaults, clipped if there is a sum of squares."""
        grad = own.float()
        if square is not None:
            grad = grad * square.rsqrt().clamp(max=1.0)
        steps.add_(1)
        first.lerp_(grad, 0.1)
        second.lerp_(grad * grad, 0.001)
        root = (1 - 0.999**steps).sqrt()
        moved = master * (1 - RATE * 0.01) - RATE / (1 - 0.9**steps) * first / (second.sqrt() / root + 1e-8)
        master.copy_(moved)
        mine.copy_(moved)

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

    def symmetric_copy(x):
        """A tensor like `x` that all processes reach, and the name of their group."""
        import torch.distributed._symmetric_memory as memory

        y = memory.empty(x.shape, dtype=x.dtype, device="cuda")
        memory.rendezvous(y, dist.group.WORLD)
        y.copy_(x)
        return y, dist.group.WORLD.group_name

    def symmetric():
        try:
            x, group = symmetric_copy(torch.ones(1024, device="cuda"))
            works = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group).eq(count).all().item()
            torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group)
            works = works and x.eq(count).all().item()
        except Exception as error:  # Without access to peers, or in another version.
            print(f"torch has no symmetric memory here: {type(error).__name__}: {error}")
            works = False
        return float(all_agree(works))

    def sum_of(dtype, size):
        """The sums, and what prepares a turn."""
        # Survives as many sums in place as the bench asks for before it overflows.
        given = torch.randn(int(size) // (4 if dtype == "f32" else 2), device="cuda") * 2.0**-104
        x, group = symmetric_copy(given.to(types[dtype]))
        forms = {
            "one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group),
            "two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group),
        }
        return forms, lambda: x.copy_(given)

    def norm(dtype, hidden, rows):
        """The operation in its forms, and what prepares a turn."""
        shape = int(rows), int(hidden)
        # Survives as many sums as the bench asks for before it overflows.
        given = (torch.randn(shape, device="cuda") * 2.0**-104).to(types[dtype])
        x, residual = given.clone(), torch.zeros_like(given)
        gamma = torch.ones(shape[1], dtype=types[dtype], device="cuda")
        compiled = torch.compile(behind)

        def by(rest):
            def once():
                dist.all_reduce(x)
                rest(x, residual, gamma)

            return once

        def in_symmetric_memory():
            if "symmetric" not in own:
                own["symmetric"] = symmetric_copy(given)
            at, group = own["symmetric"]
            compiled(torch.ops.symm_mem.one_shot_all_reduce(at, "sum", group), residual, gamma)

        own = {}
        forms = {"calls": by(behind), "compiled": by(compiled), "symmetric": in_symmetric_memory}
        return forms, lambda: x.copy_(given)

    def zero(params, clip):
        """A step, and what prepares a turn."""
        part = int(params) // count

        def noise(seed, deviation):
            torch.manual_seed(seed)
            return (torch.randn(part * count, device="cuda") * deviation).bfloat16()

        # Equal parameters, different gradients.
        weights, grads = noise(1, 0.02), noise(2 + rank, 1e-3)
        own, mine = torch.empty_like(grads[:part]), weights[rank * part:(rank + 1) * part]
        master = torch.nn.Parameter(mine.float())
        master.grad = torch.zeros_like(master)
        # The update of one tensor is one kernel.
        optimizer = torch.optim.AdamW([master], lr=RATE, fused=True, capturable=True)
        moments = [torch.zeros_like(master) for _ in range(2)] + [torch.zeros(1, device="cuda")]

        def plain(square):
            if square is None:
                master.grad.copy_(own)
            else:
                torch.mul(own, square.rsqrt().clamp(max=1.0), out=master.grad)
            optimizer.step()
            mine.copy_(master)

        compiled = torch.compile(adamw)

        def by(squares, rest):
            def once():
                dist.reduce_scatter_tensor(own, grads, op=dist.ReduceOp.AVG)
                square = None
                if clip == "clip":
                    square = squares(own)
                    dist.all_reduce(square)
                rest(square)
                dist.all_gather_into_tensor(weights, mine)

            return once

        forms = {
            "calls": by(squares_of, plain),
            "compiled": by(torch.compile(squares_of), lambda square: compiled(own, square, master, *moments, mine)),
        }
        return forms, lambda: None

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
        if not words:
            return {"compiles": compiles, "symmetric": symmetric}[what]()
        *operands, form = words
        if held["for"] != (what, operands):
            # Frees memory and graphs first.
            held.clear()
            gc.collect()
            torch.cuda.empty_cache()
            # Sizes are constants to what is compiled.
            torch.compiler.reset()
            forms, prepare = {"sum": sum_of, "norm": norm, "zero": zero}[what](*operands)
            held.update({"for": (what, operands), "forms": forms, "prepare": prepare, "graphs": {}})
        in_graph = form.endswith("graph")
        once = held["forms"][form.removesuffix("graph").removesuffix("_") or "calls"]
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
