"""A finding: one line of the doctor's table, with what to change if something is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

THIS_SITE = "this site"


class Verdict(Enum):
    """The judgement in one word."""

    OK = "ok"
    ADVICE = "advice"
    """The site can take part, but could do better."""
    PROBLEM = "PROBLEM"
    """The site cannot take part, or not for long, or wastes most of its time."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        site: THIS_SITE, or the name of a peer.
        check: what was checked.
        detail: what was found, with units.
        remedy: what to change, where, and to what.
        values: the same as numbers, for programs; names end in their units.
    """

    site: str
    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
