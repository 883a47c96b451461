"""The disk under a site: real files, whose durable writes fail, are cut off or get lost as a schedule says.

What reaches the disk is decided at `os.fsync`, which every durable write of Pier ends with: before it returns, what was
written, or renamed, may be there in whole, in part or not at all.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL, FAILING = "full", "failing"


class PowerCut(asyncio.CancelledError):
    """This process is no more."""


class Disk:
    """One process's view of its disk.

    Attributes:
        full: "": it takes writes; FULL: it takes no new bytes; FAILING: nothing gets durable.
        cut_in: durable writes until the power goes; 0: it does not.
        how: "lost", "torn" or "done": what becomes of the write in which it goes.
    """

    def __init__(self, folder: Path, full: str) -> None:
        self.folder, self.full, self.was_full = folder, full, bool(full)
        self.gone = False
        self.cut_in, self.how, self.told = 0, "", ""
        self.on_cut: Callable[[], None] = lambda: None
        self._renamed: tuple[Path, Path, bytes | None] | None = None
        self._durable: dict[Path, int] = {}

    def appends(self, path: Path) -> None:
        """A file is added to: what is in it already is durable."""
        self._durable[path] = path.stat().st_size if path.exists() else 0

    def writes(self) -> None:
        """Bytes are written. Raises OSError, PowerCut."""
        if self.gone:
            raise PowerCut
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def renames(self, source: Path, target: Path) -> None:
        """A name is changed, which is not durable yet."""
        if self.gone:
            raise PowerCut
        before = target.read_bytes() if target.is_file() else None
        self._renamed = (source, target, before)

    def syncs(self, descriptor: int, sync: Callable[[int], None]) -> None:
        """What was written gets durable. Raises OSError, PowerCut."""
        if self.gone:
            raise PowerCut
        if self.full:
            number = errno.EIO if self.full == FAILING else errno.ENOSPC
            raise OSError(number, os.strerror(number))
        if self.cut_in == 1:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self._cut(path)
            raise PowerCut
        self.cut_in = max(0, self.cut_in - 1)
        if self._renamed and os.path.isdir(f"/proc/self/fd/{descriptor}"):
            self._renamed = None

    def _cut(self, path: Path) -> None:
        self.cut_in, self.told = 0, f"{path.relative_to(self.folder)} {self.how}"
        if path.is_dir():
            if self.how != "done" and self._renamed:
                self._undo(*self._renamed)
        elif self.how != "done":
            kept, size = self._durable.get(path, 0), path.stat().st_size
            os.truncate(path, kept if self.how == "lost" else (kept + size) // 2)
        self.on_cut()

    @staticmethod
    def _undo(source: Path, target: Path, before: bytes | None) -> None:
        if target.exists():
            target.rename(source)
        if before is not None:
            target.write_bytes(before)


@contextmanager
def under(current: Callable[[], Disk | None]) -> Iterator[None]:
    """Have this process's files obey the disk that `current` names."""
    fsync, replace, rename = os.fsync, os.replace, os.rename
    write_bytes, open_path, mkdir = Path.write_bytes, Path.open, Path.mkdir

    def syncing(descriptor: int) -> None:
        if disk := current():
            disk.syncs(descriptor, fsync)

    def moving(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any, **named: Any) -> None:
            if disk := current():
                disk.renames(Path(source), Path(target))
            move(source, target, **named)

        return moved

    def writing(path: Path, data: bytes) -> int:
        if disk := current():
            disk.writes()
        return write_bytes(path, data)

    def opening(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if ("w" in mode or "a" in mode) and (disk := current()):
            disk.writes()
            if "a" in mode:
                disk.appends(path)
        return open_path(path, mode, *rest, **named)

    def making(path: Path, *rest: Any, **named: Any) -> None:
        if (disk := current()) and not path.exists():
            disk.writes()
        mkdir(path, *rest, **named)

    patches: list[tuple[Any, str, Any, Any]] = [
        (os, "fsync", syncing, fsync),
        (os, "replace", moving(replace), replace),
        (os, "rename", moving(rename), rename),
        (Path, "write_bytes", writing, write_bytes),
        (Path, "open", opening, open_path),
        (Path, "mkdir", making, mkdir),
    ]
    for owner, name, double, _ in patches:
        setattr(owner, name, double)
    try:
        yield
    finally:
        for owner, name, _, original in patches:
            setattr(owner, name, original)
