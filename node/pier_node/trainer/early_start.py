"""Pier's own trainer, started before its daemon knows the run: it loads PyTorch while the daemon loads and joins.

A site that was killed trains again half a second earlier. This module imports little: nothing must be loaded before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pier_node.engine.training_process import Child


def words(workers: int) -> tuple[str, ...]:
    """The command of the trainer. `workers` is their number; 0: one per device."""
    return sys.executable, "-m", "pier_node.trainer.worker", "--workers", str(workers)


def log_file(folder: Path) -> Path:
    """Where the workers of a site with this data folder write."""
    return folder / "logs" / "workers.log"


def start_early(folder: Path, workers: int) -> Child | None:
    """Start the trainer for the run in a data folder; None: there is no run yet, or none with Pier's own trainer."""
    try:
        run = json.loads((folder / "run.json").read_bytes())
        if run.get("program") or run.get("pipeline", {}).get("stages", 1) > 1:
            return None
        return Child(words(workers), log_file(folder), None)
    except (OSError, ValueError, TypeError, AttributeError):  # the daemon will say what is wrong
        return None
