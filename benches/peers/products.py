#!/usr/bin/env python3
"""PyTorch's side of `parallel`'s part `products`: 50 products of 4000 x 4000 on each GPU, without TF32.

    python3 benches/peers/products.py DEVICES

answers each input line `WHAT:FORM TURNS` with milliseconds per turn. WHAT is `one` or `two` GPUs, with `copy_` before
it for copies of all results to page-locked memory. FORM says where the copies go: `torch` is the stream of the
products, as in "Dive into Deep Learning", 13.3, and `torch_second_stream` a stream beside it.
"""

import sys
import time

COUNT = 50
SIDE = 4000


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)
    devices = [torch.device("cuda", i) for i in range(int(sys.argv[1]))]
    factors = [torch.randn(SIDE, SIDE, device=device) for device in devices]
    streams = [torch.cuda.Stream(device=device) for device in devices]
    pinned = {}

    def products(i):
        return [factors[i].mm(factors[i]) for _ in range(COUNT)]

    def copies(i):
        """The book's: all results, then all copies."""
        return [to.copy_(y, non_blocking=True) for to, y in zip(pinned[i], products(i))]

    def copies_beside(i):
        """Each copy goes beside the next product."""
        own = torch.cuda.current_stream(devices[i])
        kept = []
        for to in pinned[i]:
            y = factors[i].mm(factors[i])
            kept.append(y)
            streams[i].wait_stream(own)
            with torch.cuda.stream(streams[i]):
                to.copy_(y, non_blocking=True)
        own.wait_stream(streams[i])
        return kept

    def turn(what, form):
        used = range(2 if what.endswith("two") else 1)
        body = products
        if what.startswith("copy"):
            body = copies_beside if form == "torch_second_stream" else copies
            for i in used:
                if i not in pinned:
                    pinned[i] = [torch.empty(SIDE, SIDE, pin_memory=True) for _ in range(COUNT)]
        for i in used:
            torch.cuda.synchronize(devices[i])
        start = time.perf_counter()
        kept = []
        for i in used:
            with torch.cuda.device(devices[i]):
                kept.append(body(i))
        for i in used:
            torch.cuda.synchronize(devices[i])
        return (time.perf_counter() - start) * 1e3

    for line in sys.stdin:
        order, turns = line.split()
        what, form = order.split(":")
        times = [turn(what, form) for _ in range(int(turns))]
        print(sum(times) / len(times), file=answers, flush=True)


if __name__ == "__main__":
    main()
