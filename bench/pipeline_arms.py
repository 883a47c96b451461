"""The arms of bench/pipeline_convergence.py: the [pipeline] settings of each; `total_steps` belongs to [inner], and
`outer` and `model` are [outer] and [model]. `full_at` says which steps are full although the arm skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
SUBSPACES: dict[str, Arm] = {
    "full, own head": {**ARMS["full"], "model": {"tie_embeddings": False}},
    **{
        f"full, subspace {size}, int8": {
            **ARMS["full"],
            "activation_codec": "int8",
            "gradient_codec": "int8",
            "model": {"tie_embeddings": False, "subspace": size},
        }
        for size in (32, 16)
    },
}
"""Blocks write to some of the 64 channels of the residual stream, and stages send each other these alone."""
STEPS = (100, 200, 300)
SHORTER: dict[str, Arm] = {f"full, {steps} steps": {**ARMS["full"], "total_steps": steps} for steps in STEPS}
"""Shorter runs, with the whole schedule of the learning rate: what a run that skips has to beat."""
MIXED: dict[str, Arm] = {
    f"{arm}, the last fifth full": {**ARMS[arm], "full_end": 0.2} for arm in ("skip 25 %", "skip 50 %")
}
"""In the last iterations all microbatches visit all stages."""
FullAt = Callable[[int, int], bool]
"""(step, total steps) -> whether all microbatches visit all stages in it."""


def more_and_more(step: int, total: int) -> bool:
    """A fifth of the steps: over the last two fifths their share rises from none to all."""
    begin = total * 3 // 5
    before, after = (max(it - begin, 0) ** 2 // (2 * (total - begin)) for it in (step, step + 1))
    return after > before


def every_fifth(step: int, _total: int) -> bool:
    """The last of each five."""
    return step % 5 == 4


TRIED: dict[str, Arm] = {
    f"{arm}, {name}": {**ARMS[arm], "full_at": full_at}
    for arm in ("skip 25 %", "skip 50 %")
    for name, full_at in (("full more and more often", more_and_more), ("every fifth full", every_fifth))
}
"""Not in the product, and run only if they are asked for."""
TWICE: Arm = {"stages": 2, "paths": "random"}
APART = {"algorithm": "diloco", "inner_steps": 10, "momentum": 0.0, "lr": 1.0}
"""Better on seed 11 (1.804) than μ = 0.4 and η = 0.9 (1.856), after so few rounds."""
REPLICAS: dict[str, Arm] = {
    "two replicas, averaged at each step": TWICE,
    **{
        f"two replicas, H 10, {name}": {**TWICE, "outer": {**APART, "codec": codec}}
        for name, codec in (("fp32", "none"), ("int4", "int4"))
    },
}
"""Two stages with two sites each, whose paths are drawn at random."""
USUAL = ARMS | CODED | SUBSPACES | SHORTER | MIXED | REPLICAS
ALL = USUAL | TRIED
SITES = {(2, 2): 4, (6, 6): 6, (4, 3): 9, (6, 4): 20, (6, 3): 15}
"""(stages, path length) -> as many sites as make all stages equally busy."""
CUTS = {"quarter": (4, 1), "third": (6, 2), "half": (6, 3)}
"""What is left out of a trained model: (stages, how many of them)."""
EXITS = 6
"""Stages of the cut of which the last ones are left out."""
