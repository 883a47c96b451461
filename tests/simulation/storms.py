"""How many storms a run of the tests goes through: PIER_STORMS=10 makes ten times as many, with other seeds."""

from __future__ import annotations

import os

BATCH = 20


def storms(count: int) -> int:
    """This many, times PIER_STORMS, in whole batches."""
    return max(1, round(count * float(os.environ.get("PIER_STORMS", "1")) / BATCH)) * BATCH
