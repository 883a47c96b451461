"""`pier-coordinator init`: creates the folder of a run."""

from __future__ import annotations

import re
from pathlib import Path

from pier_coordinator.identity.home import RUN_FILE, Home
from pier_node.base.errors import PierError
from pier_node.commands.init import init as write_run


def init(folder: Path, preset: str) -> str:
    """Create the folder; return what to do next. Raises PierError, also if it already holds a run."""
    if (folder / RUN_FILE).exists():
        raise PierError(
            f"{folder} has a run already: {folder / RUN_FILE} exists",
            f"Start it with `pier-coordinator start {folder}`, or give another folder.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder / RUN_FILE, preset, force=False, name=run_name(folder))
    home = Home(folder)
    _ = home.identity, home.operator
    return (
        f"{folder / RUN_FILE} says what the run trains: look through it, it cannot be changed later.\n"
        f"Then start the coordinator:\n\n  pier-coordinator start {folder}\n"
    )


def run_name(folder: Path) -> str:
    """The name of a run: that of its folder, without what a run's name must not contain; "": nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-")[:64]
