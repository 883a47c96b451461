"""What `pier.join` costs a program: the same loop with Pier, one site at H = 50, and without.

`python -m bench.program --rounds 60`: two copies of one model train in one process and take turns, a round of inner
steps each, first the one, then the other. Other load on the machine affects both alike, and each pair of turns gives a
ratio of their speeds. It prints the median of these ratios with its quartiles, and what a round costs in ms.

The outer step is the identity (DiLoCo with lr 1 and no momentum), so both end with the same bits: the largest
difference of a weight is printed too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pier

CONTEXT, STEPS = 128, 50


class Loop:
    """A model of its own and a loop that trains it; all loops of a seed do the same.

    Args:
        width: of the model, which has 3 · width² + 512 · width parameters, and a few more.
        batch: sequences of a step.
        folder: of its site, which founds a run of `rounds` rounds; "": it trains without Pier.
    """

    def __init__(self, width: int, batch: int, rounds: int, folder: str) -> None:
        torch.manual_seed(0)
        parts = [part for _ in range(3) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
        self.model = nn.Sequential(nn.Embedding(256, width), *parts, nn.Linear(width, 256))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._generator, self._batch = torch.Generator().manual_seed(0), batch
        self.site: pier.Site | None = None
        if folder:
            self.site = pier.join(
                self.model,
                self._optimizer,
                step_tokens=batch * CONTEXT,
                config={
                    "inner": {"total_steps": rounds * STEPS, "eval_every": 0},
                    "outer": {"algorithm": "diloco", "inner_steps": STEPS, "lr": 1.0, "momentum": 0.0},
                },
                folder=folder,
                listen="127.0.0.1:0",
                quiet=True,
            )

    def turn(self) -> float:
        """Train for a round; returns the seconds that it took."""
        began = time.perf_counter()
        with suppress(pier.StopTraining):
            for _ in range(STEPS):
                rows = torch.randint(256, (self._batch, CONTEXT + 1), generator=self._generator)
                loss = F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                torch.autograd.backward(loss)
                self._optimizer.step()
                self._optimizer.zero_grad()
                if self.site:
                    self.site.step(tokens=self._batch * CONTEXT)
        return time.perf_counter() - began

    def weights(self) -> Tensor:
        """All of them, shape [parameters]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one."""
    lower, middle, upper = statistics.quantiles(values, n=4)
    return lower, middle, upper


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of turns; the first is not counted")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    options = parser.parse_args()
    plain: list[float] = []
    joined: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        with_pier = Loop(options.width, options.batch, options.rounds, folder)
        without = Loop(options.width, options.batch, options.rounds, "")
        for index in range(options.rounds):
            turns = [(with_pier, joined), (without, plain)]
            for loop, seconds in turns if index % 2 else reversed(turns):
                seconds.append(loop.turn())
        assert with_pier.site
        with_pier.site.close()
    del plain[0], joined[0]
    tokens = STEPS * options.batch * CONTEXT
    speeds = (tokens / statistics.median(plain), tokens / statistics.median(joined))
    print(f"{len(without.weights()):,} parameters, {1000 * statistics.median(plain) / STEPS:.1f} ms a step")
    print(f"without Pier {speeds[0]:,.0f} tokens/s, with {speeds[1]:,.0f}")
    lower, middle, upper = quartiles([before / after for before, after in zip(plain, joined)])
    print(f"ratio {middle:.4f} ({lower:.4f} to {upper:.4f}), {len(plain)} pairs of rounds")
    lower, middle, upper = quartiles([1000 * (after - before) for before, after in zip(plain, joined)])
    print(f"a round costs {middle:.0f} ms ({lower:.0f} to {upper:.0f})")
    apart = float((with_pier.weights() - without.weights()).abs().max())
    print(f"largest difference of a weight at the end: {apart:.3g}")


if __name__ == "__main__":
    main()
