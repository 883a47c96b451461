"""How other processes on this machine see a site: its running daemon, or its data folder while no daemon runs.

A running daemon is found through daemon.json in its data folder, and asked through its status page.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from pier_node.base.errors import PierError
from pier_node.base.processes import ticks_of
from pier_node.config.presets import RUN_TOML
from pier_node.rounds.folder import DAEMON_FILE, EVENTS_FILE, SiteRecord, load_run, read_events

Status = dict[str, Any]

ANSWER = 5.0
"""Timeout of a request to a daemon, in seconds."""
CLOCK_STEP = 2.0
"""Largest difference in seconds between a file's time and the start of the process that wrote it."""

# A proxy configured for the web cannot reach this machine's own pages.
_opener = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Running:
    """A daemon: its folder, its process id and the address of its status page."""

    folder: Path
    pid: int
    http: str

    def status(self) -> Status:
        """The daemon's status; see report.py. Raises PierError when the daemon does not answer."""
        try:
            with _opener.open(f"{self.http}/status", timeout=ANSWER) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError, HTTPException) as error:
            raise PierError(
                f"the daemon of {self.folder} (process {self.pid}) does not answer at {self.http}: {error}",
                f"It may be busy or just stopping: try again. `pier-node stop --data {self.folder}` ends it.",
            ) from error


def find_daemon(folder: Path) -> Running | None:
    """The daemon that runs on a folder; None: none runs, though one that died may have left its daemon.json."""
    path = folder / DAEMON_FILE
    try:
        fields, written = json.loads(path.read_bytes()), path.stat().st_mtime
        running = Running(folder, int(fields["pid"]), str(fields["http"]))
        began = int(fields["began"]) if "began" in fields else None
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PierError(f"{path}: {error.strerror}", "Ask as the user that owns the --data folder.") from error
    except (ValueError, KeyError, TypeError):
        return None
    return running if _is_daemon(running.pid, written, began) else None


def _is_daemon(pid: int, written: float, began: int | None) -> bool:
    """Whether a process is the one that wrote daemon.json: process ids are reused.

    Args:
        written: when it was, in seconds since 1970.
        began: when that process began, see `ticks_of`; None: an earlier version did not write that down.
    """
    try:
        process = psutil.Process(pid)
        words = " ".join(process.cmdline())
        over = process.status() == psutil.STATUS_ZOMBIE
        same = process.create_time() <= written + CLOCK_STEP if began is None else ticks_of(pid) == began
    except (psutil.Error, OSError):
        return False
    return not over and same and ("pier-node" in words or "pier_node" in words)


TAIL = 1 << 16
"""Bytes at the end of events.jsonl that always contain its last line."""


def on_disk(folder: Path) -> dict[str, Any]:
    """The run, the newest checkpoint and the command to continue, if there are any. Raises PierError.

    Keys: `data`, `command`; `run`, `run_hash`, `rounds` if the folder belongs to a run; `round`, `digest`,
    `inner_step`, `tokens`, `age_seconds` if it holds a checkpoint.
    """
    found: dict[str, Any] = {"data": str(folder), "command": to_continue(folder)}
    config = load_run(folder)
    if config is None:
        return {**found, "command": f"{start_command(folder, None)} --run {RUN_TOML}"}
    from pier_node.outer.schedule import total_rounds
    from pier_node.rounds.state_store import CHECKPOINTS, StateStore

    found |= {"run": config.run.name, "run_hash": config.hash().hex(), "rounds": total_rounds(config)}
    newest = StateStore(folder / CHECKPOINTS, config.hash()).peek()
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
        return (read_events(file.read()) or [{}])[-1]


def to_continue(folder: Path) -> str:
    """What continues a folder's run. Raises PierError."""
    record = SiteRecord.load(folder)
    return start_command(folder, record.program if record else None)


def start_command(folder: Path, program: str | None) -> str:
    """What starts a site: a command, or words where its owner's program does it. `program`: see SiteRecord."""
    if program == "":
        return f"run your program again, with folder={str(folder)!r}"
    command = f"pier-node start --data {shlex.quote(str(folder))}"
    return f"{command} --exec {shlex.quote(program)}" if program else command
