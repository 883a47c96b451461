"""A data folder whose site has no round behind it: as long as that is so, a command may name another run for it.

A founder finds mistakes of run.toml in its first minutes, and must be able to correct them without a new folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pier_node.config import load
from pier_node.convicted import CONVICTED_FILE
from pier_node.coordination.enrolment import Enrolment
from pier_node.identity import Token
from pier_node.journal import Journal
from pier_node.proofs import EARLIER_FILE, PROOFS_FILE
from pier_node.revocations import FILE as REVOKED_FILE
from pier_node.settings import Settings
from pier_node.site import EVENTS_FILE, RUN_FILE, SITE_FILE, load_run

STATES = ("checkpoints", "states")
JOURNAL = "journal.json"


def is_replaced(settings: Settings) -> bool:
    """Whether the run of the folder gives way to the one that the command names. Raises PierError."""
    folder, stored = settings.folder, load_run(settings.folder)
    if stored is None or settings.coordinator or Enrolment.load(folder) or took_part(folder):
        return False
    if settings.run:
        return load(settings.run).hash() != stored.hash()
    return bool(settings.peers and settings.token) and not Token.parse(settings.token or "").is_for(stored.hash())


def took_part(folder: Path) -> bool:
    """Whether a site has a round behind it, or has told others anything that binds it in one."""
    names = [path.name for kind in STATES for path in folder.glob(f"{kind}/*round-*")]
    if any(int(name.rpartition("round-")[2][:8]) for name in names):
        return True
    bound = Journal(folder / JOURNAL).load(0, "")
    return bound.committed > 0 or bound.engaged or (folder / "pairs.json").exists() or any(folder.glob("own/*"))


def forget_run(folder: Path) -> None:
    """Have such a folder belong to no run. Its node id stays."""
    for name in (SITE_FILE, EVENTS_FILE, REVOKED_FILE, JOURNAL, PROOFS_FILE, EARLIER_FILE, CONVICTED_FILE):
        (folder / name).unlink(missing_ok=True)
    Token.path(folder).unlink(missing_ok=True)
    for path in [path for kind in STATES for path in folder.glob(f"{kind}/*")]:  # the folder may be a disk of its own
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / RUN_FILE).unlink(missing_ok=True)  # last: whoever is interrupted begins again
