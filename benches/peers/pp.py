#!/usr/bin/env python3
"""PyTorch's side of `parallel`'s part `pipeline`: steps of torch.distributed.pipelining, forward and backward.

    python3 benches/peers/pp.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `SCHEDULE:LAYERS:WIDTH:ROWS:MICROS STEPS` with
the milliseconds of a step: the median of so many, each from idle GPUs to idle GPUs. SCHEDULE is `gpipe`, `1f1b`, or
`alone`: the forward and backward pass of one micro-batch in one stage, without a pipeline.

A stage is LAYERS times a linear layer and ReLU, in f32 without TF32; the loss is the mean squared error. Gradients add
up from step to step, so there is no time for zeros.
"""

import statistics

import ranks


def setup(torch, dist):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, count = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    classes = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    known = {}

    def loss(y, target):
        return ((y - target) ** 2).mean()

    def layers(number, width):
        modules = [module for _ in range(number) for module in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return torch.nn.Sequential(*modules).to(device)

    def make(order):
        """A function that does one step."""
        name, *numbers = order.split(":")
        number, width, rows, micros = map(int, numbers)
        torch.manual_seed(rank)
        stage = layers(number, width)
        x, target = (torch.randn(rows * micros, width, device=device) for _ in range(2))
        if name == "alone":
            inputs = [part.clone().requires_grad_() for part in x.chunk(micros)]

            def alone():
                for part in inputs:
                    part.grad = None
                    stage(part).backward(part.detach())

            return alone, micros
        schedule = classes[name](PipelineStage(stage, rank, count, device), micros, loss_fn=loss)

        def step():
            if rank == 0:
                schedule.step(x)
            elif rank == count - 1:
                schedule.step(target=target, losses=[])
            else:
                schedule.step()

        return step, 1

    def measure(order, steps, clock):
        if order not in known:
            # A schedule's buffers are as large as its activations.
            known.clear()
            known[order] = make(order)
            # The first steps connect the processes and choose the products' kernels.
            for _ in range(3):
                clock(known[order][0])
        step, parts = known[order]
        return statistics.median(clock(step) for _ in range(steps)) * 1e3 / parts

    return measure


if __name__ == "__main__":
    ranks.run(__file__, setup)
