"""What bench/pipeline.py changes in the processes of `pier-node`: Python imports this as they start (PYTHONPATH).

A task of a microbatch is done, and then the rest of PIER_BENCH_FORWARD seconds is slept; a backward takes twice as
long, a loss a third. Only one in PIER_BENCH_PART of its sequences is computed, and their results stand for the others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pier_node.pipeline.stage import Stage

TIMES = {"embed": 1.0, "forward": 1.0, "loss": 1 / 3, "backward": 2.0}


def pace(kind: type[Stage], forward: float, part: int = 1) -> None:
    """Let tasks take so long, if they take less; only one in `part` of a microbatch's sequences is really computed."""

    def paced(task: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(stage: Stage, microbatch: int, *tensors: Any) -> Any:
            over = time.monotonic() + seconds
            result = task(stage, microbatch, *(it[: len(it) // part] for it in tensors))
            if part > 1:
                result = (result[0], result[1].repeat(part, 1, 1)) if isinstance(result, tuple) else _like(result, part)
            time.sleep(max(0.0, over - time.monotonic()))
            return result

        return slow

    for name, times in TIMES.items():
        setattr(kind, name, paced(getattr(kind, name), forward * times))


def _like(result: Any, part: int) -> Any:
    return None if result is None else result.repeat(part, 1, 1)


if "PIER_BENCH_FORWARD" in os.environ and any(word.endswith("pier-node") for word in sys.orig_argv):
    from pier_node.pipeline.stage import Stage as OfSite

    pace(OfSite, float(os.environ["PIER_BENCH_FORWARD"]), int(os.environ["PIER_BENCH_PART"]))
