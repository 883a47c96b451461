"""The folder of a demo: marked as such, so that no other folder is ever emptied, and locked for one demo at a time."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pier_node.base.errors import PierError

MARK = ".pier-demo"
ELSEWHERE = "Choose another folder with --folder."


@contextmanager
def claimed(folder: Path, keep: bool) -> Iterator[Path]:
    """Lock a demo's folder for this process; it is empty, or with `keep` as the last demo left it.

    Raises:
        PierError: it is not a demo's folder, another demo uses it, or it cannot be written.
    """
    try:
        mark = _claim(folder)
    except OSError as error:
        raise PierError(f"{folder}: a demo cannot work there: {error.strerror}", ELSEWHERE) from error
    with mark:
        if not keep:
            _empty(folder)
        yield folder.resolve()


def _claim(folder: Path) -> IO[str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / MARK).exists() and any(folder.iterdir()):
        raise PierError(f"{folder} holds something else than a demo, and a demo begins by emptying it", ELSEWHERE)
    mark = (folder / MARK).open("w")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        mark.close()
        raise PierError(f"another demo is at work in {folder}", ELSEWHERE) from error
    return mark


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()
