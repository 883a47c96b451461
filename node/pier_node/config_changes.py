"""What is not the same in two configurations of a run, key by key: for who changed run.toml and did not mean to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MOST = 3
"""Keys that are named; who has changed more knows that it is another file."""
_ABSENT = object()


def config_changes(before: str, now: str) -> str:
    """Keys with both values, of two configurations as RunConfig.canonical writes them.

    One may be of another version of Pier, which has other keys.
    """
    found = list(_changes("", json.loads(before), json.loads(now)))
    more = f", and {len(found) - MOST} more" if len(found) > MOST else ""
    return ", ".join(found[:MOST]) + more


def _changes(key: str, before: Any, now: Any) -> Iterator[str]:
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from _changes(f"{key}.{name}" if key else name, before.get(name, _ABSENT), now.get(name, _ABSENT))
    else:
        yield f"{key} was {_shown(before)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    return "not there" if value is _ABSENT else json.dumps(value)
