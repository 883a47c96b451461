"""NoLoCo's outer step: heavy-ball momentum on a group's mean weights, and a pull to the group's mean anchor.

Source: arXiv 2506.10911, in the form of spec/noloco.md section 2.2. The house sign is Δ = φ − θ; the paper's Eq. 2 has
the wrong one for its own Δ. With means over the group:

    δ' ← α·δ − β·mean(Δ) + γ·(mean(φ) − φ);   φ' ← φ + δ'

In-place NumPy in pieces that stay in the cache, one rounding an operation, as in pier.py.

Who meets whom in a NoLoCo round: a pure function that every site works out for itself (spec/noloco.md section 2.3).

Members are ordered by a hash and neighbours meet. A hash is the same in every version of every library, which a random
stream is not, and two sites must never disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pier_node.base.shared import Vector
from pier_node.config.run import NolocoSection

PIECE = 1 << 15
"""Elements worked on at a time: 128 KiB of each vector."""


def needs_anchors(rates: NolocoSection) -> bool:
    """Whether the step of a pair needs mean(φ): with γ = β it cancels out, and θ alone has to travel."""
    return rates.gamma != rates.beta


def noloco_step(
    anchor: Vector,
    momentum: Vector,
    mean_weights: Vector,
    mean_anchor: Vector | None,
    rates: NolocoSection,
    anchor_out: Vector,
    momentum_out: Vector,
) -> None:
    """One member's φ' and δ' after a round of its group, all of shape [parameters].

    Args:
        anchor: φ, this member's own; `momentum`: δ, its own too, which is never sent.
        mean_weights: mean of θ over the group, this member included; its own θ if it is alone.
        mean_anchor: mean of φ over the group; None: not needed, because γ = β or the member is alone.
        anchor_out: must overlap no input, and neither must `momentum_out`.
    """
    for start in range(0, len(anchor), PIECE):
        part = slice(start, start + PIECE)
        mean = anchor[part] if mean_anchor is None else mean_anchor[part]
        delta, scratch = momentum_out[part], anchor_out[part]
        np.subtract(mean_weights[part], mean, out=delta)
        np.multiply(delta, np.float32(rates.beta), out=delta)
        if mean_anchor is not None:
            np.subtract(mean, anchor[part], out=scratch)
            np.multiply(scratch, np.float32(rates.gamma), out=scratch)
            np.add(delta, scratch, out=delta)
        np.multiply(momentum[part], np.float32(rates.alpha), out=scratch)
        np.add(delta, scratch, out=delta)
        np.add(anchor[part], delta, out=scratch)


PAIR = 2


@dataclass(frozen=True)
class PairRun:
    """What a run says of its pairs: its seed, and its last round."""

    seed: int
    last: int


def epoch_of(nodes: Iterable[str]) -> bytes:
    """Names a set of members: pairs are drawn anew whenever it changes."""
    return hashlib.sha256("\n".join(sorted(nodes)).encode()).digest()


def groups(seed: int, round: int, nodes: Iterable[str], size: int = PAIR) -> list[tuple[str, ...]]:
    """All members in groups of `size`, each sorted by node id; whoever is left over is in a group of one."""
    members = sorted(set(nodes))
    draw = f"{seed} {round} {epoch_of(members).hex()}"
    drawn = sorted(members, key=lambda node: (_hash(f"{draw} {node}"), node))
    whole = len(drawn) - len(drawn) % size
    together = [tuple(sorted(drawn[start : start + size])) for start in range(0, whole, size)]
    return together + [(node,) for node in drawn[whole:]]


def partner(seed: int, round: int, nodes: Sequence[str], node: str) -> str | None:
    """Whom a member meets in this round; None: it is the odd one out."""
    group = next(group for group in groups(seed, round, nodes) if node in group)
    return next((other for other in group if other != node), None)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
