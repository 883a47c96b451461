"""`pier-coordinator init`: a folder for a run."""

from __future__ import annotations

import re
from pathlib import Path

from pier_coordinator.identity.home import RUN_FILE, Home
from pier_node.base.errors import PierError
from pier_node.commands.init import init as write_run


def init(folder: Path, preset: str) -> str:
    """Make it; returns what to do next. Raises PierError, also when there is a run in it already."""
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
    """What the run of a folder is called: as the folder, as far as a run's name may be; "": not at all."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-")[:64]
