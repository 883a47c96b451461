"""`pier-node init`: writes a run.toml to begin with."""

from __future__ import annotations

from pathlib import Path

from pier_node.base.toml import write_new
from pier_node.config.commented import run_toml


def init(path: Path, preset: str, force: bool, name: str = "") -> str:
    """Write the file for a run called `name`. Returns the message for the user.

    Raises:
        PierError: it exists (without `force`), or cannot be written.
    """
    write_new(path, run_toml(preset, name), force)
    return (
        f"Wrote {path}: every setting of a run, with its meaning.\n"
        "Say in it how many sites there are ([run] sites), then found the run at the first of them:\n\n"
        f"  pier-node start --run {path}\n"
    )
