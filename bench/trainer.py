"""Tokens per second of Pier's own trainer and of a plain loop like nanoGPT's, in turns, in one process, on the CPU.

    python -m bench.trainer [--rounds 12] [--steps 10] [--threads 1] [--batch 8] [--preset gpt2-1m]

Both train the same GPT-2 with the same AdamW and the same batches of the same text. Pier's side is what a worker does
in an inner step: its rows from the corpus, their gradient, clipping, the learning rate's schedule and the step. The
other side is what a person writes in an afternoon (Karpathy's nanoGPT, whose attention has one matrix for query, key
and value). The ratio is the median over pairs of turns, so that load that comes and goes does not decide it; CPU
seconds are given as well as elapsed ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pier_node.config.run import ModelSection, RunConfig
from pier_node.trainer import devices
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.data.prefetch import Prefetch
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] -> [batch, time, dim]."""
        rows, time_, dim = x.shape
        parts = self.qkv(self.before(x)).split(dim, dim=2)
        query, key, value = (it.view(rows, time_, self.heads, -1).transpose(1, 2) for it in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, time_, dim))
        out: Tensor = x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))
        return out


class Plain(nn.Module):
    """GPT-2."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.places = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.flatten())


CPU = torch.device("cpu")
Turn = Callable[[int, int], None]
"""Does inner steps, from the first number to before the second."""


def plain_loop(config: RunConfig, windows: Windows, device: torch.device = CPU) -> Turn:
    """What a person writes."""
    model, inner, bf16 = Plain(config.model).to(device), config.inner, devices.uses_bf16(device, config.inner.precision)
    if inner.compile:
        model.compile()
    matrices = [it for it in model.parameters() if it.dim() >= 2]
    vectors = [it for it in model.parameters() if it.dim() < 2]
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), fused=True)

    def turn(first: int, end: int) -> None:
        for step in range(first, end):
            inputs, targets = (torch.from_numpy(part).to(device) for part in windows.batch(step, inner.batch_size))
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = model(inputs, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
            optimizer.step()

    return turn


def piers(config: RunConfig, windows: Windows, device: torch.device = CPU) -> Turn:
    """What a worker of a site does."""
    replica = Replica(config, device, workers=1)
    replica.load_weights(initial_weights(config.model, config.run.seed))
    batches, sequences = Prefetch(windows.batch, device), config.inner.batch_size

    def turn(first: int, end: int) -> None:
        for step in range(first, end):
            replica.train(step, batches.rows(step, sequences), sequences)

    return turn


def timed(turn: Turn, first: int, end: int) -> tuple[float, float]:
    """Seconds by the clock, and of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    turn(first, end)
    return time.perf_counter() - clock, time.process_time() - cpu


def main() -> None:
    """Run the turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--preset", default="gpt2-1m")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = RunConfig.model_validate(
        {"model": {"preset": options.preset}, "inner": {"batch_size": options.batch, "precision": "fp32"}}
    )
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(config.data, 0, 1, None, Path(folder))
        windows = Windows(corpus, config.model.context, config.run.seed, "site")
        turns = [plain_loop(config, windows), piers(config, windows)]
        for turn in turns:
            timed(turn, 0, 2)
        pairs = []
        for number in range(options.rounds):
            steps = number * options.steps, (number + 1) * options.steps
            order = (0, 1) if number % 2 == 0 else (1, 0)
            found = {which: timed(turns[which], *steps) for which in order}
            pairs.append((found[0], found[1]))
    tokens = options.steps * options.batch * config.model.context
    for name, which in (("plain loop", 0), ("Pier", 1)):
        clock = statistics.median(tokens / pair[which][0] for pair in pairs)
        cpu = statistics.median(tokens / pair[which][1] for pair in pairs)
        print(f"{name:12}{clock:10,.0f} tokens/s{cpu:10,.0f} tokens per CPU second")
    for name, kind in (("clock", 0), ("CPU", 1)):
        ratio = statistics.median(plain[kind] / pier[kind] for plain, pier in pairs)
        print(f"Pier / plain loop by {name}: {ratio:.3f}")


if __name__ == "__main__":
    main()
