"""NoLoCo: the outer step of a group, and the pairs that meet in a round.

The step is heavy-ball momentum on the group's mean weights, with a pull to the group's mean anchor. Source: arXiv
2506.10911, Eq. 2. Here Δ = φ − θ; the paper's Eq. 1 defines the opposite sign, for which its Eq. 2 has the wrong sign.
With means over the group:

    δ' ← α·δ − β·mean(Δ) + γ·(mean(φ) − φ);   φ' ← φ + δ'

The step works in place with NumPy, in pieces that fit the cache, with one rounding per operation, as in pier.py.

The pairs of a round are a pure function that every site computes for itself: members are sorted by a hash, and
neighbors meet. A hash is the same in every version of every library, which a random stream is not, and two sites must
never disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from pier_node.base.shared import Vector
from pier_node.config.run import NolocoSection

PIECE = 1 << 15
"""Elements worked on at a time: 128 KiB of each vector."""


def needs_anchors(rates: NolocoSection) -> bool:
    """Whether the step of a pair needs mean(φ): with γ = β it cancels out, and only θ has to be sent."""
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
    """One member's φ' and δ' after a round of its group, each of shape [parameters].

    Args:
        anchor: this member's own φ; `momentum`: its own δ, which is never sent.
        mean_weights: mean of θ over the group, this member included; its own θ if it is alone.
        mean_anchor: mean of φ over the group; None if it is not needed, because γ = β or the member is alone.
        anchor_out: must not overlap any input, and neither must `momentum_out`.
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


def epoch_of(nodes: Iterable[str]) -> bytes:
    """The name of a set of members: pairs are drawn again whenever the set changes."""
    return hashlib.sha256("\n".join(sorted(nodes)).encode()).digest()


def groups(seed: int, round: int, nodes: Iterable[str], size: int = PAIR) -> list[tuple[str, ...]]:
    """All members in groups of `size`, each sorted by node id; members left over are in groups of one."""
    members = sorted(set(nodes))
    draw = f"{seed} {round} {epoch_of(members).hex()}"
    drawn = sorted(members, key=lambda node: (_hash(f"{draw} {node}"), node))
    whole = len(drawn) - len(drawn) % size
    together = [tuple(sorted(drawn[start : start + size])) for start in range(0, whole, size)]
    return together + [(node,) for node in drawn[whole:]]


def partner(seed: int, round: int, nodes: Sequence[str], node: str) -> str | None:
    """The member that a member meets in this round; None if it is left over."""
    group = next(group for group in groups(seed, round, nodes) if node in group)
    return next((other for other in group if other != node), None)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
