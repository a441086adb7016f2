#!/usr/bin/env python3
"""PyTorch's side of `gpt`: training steps of GPT-2 small under DistributedDataParallel.

    python3 benches/peers/gpt.py DEVICES compile
    python3 benches/peers/gpt.py DEVICES eager

starts torchrun with one process per GPU. It then answers each input line `WHAT NUMBER`:

    first 1        makes the first step; 1 if the model is compiled, 0 if not
    step STEPS     milliseconds of a step of the slowest process, over so many

8 sequences of 1024 words for each process. Parameters are f32, products and attention bf16 by autocast. With `compile`
the model is compiled, with empty caches; if that fails or takes more than LIMIT seconds, it is not, and says why.
"""

import os
import signal
import sys
import tempfile

import ranks

HOW = "PEER_GPT"
LIMIT = 90
WORDS, CONTEXT, WIDTH, HEADS, LAYERS, SEQUENCES = 50304, 1024, 768, 12, 12, 8


def model_of(torch):
    """As in the paper's code: norms before, a tied head, GELU by tanh."""
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            batch, context, width = x.shape
            parts = self.qkv(self.norm_1(x)).split(width, dim=2)
            heads = [part.view(batch, context, HEADS, width // HEADS).transpose(1, 2) for part in parts]
            mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
            return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.words.weight
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    scale = (2 * LAYERS) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1
                    nn.init.normal_(parameter, std=0.02 * scale)
                elif "norm" not in name:
                    nn.init.zeros_(parameter)

        def forward(self, words, labels):
            places = torch.arange(words.size(1), device=words.device)
            x = self.words(words) + self.places(places)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1))

    return Gpt()


def setup(torch, dist):
    local, rank = torch.cuda.current_device(), dist.get_rank()
    control = dist.new_group(backend="gloo")
    state = {}

    def loss_of(model):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(*state["batch"])

    def step():
        state["optimizer"].zero_grad(set_to_none=True)
        loss = loss_of(state["model"])
        loss.backward()
        state["optimizer"].step()
        return loss

    def compiled(ddp):
        """The compiled model, or none on all processes."""

        def late(*_):
            raise TimeoutError(f"more than {LIMIT} s")

        model = None
        signal.signal(signal.SIGALRM, late)
        signal.alarm(LIMIT)
        try:
            model = torch.compile(ddp)
            # Nothing is exchanged: another process may not have come so far.
            with ddp.no_sync():
                loss_of(model).backward()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"torch.compile: {type(error).__name__}: {str(error)[:1000]}", file=sys.stderr, flush=True)
            model = None
        finally:
            signal.alarm(0)
        all_right = torch.tensor([int(model is not None)])
        dist.all_reduce(all_right, op=dist.ReduceOp.MIN, group=control)
        return model if all_right.item() else None

    def first():
        torch.manual_seed(1)
        ddp = torch.nn.parallel.DistributedDataParallel(
            model_of(torch).cuda(), device_ids=[local], gradient_as_bucket_view=True, broadcast_buffers=False
        )
        torch.manual_seed(100 + rank)
        words = torch.randint(0, WORDS, (SEQUENCES, CONTEXT + 1), device="cuda")
        state["batch"] = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        model = compiled(ddp) if os.environ[HOW] == "compile" else None
        state["model"] = ddp if model is None else model
        state["optimizer"] = torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True)
        loss = step().item()
        if not loss < 20:
            raise ValueError(f"a loss of {loss}")
        return float(model is not None)

    def measure(order, number, clock):
        if order == "first":
            return first()

        def body():
            for _ in range(number):
                step()

        return clock(body) * 1e3 / number

    return measure


if __name__ == "__main__":
    if HOW in os.environ:
        ranks.run(__file__, setup)
    else:
        os.environ[HOW] = sys.argv[2]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
            # A user's first run has nothing in them.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(caches, "inductor")
            os.environ["TRITON_CACHE_DIR"] = os.path.join(caches, "triton")
            ranks.run(__file__, setup)
