#!/usr/bin/env python3
"""PyTorch's side of `parallel`'s part `tensor`: a product and its exchange, in bf16.

    python3 benches/peers/tensor.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `WHAT:FORM:ROWS:WIDTH:OWN CALLS` with the
microseconds of a call of the slowest process. With 0 calls it makes the memory, and compares FORM with `nccl`. What
PyTorch cannot do is answered by `nan`, and the reason goes to the standard error.

WHAT, of rows of WIDTH columns on all processes and OWN columns on each, with a bias:

    row_forward           x w, and the sum over the processes (all_reduce)
    row_forward_to_rows   the same, of which each process gets its rows (reduce_scatter)
    gather_product        all rows of x (all_gather), and x w
    column_backward       dy w^T and its sum over the processes (all_reduce); x^T dy; the sum of the rows of dy

FORM:

    nccl        the product by cuBLAS, NCCL's call after it
    async       column_backward: NCCL's call beside the product of x^T dy, as Megatron-LM has it
    fused       `symm_mem.fused_matmul_reduce_scatter` or `fused_all_gather_matmul`; row_forward: an all_gather by
                NCCL behind it

Weights lie as torch.nn.Linear has them. Each call needs a number of the last one's result.
"""

import sys
import traceback
import warnings

import ranks


def setup(torch, dist):
    count, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD.group_name
    linear = torch.nn.functional.linear
    torch.set_grad_enabled(False)
    made = {}

    def noise(*shape, scale=1.0):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    class Data:
        """The memory of a shape."""

        def __init__(self, rows, width, own):
            torch.manual_seed(rank)
            self.h, self.x = noise(rows, own), noise(rows, width)
            self.part = noise(rows // count, width)
            # outputs x inputs, as of torch.nn.Linear
            self.down = noise(width, own, scale=(count * own) ** -0.5)
            self.up = noise(own, width, scale=width**-0.5)
            torch.manual_seed(99)
            self.down_bias, self.up_bias = noise(width), noise(own)

    def after(result, input):
        """The next call needs this result."""
        input.view(-1)[:1].copy_(result.reshape(-1)[-1:])

    def row_forward(d, form):
        if form == "fused":
            part = torch.ops.symm_mem.fused_matmul_reduce_scatter(d.h, d.down.t(), "sum", 0, group)
            part.add_(d.down_bias)
            y = torch.empty(d.h.shape[0], part.shape[1], device="cuda", dtype=part.dtype)
            dist.all_gather_into_tensor(y, part)
        else:
            y = linear(d.h, d.down)
            dist.all_reduce(y)
            y.add_(d.down_bias)
        return y, d.h

    def row_forward_to_rows(d, form):
        if form == "fused":
            part = torch.ops.symm_mem.fused_matmul_reduce_scatter(d.h, d.down.t(), "sum", 0, group)
        else:
            y = linear(d.h, d.down)
            part = torch.empty_like(d.part)
            dist.reduce_scatter_tensor(part, y)
        return part.add_(d.down_bias), d.h

    def gather_product(d, form):
        if form == "fused":
            _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(d.part, [d.up.t()], 0, group)
            y.add_(d.up_bias)
        else:
            x = torch.empty_like(d.x)
            dist.all_gather_into_tensor(x, d.part)
            y = linear(x, d.up, d.up_bias)
        return y, d.part

    def column_backward(d, form):
        dx = torch.mm(d.h, d.up)
        work = dist.all_reduce(dx, async_op=form == "async")
        torch.mm(d.h.t(), d.x)
        d.h.sum(0)
        if work is not None:
            work.wait()
        return dx, d.h

    calls = {f.__name__: f for f in (row_forward, row_forward_to_rows, gather_product, column_backward)}

    def enable():
        from torch.distributed import _symmetric_memory

        # Needed by older versions, deprecated in newer ones.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if hasattr(_symmetric_memory, "enable_symm_mem_for_group"):
                _symmetric_memory.enable_symm_mem_for_group(group)

    def try_it(call, data, form):
        """Whether the form works here and gives the result of `nccl`."""
        try:
            if form == "fused":
                enable()
            found, _ = call(data, form)
            wanted, _ = call(data, "nccl")
            near = torch.allclose(found.float(), wanted.float(), atol=0.1, rtol=0.05)
            torch.cuda.synchronize()
            if not near:
                print(f"{call.__name__}: {form} has other results", file=sys.stderr)
            return near
        except Exception:
            traceback.print_exc()
            return False

    def measure(order, number, clock):
        what, form, *shape = order.split(":")
        shape = tuple(int(size) for size in shape)
        if shape not in made:
            # The old memory must be free before there is new memory.
            made.clear()
            torch.cuda.empty_cache()
            made[shape] = Data(*shape)
        data, call = made[shape], calls[what]
        if number == 0:
            works = torch.tensor([float(try_it(call, data, form))], device="cuda")
            dist.all_reduce(works, op=dist.ReduceOp.MIN)
            return 0.0 if works.item() == 1.0 else float("nan")

        def body():
            for _ in range(number):
                after(*call(data, form))

        return clock(body) * 1e6 / number

    return measure


if __name__ == "__main__":
    ranks.run(__file__, setup)
