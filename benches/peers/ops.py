#!/usr/bin/env python3
"""PyTorch's side of `parallel`'s part `ops`: operations in CUDA graphs of 20.

It answers each input line `OPERATION:FORM:TYPE:ROWS:COLUMNS LAUNCHES` with the microseconds of one operation, over that
many launches of the graph. With 0 launches it only makes the graph. FORM is `torch` or `torch.compile`. What PyTorch
cannot do is answered by `nan`, and the reason goes to the standard error.

f32 without TF32, except in `gemm_tf32`. As on the other side, each of the 20 operations has its own input and output.
"""

import os
import sys
import time
import traceback

CHAIN = 20


class Data:
    """The memory of a type and shape."""

    def __init__(self, torch, dtype, rows, cols):
        self.dtype, self.rows, self.cols = dtype, rows, cols
        self.other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16

        def noise(*shape):
            return torch.randn(*shape, device="cuda", dtype=dtype)

        def below(bound):
            return torch.randint(0, bound, (rows,), device="cuda")

        self.x, self.dy, self.y = ([noise(rows, cols) for _ in range(CHAIN)] for _ in range(3))
        self.square, self.gamma, self.beta = noise(cols, cols), noise(cols), noise(cols)
        self.mean = torch.rand(rows, 1, device="cuda") * 0.2 - 0.1
        self.rstd = torch.rand(rows, 1, device="cuda") * 0.2 + 0.9
        self.labels, self.indices = below(cols), below(rows)
        self.words = torch.zeros(rows, cols, device="cuda", dtype=torch.int32)


def operations(torch):
    """By name: functions of the data and the number of the buffers."""
    functional, aten = torch.nn.functional, torch.ops.aten

    def cross_entropy(d, i):
        with torch.enable_grad():
            x = d.x[i].detach().requires_grad_()
            loss = functional.cross_entropy(x, d.labels, reduction="sum")
            return loss.detach(), torch.autograd.grad(loss, x)[0]

    def layer_norm_backward(d, i, mask):
        return aten.native_layer_norm_backward(
            d.dy[i], d.x[i], [d.cols], d.mean, d.rstd, d.gamma, d.beta, mask
        )

    def rms_norm_backward(d, i, mask):
        return aten._fused_rms_norm_backward(d.dy[i], d.x[i], [d.cols], d.rstd, d.gamma, mask)

    def gelu_backward(dy, x, approximate="none"):
        return aten.gelu_backward(dy, x, approximate=approximate)

    def halves(d, i):
        half = d.cols // 2
        return d.y[i].view(-1)[: d.rows * half].view(d.rows, half).copy_(d.x[i][:, :half])

    def tf32(d, i):
        torch.backends.cuda.matmul.allow_tf32 = True
        y = torch.mm(d.x[i], d.square)
        torch.backends.cuda.matmul.allow_tf32 = False
        return y

    return {
        "fill": lambda d, i: d.y[i].fill_(1.0),
        "scale": lambda d, i: d.y[i].mul_(-1.0),
        "axpy": lambda d, i: d.y[i].add_(d.x[i], alpha=0.5),
        "sum": lambda d, i: d.x[i].sum(),
        "dot": lambda d, i: torch.dot(d.x[i].view(-1), d.dy[i].view(-1)),
        "cast": lambda d, i: d.x[i].to(d.other),
        "add": lambda d, i: d.x[i] + d.dy[i],
        "mul": lambda d, i: d.x[i] * d.dy[i],
        "relu": lambda d, i: torch.relu(d.x[i]),
        "relu_backward": lambda d, i: aten.threshold_backward(d.dy[i], d.x[i], 0),
        "gelu": lambda d, i: functional.gelu(d.x[i]),
        "gelu_backward": lambda d, i: gelu_backward(d.dy[i], d.x[i]),
        "gelu_tanh": lambda d, i: functional.gelu(d.x[i], approximate="tanh"),
        "gelu_tanh_backward": lambda d, i: gelu_backward(d.dy[i], d.x[i], "tanh"),
        "silu": lambda d, i: functional.silu(d.x[i]),
        "silu_backward": lambda d, i: aten.silu_backward(d.dy[i], d.x[i]),
        "bias": lambda d, i: d.x[i] + d.beta,
        "bias_relu": lambda d, i: torch.relu(d.x[i] + d.beta),
        "bias_gelu": lambda d, i: functional.gelu(d.x[i] + d.beta),
        "bias_gelu_backward": lambda d, i: gelu_backward(d.dy[i], d.x[i] + d.beta),
        "softmax": lambda d, i: torch.softmax(d.x[i], 1),
        "softmax_backward": lambda d, i: aten._softmax_backward_data(d.dy[i], d.x[i], 1, d.dtype),
        "log_softmax": lambda d, i: torch.log_softmax(d.x[i], 1),
        "log_softmax_backward": lambda d, i: aten._log_softmax_backward_data(d.dy[i], d.x[i], 1, d.dtype),
        "cross_entropy": cross_entropy,
        "cross_entropy_loss": lambda d, i: functional.cross_entropy(d.x[i], d.labels, reduction="none"),
        "argmax": lambda d, i: torch.argmax(d.x[i], 1),
        "column_sum": lambda d, i: d.x[i].sum(0),
        "layer_norm": lambda d, i: aten.native_layer_norm(d.x[i], [d.cols], d.gamma, d.beta, 1e-5),
        "layer_norm_backward": lambda d, i: layer_norm_backward(d, i, [True, False, False]),
        "layer_norm_weights_backward": lambda d, i: layer_norm_backward(d, i, [False, True, True]),
        "rms_norm": lambda d, i: aten._fused_rms_norm(d.x[i], [d.cols], d.gamma, 1e-5),
        "rms_norm_backward": lambda d, i: rms_norm_backward(d, i, [True, False]),
        "rms_norm_weights_backward": lambda d, i: rms_norm_backward(d, i, [False, True]),
        "transpose": lambda d, i: d.x[i].t().contiguous(),
        "copy_2d": halves,
        "embedding": lambda d, i: torch.index_select(d.x[i], 0, d.indices),
        "embedding_backward": lambda d, i: d.y[i].index_add_(0, d.indices, d.dy[i]),
        "random_bits": lambda d, i: d.words.random_(),
        "uniform": lambda d, i: d.y[i].uniform_(-0.1, 0.1),
        "normal": lambda d, i: d.y[i].normal_(0.0, 1.0),
        "dropout": lambda d, i: functional.dropout(d.x[i], 0.5, training=True),
        "gemm": lambda d, i: torch.mm(d.x[i], d.square),
        "gemm_tf32": tf32,
    }


