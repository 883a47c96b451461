"""Reads the fields of facts and pulses: they come from sites and from files, so nothing is believed about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST = 500
"""Characters of a text that are kept."""

MOST = 2.0**63
"""Greatest number that is believed."""


def number(body: Mapping[str, Any], key: str) -> float | None:
    """A finite number; None when there is none."""
    value: Any = body.get(key)
    if type(value) not in (float, int) or not -MOST < value < MOST:  # NaN is not between them
        return None
    return float(value)


def whole(body: Mapping[str, Any], key: str) -> int | None:
    """A number that counts something; None when there is none."""
    value = number(body, key)
    return int(value) if value is not None and value >= 0 else None


def amount(body: Mapping[str, Any], key: str) -> float:
    """A number that is never negative; 0 when it is not known."""
    return max(0.0, number(body, key) or 0.0)


def text(body: Mapping[str, Any], key: str) -> str:
    """A text, cut where it is too long, without control characters; "" when there is none."""
    value = body.get(key)
    return "".join(it if it.isprintable() else " " for it in value[:LONGEST]) if isinstance(value, str) else ""
