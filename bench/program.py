"""What `pier.join` costs a program: tokens a second of the same loop with Pier, one site at H = 50, and without.

`python -m bench.program --steps 400 --repeats 5`: the two take turns in one process tree. It prints the medians, their
ratio and its range, and the largest difference of a weight at the end: the outer step is the identity
(DiLoCo with lr 1 and no momentum), but for the rounding of φ − (φ − θ).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

import pier

CONTEXT, BATCH, WIDTH = 128, 8, 256


def loop(steps: int, seed: int, joined: bool) -> tuple[float, torch.Tensor]:
    """Tokens a second, and the weights at the end, shape [parameters]."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, WIDTH), *_blocks(3), nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    config = {
        "inner": {"total_steps": steps, "eval_every": 0},
        "outer": {"algorithm": "diloco", "inner_steps": 50, "lr": 1.0, "momentum": 0.0},
    }
    with tempfile.TemporaryDirectory() as folder:
        site = None
        if joined:
            site = pier.join(
                model,
                optimizer,
                step_tokens=BATCH * CONTEXT,
                config=config,
                folder=folder,
                listen="127.0.0.1:0",
                quiet=True,
            )
        began = time.perf_counter()
        try:
            for _ in range(steps):
                rows = torch.randint(256, (BATCH, CONTEXT + 1), generator=generator)
                loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if site:
                    site.step(tokens=BATCH * CONTEXT)
        except pier.StopTraining:
            pass
        seconds = time.perf_counter() - began
        if site:
            site.close()
    return steps * BATCH * CONTEXT / seconds, torch.cat([it.detach().flatten() for it in model.parameters()])


def _blocks(count: int) -> list[nn.Module]:
    return [part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    speeds: dict[bool, list[float]] = {False: [], True: []}
    apart = 0.0
    for seed in range(options.repeats):
        ends = []
        for joined in (False, True) if seed % 2 else (True, False):
            speed, weights = loop(options.steps, seed, joined)
            speeds[joined].append(speed)
            ends.append(weights)
        apart = max(apart, float((ends[0] - ends[1]).abs().max()))
    ratios = sorted(with_pier / plain for with_pier, plain in zip(speeds[True], speeds[False]))
    print(f"without Pier {statistics.median(speeds[False]):,.0f} tokens/s, with {statistics.median(speeds[True]):,.0f}")
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), {len(ratios)} pairs")
    print(f"largest difference of a weight at the end: {apart:.3g}")


if __name__ == "__main__":
    main()
