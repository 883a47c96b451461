"""What bench/goodput.py changes in the processes of `pier-node`: Python imports this as they start (PYTHONPATH).

In a worker, which is forked from the launcher, an inner step takes PIER_BENCH_PACE seconds: it is trained, and the rest
is slept. With PIER_BENCH_WAITS=1 a daemon takes no round without all sites, as the first exchange of a run: that is the
peer which waits for everybody.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from select import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each process imports what it would import anyway, and no more
    from torch import Tensor

    from pier_node.config.run import RunConfig
    from pier_node.outer.schedule import RoundPlan
    from pier_node.trainer.data.corpus import Batch
    from pier_node.trainer.data.prefetch import Rows
    from pier_node.trainer.replica import Replica


def pace(kind: type[Replica], seconds: float) -> None:
    """Let an inner step take so long, if it takes less."""
    train = kind.train

    def paced(self: Replica, step: int, rows: Rows | Batch, sequences: int) -> Tensor:
        over = time.monotonic() + seconds
        loss = train(self, step, rows, sequences)
        select([], [], [], max(0.0, over - time.monotonic()))  # time.sleep fails under libfaketime: bench/chaos.py
        return loss

    kind.train = paced  # type: ignore[method-assign]


def wait_for_all() -> None:
    """Let every round need as many members as the first exchange."""
    from pier_node.outer.schedule import round_plan
    from pier_node.site import training

    def patient(config: RunConfig, number: int) -> RoundPlan:
        return replace(round_plan(config, number), sites=config.run.sites)

    vars(training)["round_plan"] = patient


if sys.orig_argv[1:3] == ["-m", "pier_node.trainer.worker"]:
    from pier_node.trainer.replica import Replica as OfWorker

    pace(OfWorker, float(os.environ["PIER_BENCH_PACE"]))
elif os.environ.get("PIER_BENCH_WAITS") == "1" and any(word.endswith("pier-node") for word in sys.orig_argv):
    wait_for_all()
