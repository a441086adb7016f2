#!/usr/bin/env python3
"""PyTorch's side of `decode`: a model of Llama's shape (Llama 3 8B with 8 layers, bf16) that writes words.

    python3 benches/peers/decode.py DEVICES

starts torchrun with one process per GPU. It then answers each input line `ORDER:FORM:BATCH NUMBER`. FORM is `graph`,
torch's operations in a CUDA graph, or `compile`, what `torch.compile` makes of them in a CUDA graph. ORDER is

    prepare   captures a step for this batch, and answers with the seconds that it took, or with `nan` and a message
    rate      words in a second, of all sequences, over NUMBER steps behind the prompt
    word      the word NUMBER behind the prompt of the first sequence, as written by the last `rate`

    python3 benches/peers/decode.py first DEVICES

writes the first word behind a prompt, without a graph, and ends; on one GPU without torchrun and NCCL.

The model is that of examples/decode, with the same weights: heads, the columns of the feed-forward layers and the words
of the last matrix are divided among the processes. Queries, keys and values are one product, and so are both matrices
before the activation. Keys and values are in memory of a fixed length, with a mask behind the present place. The heads
that share keys are rows of one matrix of queries, so that torch takes a fused kernel for attention.
"""

import os
import subprocess
import sys
import time
import traceback

# What collectives in a graph ask for: https://docs.pytorch.org/docs/stable/notes/cuda.html
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"

WORDS, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 128_256, 4096, 14_336, 8, 32, 8, 128
SHARED = HEADS // KV_HEADS
EPS = 1e-5
PROMPT, LONGEST = 12, 144
WARM_UP = 3
WORKER = "PEER_DECODE_FIRST"


def part(total, rank, count):
    """The first and the last of a process' parts, as gpu-pool's shards have them."""
    each, more = divmod(total, count)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


