"""Who meets whom in a NoLoCo round: a pure function that every site works out for itself (spec/noloco.md section 2.3).

Members are ordered by a hash and neighbours meet. A hash is the same in every version of every library, which a random
stream is not, and two sites must never disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
