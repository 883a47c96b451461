"""The arms of bench/pipeline_convergence.py: the [pipeline] settings of each; `total_steps` belongs to [inner], and
`full_passes` to the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FullPasses:
    """In which steps all microbatches visit all stages.

    Attributes:
        last: in this part of the steps, at the end.
        annealed: in this part of the steps, at the end, more and more often: their share rises from 0 to 1.
        every: in each n-th step; 0: not.
    """

    last: float = 0.0
    annealed: float = 0.0
    every: int = 0

    def at(self, step: int, total: int) -> bool:
        """Whether they do in this step, of 0 .. total - 1."""
        if self.every:
            return step % self.every == self.every - 1
        if step >= round(total * (1 - self.last)):
            return True
        return math.floor(self._by(step + 1, total)) > math.floor(self._by(step, total))

    def _by(self, step: float, total: int) -> float:
        """How many steps of an annealed run are full, of the first `step` ones."""
        length = self.annealed * total
        inside = max(0.0, step - (total - length))
        return inside**2 / (2 * length) if length else 0.0


Arm = dict[str, Any]

ARMS: dict[str, Arm] = {
    "full": {"stages": 6, "paths": "full"},
    "skip 25 %": {"stages": 4, "skip": 0.25},
    "skip 33 %": {"stages": 6, "skip": 0.33},
    "skip 50 %": {"stages": 6, "skip": 0.5},
    "skip 25 %, swaps": {"stages": 4, "skip": 0.25, "swaps": 1},
    "skip 33 %, swaps": {"stages": 6, "skip": 0.33, "swaps": 1},
    "skip 50 %, swaps": {"stages": 6, "skip": 0.5, "swaps": 1},
}
"""Cuts are those of the paper: 25 % are one stage of four, 33 and 50 % two and three of six."""
PLAIN = {"activation_codec": "none", "gradient_codec": "none"}
CODED: dict[str, Arm] = {
    f"full, {name}": {**ARMS["full"], "activation_codec": forward, "gradient_codec": back}
    for name, forward, back in (
        ("bf16", "bf16", "bf16"),
        ("int8", "int8", "int8"),
        ("int8, gradients int4", "int8", "int4"),
        ("int4, gradients int8", "int4", "int8"),
        ("int4", "int4", "int4"),
    )
}
"""Stages send each other fewer bits."""
STEPS = (100, 200, 300)
SHORTER: dict[str, Arm] = {f"full, {steps} steps": {**ARMS["full"], "total_steps": steps} for steps in STEPS}
"""Shorter runs, with the whole schedule of the learning rate: what a run that skips has to beat."""
MIXED: dict[str, Arm] = {
    f"{arm}, {words}": {**ARMS[arm], "full_passes": passes}
    for arm in ("skip 25 %", "skip 50 %")
    for words, passes in (
        ("the last fifth full", FullPasses(last=0.2)),
        ("annealed over two fifths", FullPasses(annealed=0.4)),
        ("every fifth full", FullPasses(every=5)),
    )
}
"""In a fifth of the iterations all microbatches visit all stages: in the last ones, more and more often towards the
end, or again and again."""
ALL = ARMS | CODED | SHORTER | MIXED
SITES = {(6, 6): 6, (4, 3): 9, (6, 4): 20, (6, 3): 15}
"""(stages, path length) -> as many sites as make all stages equally busy."""
CUTS = {"quarter": (4, 1), "third": (6, 2), "half": (6, 3)}
"""What is left out of a trained model: (stages, how many of them)."""
EXITS = 6
"""Stages of the cut of which the last ones are left out."""
