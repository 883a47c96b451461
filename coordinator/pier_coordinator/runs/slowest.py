"""Finds the slowest site of some rounds and says in words why it was slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pier_coordinator.runs.timings import PARTS, Segment
from pier_node.base.units import rate, several

MARGIN = 1.1
"""A site is slow if it is busy at least this many times as long per round as the others."""


NOTABLE = 0.2
"""If the exchange takes at least this fraction of the time, the text names the thinnest uplink."""


@dataclass(frozen=True)
class Slow:
    """A site that others waited for.

    Attributes:
        wins: number of rounds in which it was busy longest.
        rounds: number of rounds compared.
        busy: its mean busy time per round, in seconds.
        others: that of the other sites, in seconds.
        cause: the part of a round in which it exceeds the others most.
    """

    node: str
    wins: int
    rounds: int
    busy: float
    others: float
    cause: str


def shares(segments: Sequence[Segment]) -> dict[str, float]:
    """The fraction of the time that each part took; empty if no time has passed."""
    total = sum(segment.duration for segment in segments)
    return {part: sum(getattr(segment, part) for segment in segments) / total for part in PARTS} if total else {}


def slowest(by_node: Mapping[str, Sequence[Segment]]) -> Slow | None:
    """The site that was busy longest in at least half of the rounds; None if all take about the same time."""
    rounds: dict[float, dict[str, float]] = defaultdict(dict)
    for node, segments in by_node.items():
        for segment in segments:
            rounds[segment.round][node] = segment.busy
    shared = [busy for busy in rounds.values() if len(busy) > 1]
    if not shared:
        return None
    node, wins = Counter(max(busy, key=busy.__getitem__) for busy in shared).most_common(1)[0]
    own, others = _means(by_node[node]), _means([it for key, rows in by_node.items() if key != node for it in rows])
    busy, rest = (sum(means.values()) - means["waiting"] for means in (own, others))
    if wins * 2 < len(shared) or busy < MARGIN * rest or busy == 0:
        return None
    cause = max(("compute", "exchange", "retry"), key=lambda part: own[part] - others[part])
    return Slow(node, wins, len(shared), busy, rest, cause)


def _means(segments: Sequence[Segment]) -> dict[str, float]:
    return {part: sum(getattr(segment, part) for segment in segments) / len(segments) for part in PARTS}


def in_words(
    by_node: Mapping[str, Sequence[Segment]], names: Mapping[str, str], uplinks: Mapping[str, float | None]
) -> str:
    """A few sentences on these rounds; uplinks are in bytes per second."""
    everything = [segment for segments in by_node.values() for segment in segments]
    spent = shares(everything)
    if not spent:
        return "No rounds yet."
    parts = ", ".join(f"{100 * spent[part]:.0f} % {part}" for part in PARTS if spent[part] >= 0.005)
    return f"{_who(slowest(by_node), names)} Time went to: {parts}.{_line(spent, names, uplinks)}"


def _line(spent: Mapping[str, float], names: Mapping[str, str], uplinks: Mapping[str, float | None]) -> str:
    known = {node: uplink for node, uplink in uplinks.items() if uplink}
    if spent["exchange"] < NOTABLE or len(known) < 2:
        return ""
    node = min(known, key=known.__getitem__)
    return f" The thinnest uplink is that of {names.get(node, node)}: {rate(known[node])}."


def _who(slow: Slow | None, names: Mapping[str, str]) -> str:
    if slow is None:
        return "No site held the others up."
    name = names.get(slow.node, slow.node)
    return (
        f"{name} was slowest in {slow.wins} of {several(slow.rounds, 'round')}: {slow.busy:.3g} s busy a round, "
        f"the others {slow.others:.3g} s; most of the difference is {slow.cause}."
    )
