"""What a site remembers of its pairs: with whom it took a round's step, and which of its votes it had no answer to.

Pure. The journal keeps it on the disk (journal.py); docs/noloco.md says when it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

KEPT = 64
"""Pairs, and doubts, that are remembered: whoever asks for an older one learns that it came to nothing."""


@dataclass(frozen=True)
class Doubt:
    """This site said yes to a pair's step, and does not know whether its decider took it.

    Attributes:
        meeting: name of the pair's meeting.
        digest: what it said yes to.
    """

    round: int
    decider: str
    meeting: bytes
    digest: bytes


@dataclass(frozen=True)
class Records:
    """By round: the partner that its step was taken with, and open doubts. A round in neither was taken alone."""

    partners: Mapping[int, str] = field(default_factory=dict)
    doubts: Mapping[int, Doubt] = field(default_factory=dict)

    def voted(self, doubt: Doubt) -> Records:
        """With a yes that has no answer yet."""
        return Records(self.partners, _newest({**self.doubts, doubt.round: doubt}))

    def took(self, round: int, partner: str) -> Records:
        """With a step that was taken with a partner; a doubt of that round is over."""
        return Records(_newest({**self.partners, round: partner}), self._without(round))

    def learnt(self, round: int) -> Records:
        """Without the doubt of a round, however it ended."""
        return Records(self.partners, self._without(round))

    def _without(self, round: int) -> dict[int, Doubt]:
        return {number: doubt for number, doubt in self.doubts.items() if number != round}


def _newest(by_round: dict[int, T]) -> dict[int, T]:
    return {number: by_round[number] for number in sorted(by_round)[-KEPT:]}