def weights(torch, seed, rows, cols, all_cols, largest):
    """Rows and columns (ranges) of a matrix of random weights: `weight` in examples/decode/model/kernels.rs."""
    word = 0xFFFFFFFF
    w = torch.empty(rows[1] - rows[0], cols[1] - cols[0], device="cuda", dtype=torch.bfloat16)
    step = max(1, (1 << 25) // w.shape[1])
    col = torch.arange(*cols, device="cuda")
    for begin in range(0, w.shape[0], step):
        end = min(begin + step, w.shape[0])
        row = torch.arange(rows[0] + begin, rows[0] + end, device="cuda")[:, None]
        x = (row * all_cols + col + seed * 0x9E3779B9) & word
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & word
        x = ((x ^ (x >> 15)) * 0x846CA68B) & word
        x = x ^ (x >> 16)
        x = torch.where(x > 0x7FFFFFFF, x - (1 << 32), x)
        w[begin:end] = x.float() * 2.0**-31 * largest
    return w


class Model:
    """The part of a process."""

    def __init__(self, torch, rank, count):
        by = 1.7 / WIDTH**0.5
        kv, inner, words = part(KV_HEADS, rank, count), part(INNER, rank, count), part(WORDS, rank, count)
        self.kv, self.inner, self.first_word = kv[1] - kv[0], inner[1] - inner[0], words[0]
        own_kv = (kv[0] * HEAD, kv[1] * HEAD)
        own_q = (own_kv[0] * SHARED, own_kv[1] * SHARED)
        width = (0, WIDTH)

        def matrix(seed, rows, cols, all_cols, largest=by):
            return weights(torch, seed, rows, cols, all_cols, largest)

        def norm(seed):
            return weights(torch, seed, (0, 1), width, WIDTH, 1.0)[0]

        self.table = matrix(0, (0, WORDS), width, WIDTH, 1.7)
        gammas, self.layers = [norm(1)], []
        for layer in range(LAYERS):
            seed = 16 * (layer + 1)
            qkv = [matrix(seed + i, rows, width, WIDTH) for i, rows in enumerate((own_q, own_kv, own_kv))]
            gate_up = [matrix(seed + 4 + i, inner, width, WIDTH) for i in range(2)]
            self.layers.append({
                "qkv": torch.cat(qkv),
                "o": matrix(seed + 3, width, own_q, HEADS * HEAD),
                "gate_up": torch.cat(gate_up),
                "down": matrix(seed + 6, width, inner, INNER),
            })
            gammas += [norm(seed + 7), norm(seed + 8)]
            # A norm stands behind the sum before it; here it begins what follows.
            self.layers[-1] |= {"before": gammas[-3], "between": gammas[-2]}
        self.last = gammas[-1]
        self.head = matrix(2, words, width, WIDTH)
        place = torch.arange(LONGEST, device="cuda", dtype=torch.float64)[:, None]
        angles = place * 10_000.0 ** (-2.0 * torch.arange(HEAD // 2, device="cuda", dtype=torch.float64) / HEAD)
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.stack((cos, cos), 1).to(torch.bfloat16)
        self.sin = torch.stack((-sin, sin), 1).to(torch.bfloat16)
        later = torch.ones(LONGEST, LONGEST, device="cuda", dtype=torch.bool).triu(1)
        self.mask = torch.zeros(LONGEST, LONGEST, device="cuda", dtype=torch.bfloat16).masked_fill(later, -1e30)


def pieces(torch, kv, inner):
    """What is between two sums over the processes: before and behind attention, the rest of a layer, and the end."""
    functional = torch.nn.functional

    def normed(r, y, gamma):
        r = r + y
        return r, functional.rms_norm(r, (WIDTH,), gamma, EPS)

    def attend(r, y, gamma, qkv, o, keys, values, place, cos, sin, mask):
        r, x = normed(r, y, gamma)
        qkv = functional.linear(x, qkv)
        batch, turning = qkv.shape[0], kv * (SHARED + 1)
        x = qkv[:, : turning * HEAD].view(batch, turning, 2, HEAD // 2)
        x = torch.addcmul(x * cos, x.flip(2), sin).view(batch, turning, HEAD)
        keys.index_copy_(2, place, x[:, kv * SHARED :].unsqueeze(2))
        values.index_copy_(2, place, qkv[:, turning * HEAD :].view(batch, kv, 1, HEAD))
        queries = x[:, : kv * SHARED].reshape(batch, kv, SHARED, HEAD)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return r, functional.linear(mixed.reshape(batch, kv * SHARED * HEAD), o)

    def feed(r, y, gamma, gate_up, down):
        r, x = normed(r, y, gamma)
        x = functional.linear(x, gate_up)
        return r, functional.linear(functional.silu(x[:, :inner]) * x[:, inner:], down)

    def end(r, y, gamma, head):
        _, x = normed(r, y, gamma)
        return functional.linear(x, head).max(-1)

    return attend, feed, end


class Sequences:
    """A batch, with a step."""

    def __init__(self, torch, dist, model, batch, compiled):
        self.torch, self.dist, self.model, self.batch = torch, dist, model, batch
        made = pieces(torch, model.kv, model.inner)
        if compiled:
            made = [torch.compile(piece, dynamic=False, fullgraph=True) for piece in made]
        self.attend, self.feed, self.end = made
        self.words = torch.zeros(LONGEST, batch, device="cuda", dtype=torch.int64)
        for s in range(batch):
            for i in range(PROMPT):
                self.words[i, s] = (31 * s + i + 1) * 7919 % WORDS
        self.place = torch.zeros(1, device="cuda", dtype=torch.int64)
        shape = batch, model.kv, LONGEST, HEAD
        self.caches = [[torch.zeros(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
                       for _ in range(LAYERS)]
        self.zero = torch.zeros(batch, WIDTH, device="cuda", dtype=torch.bfloat16)

    def summed(self, y):
        if self.dist is not None:
            self.dist.all_reduce(y)
        return y

    def step(self):
        torch, model, place = self.torch, self.model, self.place
        cos, sin, mask = (table.index_select(0, place) for table in (model.cos, model.sin, model.mask))
        mask = mask.view(1, 1, 1, LONGEST).expand(self.batch, model.kv, SHARED, LONGEST)
        y = torch.nn.functional.embedding(self.words.index_select(0, place)[0], model.table)
        r = self.zero
        for w, (keys, values) in zip(model.layers, self.caches):
            r, y = self.attend(r, y, w["before"], w["qkv"], w["o"], keys, values, place, cos, sin, mask)
            r, y = self.feed(r, self.summed(y), w["between"], w["gate_up"], w["down"])
            y = self.summed(y)
        most, word = self.end(r, y, model.last, model.head)
        word = word + model.first_word
        if self.dist is not None:
            # Words are whole numbers below 2^24, which f32 holds.
            own = torch.stack((most.float(), word.float()))
            count = self.dist.get_world_size()
            all_of_them = torch.empty(count * 2, self.batch, device="cuda")
            self.dist.all_gather_into_tensor(all_of_them, own)
            all_of_them = all_of_them.view(count, 2, self.batch)
            best = all_of_them[:, 0].argmax(0, keepdim=True)
            word = all_of_them[:, 1].gather(0, best)[0].long()
        place.add_(1)
        given = self.words.index_select(0, place)
        self.words.index_copy_(0, place, torch.where(place < PROMPT, given, word[None]))

    def captured(self):
        """The step as a graph."""
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The thread that watches NCCL asks for events of earlier calls meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step()
        return graph


def setup(torch, dist):
    torch.set_grad_enabled(False)
    rank, count = dist.get_rank(), dist.get_world_size()
    model, ready = Model(torch, rank, count), {}

    def measure(order, number, clock):
        what, form, batch = order.split(":")
        key = form, int(batch)
        if what == "prepare":
            start = time.perf_counter()
            try:
                sequences = Sequences(torch, dist if count > 1 else None, model, int(batch), form == "compile")
                ready[key] = sequences, sequences.captured()
            except Exception:
                traceback.print_exc()
                return float("nan")
            torch.cuda.synchronize()
            return time.perf_counter() - start
        sequences, graph = ready[key]
        if what == "word":
            return float(sequences.words[PROMPT + number, 0])
        sequences.place.zero_()
        for _ in range(PROMPT):
            graph.replay()

        def body():
            for _ in range(number):
                graph.replay()

        return number * int(batch) / clock(body)

    return measure


def first(torch, dist, rank, count):
    """Writes the first word behind a prompt."""
    torch.set_grad_enabled(False)
    torch.cuda.set_device(rank)
    if dist is not None:
        dist.init_process_group("nccl")
    sequences = Sequences(torch, dist, Model(torch, rank, count), 1, False)
    for _ in range(PROMPT):
        sequences.step()
    word = sequences.words[PROMPT, 0].item()
    if rank == 0:
        print(word, flush=True)
    if dist is not None:
        dist.destroy_process_group()


def main():
    if WORKER in os.environ:
        import torch
        import torch.distributed as dist

        first(torch, dist, int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    elif sys.argv[1:2] == ["first"]:
        devices = int(sys.argv[2])
        if devices == 1:
            import torch

            first(torch, None, 0, 1)
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        env = {**os.environ, WORKER: "1"}
        env.setdefault("OMP_NUM_THREADS", "4")
        sys.exit(subprocess.run(command + [os.path.abspath(__file__)], env=env).returncode)
    else:
        import ranks

        ranks.run(__file__, setup)


if __name__ == "__main__":
    main()
