"""The daemon of a data folder as other processes of this machine find it: through daemon.json, and its status page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from pier_node.errors import PierError
from pier_node.site import DAEMON_FILE

Status = dict[str, Any]

ANSWER = 5.0
"""Seconds that a daemon may take to answer."""
CLOCK_STEP = 2.0
"""Seconds by which the time of a file and the start of a process may be off to each other."""

# A proxy set for the web knows no way to this machine's own pages.
_opener = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Running:
    """A daemon: its folder, its process, the address of its status page."""

    folder: Path
    pid: int
    http: str

    def status(self) -> Status:
        """What it says of itself, see report.py. Raises PierError when it does not."""
        try:
            with _opener.open(f"{self.http}/status", timeout=ANSWER) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError) as error:
            raise PierError(
                f"the daemon of {self.folder} (process {self.pid}) does not answer at {self.http}: {error}",
                f"It may be busy or just stopping: try again. `pier-node stop --data {self.folder}` ends it.",
            ) from error


def find_daemon(folder: Path) -> Running | None:
    """The daemon that runs on a folder; None: none does, though one that died may have left its daemon.json."""
    path = folder / DAEMON_FILE
    try:
        fields, written = json.loads(path.read_bytes()), path.stat().st_mtime
        running = Running(folder, int(fields["pid"]), str(fields["http"]))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PierError(f"{path}: {error.strerror}", "Ask as the user that owns the --data folder.") from error
    except (ValueError, KeyError, TypeError):
        return None
    return running if _is_daemon(running.pid, written) else None


def _is_daemon(pid: int, written: float) -> bool:
    """Whether a process is the one that wrote daemon.json: process ids are used again after their process died."""
    try:
        process = psutil.Process(pid)
        words = " ".join(process.cmdline())
        began, over = process.create_time(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    return not over and began <= written + CLOCK_STEP and ("pier-node" in words or "pier_node" in words)
