#!/usr/bin/env python3
"""PyTorch's side of `overlap`, and of `parallel`'s part `data_parallel`: training steps of a perceptron
784-2048-2048-10 under DistributedDataParallel.

    python3 benches/peers/ddp.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `BATCH:WHAT STEPS` with the microseconds of a
step of the slowest process. WHAT is `step`, or `alone`: without exchange (`no_sync`).

f32 without TF32, DDP's default buckets, gradients as views into them.
"""

import ranks


def setup(torch, dist):
    local = torch.cuda.current_device()
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [
        torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
        torch.nn.Linear(2048, 10),
    ]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers).cuda(), device_ids=[local], gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = torch.nn.CrossEntropyLoss()
    data = {}

    def step(x, labels):
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), labels).backward()
        optimizer.step()

    def measure(order, steps, clock):
        batch, kind = order.split(":")
        if batch not in data:
            data.clear()
            rows = len(range(rank, int(batch), count))
            data[batch] = torch.randn(rows, 784, device="cuda"), torch.randint(0, 10, (rows,), device="cuda")
        x, labels = data[batch]

        def body():
            for _ in range(steps):
                if kind == "step":
                    step(x, labels)
                else:
                    with model.no_sync():
                        step(x, labels)

        return clock(body) * 1e6 / steps

    return measure


if __name__ == "__main__":
    ranks.run(__file__, setup)
