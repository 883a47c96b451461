"""Which outer algorithm loses least, by the number of outer rounds of a run: what `pier-node init` writes.

From docs/results.md, "Convergence": with a hundred rounds plain DiLoCo (arXiv 2311.08105) after a solo start stays
nearest to synchronous training, with a lower momentum and a higher learning rate than its paper has. Pier's schedule
was published with two thousand rounds (arXiv 2511.17849).
"""

from __future__ import annotations

from typing import Any

MANY = 1000
"""Rounds from which the schedule of the paper is taken: between a hundred and two thousand, nothing was measured."""
FEW: dict[str, Any] = {"algorithm": "diloco", "start": "solo", "momentum": 0.8, "lr": 0.8}


def choice(total_steps: int, inner_steps: int) -> tuple[dict[str, Any], str]:
    """Keys of [outer] for a run of that many inner steps, and why."""
    rounds = total_steps // inner_steps
    if rounds >= MANY:
        return {"algorithm": "pier"}, f'Chosen for {rounds:,} rounds (total_steps / inner_steps): "pier" as published.'
    why = (
        f"Chosen for {rounds:,} rounds (total_steps / inner_steps): below {MANY:,}, DiLoCo with a solo start and these "
        'momentum and lr lost least (docs/results.md); from there on, use "pier" and leave the others out.'
    )
    return FEW, why
