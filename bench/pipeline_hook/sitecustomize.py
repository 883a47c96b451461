"""What bench/pipeline.py changes in the processes of `pier-node`: Python imports this as they start (PYTHONPATH).

A task of a microbatch is done, and then the rest of PIER_BENCH_FORWARD seconds is slept; a backward takes twice as
long, a loss a third.
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


def pace(kind: type[Stage], forward: float) -> None:
    """Let tasks take so long, if they take less."""

    def paced(task: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            over = time.monotonic() + seconds
            result = task(*args)
            time.sleep(max(0.0, over - time.monotonic()))
            return result

        return slow

    for name, times in TIMES.items():
        setattr(kind, name, paced(getattr(kind, name), forward * times))


if "PIER_BENCH_FORWARD" in os.environ and any(word.endswith("pier-node") for word in sys.orig_argv):
    from pier_node.pipeline.stage import Stage as OfSite

    pace(OfSite, float(os.environ["PIER_BENCH_FORWARD"]))
