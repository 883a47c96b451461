"""What a data folder tells of its site while no daemon runs there."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

from pier_node.site import EVENTS_FILE, load_run

TAIL = 1 << 16
"""Bytes at the end of events.jsonl that hold its last line for sure."""


def on_disk(folder: Path) -> dict[str, Any]:
    """The run, the newest checkpoint and the command to go on, as far as there are any. Raises PierError.

    Keys: `data`, `command`; `run`, `run_hash`, `rounds` if the folder belongs to a run; `round`, `digest`,
    `inner_step`, `tokens`, `age_seconds` if it holds a checkpoint.
    """
    found: dict[str, Any] = {"data": str(folder), "command": start_command(folder)}
    config = load_run(folder)
    if config is None:
        return {**found, "command": "pier-node start --run run.toml"}
    from pier_node.checkpoint import CheckpointStore
    from pier_node.outer.schedule import total_rounds

    found |= {"run": config.run.name, "run_hash": config.hash().hex(), "rounds": total_rounds(config)}
    newest = CheckpointStore(folder / "checkpoints", config.hash()).peek()
    if newest is None:
        return found
    path, record = newest
    kept = {key: record[key] for key in ("round", "digest", "inner_step", "tokens")}
    return {**found, **kept, "age_seconds": max(0.0, time.time() - path.stat().st_mtime)}


def last_event(folder: Path) -> dict[str, Any]:
    """The status that the last committed round left in events.jsonl; {} if there is none."""
    path = folder / EVENTS_FILE
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        whole = file.read().rpartition(b"\n")[0]  # a daemon may be writing the next line
    return dict(json.loads(whole.rpartition(b"\n")[2])) if whole else {}


def start_command(folder: Path) -> str:
    """The command that goes on with a folder's run."""
    return f"pier-node start --data {shlex.quote(str(folder))}"
