#!/usr/bin/env python3
"""PyTorch's side of `overlap`: training steps of a perceptron 784-2048-2048-10 under DistributedDataParallel.

    python3 benches/peers/ddp.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `BATCH:WHAT STEPS` with the microseconds of a
step of the slowest process. WHAT is `step`, or `alone`: without exchange (`no_sync`).

f32 without TF32, DDP's default buckets, gradients as views into them. Orders go through a gloo group: a process that
waits for an order does not use its GPU.
"""

import os
import select
import subprocess
import sys
import tempfile
import time


def launch(devices):
    """Passes orders to the first process of torchrun, and its answers back."""
    folder = tempfile.mkdtemp()
    orders, answers = os.path.join(folder, "orders"), os.path.join(folder, "answers")
    os.mkfifo(orders)
    os.mkfifo(answers)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    env = dict(os.environ, GPU_POOL_DDP=folder)
    env.setdefault("OMP_NUM_THREADS", "4")
    child = subprocess.Popen(
        command + [os.path.abspath(__file__)], env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr
    )
    # Opened for both directions, so that neither side waits for the other to open. If a worker never starts, torchrun
    # reports it.
    to, back = os.fdopen(os.open(orders, os.O_RDWR), "w"), os.fdopen(os.open(answers, os.O_RDWR), "r")
    for line in sys.stdin:
        to.write(line)
        to.flush()
        while not select.select([back], [], [], 1.0)[0]:
            if child.poll() is not None:
                sys.exit(f"torchrun has ended with {child.returncode}")
        sys.stdout.write(back.readline())
        sys.stdout.flush()
    to.write("quit\n")
    to.flush()
    child.wait(timeout=30)


def work(folder):
    """One of torchrun's processes."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl")
    control = dist.new_group(backend="gloo")
    rank, count = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    layers = [
        torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
        torch.nn.Linear(2048, 10),
    ]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers).cuda(), device_ids=[local], gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = torch.nn.CrossEntropyLoss()
    data = {}

    def step(x, labels):
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), labels).backward()
        optimizer.step()

    def measure(batch, exchanges, steps):
        if batch not in data:
            data.clear()
            rows = len(range(rank, batch, count))
            data[batch] = torch.randn(rows, 784, device="cuda"), torch.randint(0, 10, (rows,), device="cuda")
        x, labels = data[batch]
        torch.cuda.synchronize()
        dist.barrier(group=control)
        start = time.perf_counter()
        for _ in range(steps):
            if exchanges:
                step(x, labels)
            else:
                with model.no_sync():
                    step(x, labels)
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=control)
        return took.item() * 1e6 / steps

    orders = open(os.path.join(folder, "orders")) if rank == 0 else None
    answers = open(os.path.join(folder, "answers"), "w") if rank == 0 else None
    while True:
        order = [orders.readline().strip() if rank == 0 else None]
        dist.broadcast_object_list(order, src=0, group=control)
        if order[0] in ("", "quit"):
            break
        what, steps = order[0].split()
        batch, kind = what.split(":")
        took = measure(int(batch), kind == "step", int(steps))
        if rank == 0:
            answers.write(f"{took}\n")
            answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "GPU_POOL_DDP" in os.environ:
        work(os.environ["GPU_POOL_DDP"])
    else:
        launch(int(sys.argv[1]))
