"""What bench/boundary.py measures in the processes of `pier-node`: Python imports this as they start (PYTHONPATH).

Each call of what takes time at a boundary adds a line of JSON to PIER_BENCH_PARTS: its part, when it began, and how
long it took, in seconds of the monotonic clock. Names that a checkout does not have are left out.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

FILE = os.environ.get("PIER_BENCH_PARTS", "")
WORKER = {
    "step": "pier_node.trainer.replica:Replica.train",
    "load weights": "pier_node.trainer.replica:Replica.load_weights",
    "load moments": "pier_node.trainer.replica:Replica.load_moments",
    "publish weights": "pier_node.trainer.replica:Replica.store_weights",
    "publish moments": "pier_node.trainer.replica:Replica.store_moments",
}
DAEMON = {
    "learn": "pier_node.site.error_feedback:UnsentUpdate.learn",
    "update and its norms": "pier_node.site.training:Training._update",
    "exchange": "pier_node.rounds.reduce:Reduction.run",
    "outer step": "pier_node.site.training:advance",
    "digest, finite": "pier_node.rounds.attempt:check_finite",
    "promise": "pier_node.rounds.commitments:Promises.promise",
    "vote": "pier_node.rounds.commitments:Promises.cast",
    "state to disk": "pier_node.rounds.state_store:StateStore.keep",
    "forget what is sent": "pier_node.site.training:Training._carry",
    "checkpoint to disk": "pier_node.rounds.state_store:StateStore.save",
}


def told(part: str, began: float) -> None:
    """Write how long a part took."""
    line = json.dumps({"part": part, "began": began, "seconds": time.monotonic() - began})
    with open(FILE, "a") as file:
        file.write(line + "\n")


def await_gpu() -> None:
    """Return when the GPU, if this process uses one, has done what it was given."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(part: str, function: Any) -> Any:
    """The function, which tells its time."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*given, **named)
        finally:
            await_gpu()
            told(part, began)

    @functools.wraps(function)
    async def wait(*given: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return await function(*given, **named)
        finally:
            told(part, began)

    return wait if inspect.iscoroutinefunction(function) else call


def measure(parts: dict[str, str]) -> None:
    """Put watches on these functions."""
    for part, where in parts.items():
        module, _, path = where.partition(":")
        try:
            owner: Any = import_module(module)
        except ImportError:
            continue
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each, None)
        if function := vars(owner).get(name) if owner else None:
            setattr(owner, name, timed(part, function))


if FILE and sys.orig_argv[1:3] == ["-m", "pier_node.trainer.worker"]:
    measure(WORKER)
elif FILE and sys.orig_argv[1:4] == ["-m", "pier_node.cli", "start"]:
    measure(DAEMON)
