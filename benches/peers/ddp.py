#!/usr/bin/env python3
"""PyTorch's side of `overlap`, and of `parallel`'s part `data_parallel`: training steps of a perceptron
784-2048-2048-10 under DistributedDataParallel.

    python3 benches/peers/ddp.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `BATCH:WHAT STEPS` with the microseconds of a
step of the slowest process. WHAT is

    step          SGD, f32 without TF32
    alone         the same without exchange (`no_sync`)
    adamw         fused AdamW; parameters, gradients and moments are bf16
    adamw_graph   the same: the whole step is a CUDA graph
    zero          the same in a ZeroRedundancyOptimizer: each process updates some of the parameters, and broadcasts
                  them. Called, not in a graph. Without `overlap_with_ddp`: that takes torch's functional optimizers
                  instead of `torch.optim`'s, and torch calls them deprecated.

DDP's default buckets, gradients as views into them.
"""

import os

import ranks

# What DDP in a graph asks for: https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
WARM_UP = 11


def setup(torch, dist):
    local = torch.cuda.current_device()
    rank, count = dist.get_rank(), dist.get_world_size()
    criterion = torch.nn.CrossEntropyLoss()
    models, data, graphs = {}, {}, {}

    def make(kind):
        """A model and its optimizer."""
        torch.manual_seed(1)
        layers = [
            torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
            torch.nn.Linear(2048, 10),
        ]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers).cuda().to(dtype_of(kind)), device_ids=[local], gradient_as_bucket_view=True
        )
        if kind == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.01)
        if kind in ("adamw", "adamw_graph"):
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=kind == "adamw_graph")
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return model, ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3,
                fused=True,
            )
        raise ValueError(f"an order for {kind}")

    def dtype_of(kind):
        return torch.float32 if kind == "sgd" else torch.bfloat16

    def step(model, optimizer, x, labels):
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), labels).backward()
        optimizer.step()

    def captured(kind, x, labels):
        """A graph of a step, and what it uses."""
        # DDP is made, warmed up and captured on one stream, which is not the default one.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model, optimizer = make(kind)
            for _ in range(WARM_UP):
                step(model, optimizer, x, labels)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The thread that watches NCCL asks for events of earlier calls meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step(model, optimizer, x, labels)
        return graph, (model, optimizer, x, labels)

    def measure(order, steps, clock):
        batch, what = order.split(":")
        kind = "sgd" if what in ("step", "alone") else what
        if (batch, dtype_of(kind)) not in data:
            data.clear()
            rows = len(range(rank, int(batch), count))
            x = torch.randn(rows, 784, device="cuda").to(dtype_of(kind))
            data[batch, dtype_of(kind)] = x, torch.randint(0, 10, (rows,), device="cuda")
        x, labels = data[batch, dtype_of(kind)]
        if kind == "adamw_graph":
            if batch not in graphs:
                graphs[batch] = captured(kind, x, labels)
            graph, _ = graphs[batch]
        else:
            if kind not in models:
                models[kind] = make(kind)
            model, optimizer = models[kind]

        def body():
            for _ in range(steps):
                if kind == "adamw_graph":
                    graph.replay()
                elif what == "alone":
                    with model.no_sync():
                        step(model, optimizer, x, labels)
                else:
                    step(model, optimizer, x, labels)

        return clock(body) * 1e6 / steps

    return measure


if __name__ == "__main__":
    ranks.run(__file__, setup)