def compiled(torch, name):
    """Two operations as one kernel. The inputs are tensors: a list of them would be compiled in."""
    functional, aten = torch.nn.functional, torch.ops.aten
    functions = {
        "bias_gelu": lambda x, b, dy: functional.gelu(x + b),
        "bias_gelu_backward": lambda x, b, dy: aten.gelu_backward(dy, x + b, approximate="none"),
    }
    function = torch.compile(functions[name], fullgraph=True, dynamic=False)
    return lambda d, i: function(d.x[i], d.beta, d.dy[i])


class Side:
    """The graphs of one operation, by form."""

    def __init__(self, torch):
        self.torch = torch
        self.operations = operations(torch)
        self.data = self.shape = self.name = None
        self.graphs = {}

    def prepare(self, name, form, dtype, rows, cols):
        torch = self.torch
        if (self.name, self.shape) != (name, (dtype, rows, cols)):
            self.graphs.clear()
        self.name = name
        if self.shape != (dtype, rows, cols):
            # The old memory must be free before there is new memory.
            self.data = self.shape = None
            torch.cuda.empty_cache()
            types = {"f32": torch.float32, "bf16": torch.bfloat16}
            self.data, self.shape = Data(torch, types[dtype], int(rows), int(cols)), (dtype, rows, cols)
        call = compiled(torch, name) if form == "torch.compile" else self.operations[name]
        # Warm-up on another stream, as the guide for graphs says.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(3):
                call(self.data, i)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call(self.data, i) for i in range(CHAIN)]
        torch.cuda.synchronize()
        # The outputs live as long as the graph.
        self.graphs[form] = graph, kept

    def time(self, graph, launches):
        graph.replay()
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            graph.replay()
        self.torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / (launches * CHAIN)

    def answer(self, order, launches):
        name, form, *shape = order.split(":")
        if (self.name, self.shape) != (name, tuple(shape)) or form not in self.graphs:
            self.prepare(name, form, *shape)
        return self.time(self.graphs[form][0], launches) if launches else 0.0


def main():
    # Answers only; what libraries print goes to the standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    # Compiling in this process needs no other ones.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)
    side = Side(torch)
    for line in sys.stdin:
        order, launches = line.split()
        try:
            answer = side.answer(order, int(launches))
        except Exception:
            traceback.print_exc()
            answer = float("nan")
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
