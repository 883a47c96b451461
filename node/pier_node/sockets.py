"""Folders for Unix sockets: in /tmp, for a socket's path has 107 bytes at most, and for this user alone.

Each has a file that is locked for as long as its process lives. Whoever makes one removes those without: their
processes were killed, and could not.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

TEMPORARY = Path("/tmp")
LOCK = "lock"


class SocketFolder:
    """A new one, of this process.

    Args:
        kind: what is in it, for its name.
    """

    def __init__(self, kind: str) -> None:
        _tidy_up()
        self.path = Path(tempfile.mkdtemp(prefix=f"pier-{kind}-", dir=TEMPORARY))
        making = self.path / "making"
        self._lock = making.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        making.rename(self.path / LOCK)  # locked before anybody can see it

    def remove(self) -> None:
        """Remove it and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)  # of another tidy-up, perhaps
        self._lock.close()


def _tidy_up() -> None:
    for lock in TEMPORARY.glob(f"pier-*/{LOCK}"):
        with suppress(OSError), lock.open("rb") as file:  # in use; or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
