"""A peer with one process per GPU, started by torchrun.

The parent passes orders from its standard input to the first process through a pipe in a folder of its own, and answers
back. Orders go on to the other processes through a gloo group: a process that waits for an order does not use its GPU.
"""

import gc
import os
import select
import subprocess
import sys
import tempfile
import time

FOLDER = "GPU_POOL_DDP"


def run(script, setup):
    """Runs `script` on as many GPUs as its argument says.

    `setup(torch, dist)` returns a function from an order, its number and a clock to the answer. `clock(body)` gives the
    seconds of the slowest process. All processes run the same.
    """
    if FOLDER in os.environ:
        work(os.environ[FOLDER], setup)
    else:
        launch(script, int(sys.argv[1]))


def launch(script, devices):
    """Starts torchrun; passes orders to its first process, and answers back."""
    folder = tempfile.mkdtemp()
    orders, answers = os.path.join(folder, "orders"), os.path.join(folder, "answers")
    os.mkfifo(orders)
    os.mkfifo(answers)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    env = {**os.environ, FOLDER: folder}
    env.setdefault("OMP_NUM_THREADS", "4")
    child = subprocess.Popen(
        command + [os.path.abspath(script)], env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr
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


def work(folder, setup):
    """One of torchrun's processes."""
    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    # As many hosts as processes, for the parent that has named them.
    if "NCCL_HOSTID" in os.environ:
        os.environ["NCCL_HOSTID"] += f"-{local}"
    torch.cuda.set_device(local)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl")
    control = dist.new_group(backend="gloo")
    # The first operation of the group connects all processes.
    dist.all_reduce(torch.zeros(1, device="cuda"))
    measure = setup(torch, dist)

    def clock(body):
        """Seconds of the slowest process, from idle GPUs to idle GPUs."""
        torch.cuda.synchronize()
        dist.barrier(group=control)
        start = time.perf_counter()
        body()
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=control)
        return took.item()

    first = dist.get_rank() == 0
    orders = open(os.path.join(folder, "orders")) if first else None
    answers = open(os.path.join(folder, "answers"), "w") if first else None
    while True:
        order = [orders.readline().strip() if first else None]
        dist.broadcast_object_list(order, src=0, group=control)
        if order[0] in ("", "quit"):
            break
        what, number = order[0].split()
        answer = measure(what, int(number), clock)
        if first:
            answers.write(f"{answer}\n")
            answers.flush()
    # NCCL's end waits for graphs with its calls: https://github.com/pytorch/pytorch/issues/115388
    del measure
    gc.collect()
    dist.destroy_process_group()
