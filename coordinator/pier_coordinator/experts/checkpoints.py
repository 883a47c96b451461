"""Checkpoints of experts in training, on the coordinator's disk: each job's latest, so another site can continue it.

A file's name holds all that is known about it. A file gets this name only once it is complete and checked, so kill -9
leaves either it or the one before it, and a part of it that its site completes later. Files of other plans and of
chains that are done are deleted.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pier_coordinator.store.inbox import Inbox
from pier_coordinator.store.sites import Refused
from pier_node.base import durable
from pier_node.experts.resume import Kept, check, most_bytes
from pier_node.wire.files import PART, pieces_of, size_and_digest
from pier_proto.v1.coordinator_pb2 import CheckpointPart, ExpertCheckpoint

FOLDER = "checkpoints"
NAME = re.compile(r"([0-9]{1,3})-([0-9]{1,10})-([0-9a-f]{64})[.]safetensors")
PARTIAL = re.compile(rf"[0-9a-f]+-[0-9a-f]{{64}}{re.escape(PART)}")
"""Name of a checkpoint that has arrived in part: see Inbox."""


class Checkpoints:
    """The checkpoints of the plan with this id, in the run's folder."""

    def __init__(self, folder: Path, plan: str) -> None:
        self._all = folder / FOLDER
        self._folder = self._all / plan
        self.inbox = Inbox(self._folder, "checkpoint")
        self._kept: dict[int, Kept] = {}
        for path in self._folder.glob("*"):
            self._take_in(path)

    def of(self, job: int) -> Kept | None:
        """The checkpoint of a job; None: there is none."""
        return self._kept.get(job)

    def step(self, job: int) -> int:
        """The step after which a job's checkpoint was made; 0: there is none."""
        return kept.step if (kept := self.of(job)) else 0

    def start_of(self, jobs: Iterable[int]) -> str:
        """In words, where training continues: at the checkpoint of the first of these jobs that has one."""
        step = next(filter(None, map(self.step, jobs)), 0)
        return f"from its checkpoint at step {step}" if step else "from the start"

    async def take(
        self,
        node: str,
        kept: Kept,
        length: int,
        parts: AsyncIterator[CheckpointPart],
        wanted: Callable[[], bool],
        offset: int = 0,
    ) -> None:
        """Receive a checkpoint from a site and keep it.

        Args:
            kept: what the site says the checkpoint is.
            length: number of parameters of the model.
            wanted: returns whether it is still needed.
            offset: bytes of it that are here already; the parts are what follows.

        Raises:
            Refused: it is not what the site says, it is invalid, or one that is as late is kept already.
        """
        if kept.step <= self.step(kept.job):
            raise Refused(f"a checkpoint after step {self.step(kept.job)} of that expert is kept")
        if kept.size > most_bytes(length):
            raise Refused(f"a checkpoint of {kept.size} bytes: one of that expert has {most_bytes(length)} at most")
        pieces = (part.piece async for part in parts)
        try:
            async with self.inbox.receive(node, kept.size, kept.digest, pieces, offset, kept.deadline) as path:
                await asyncio.to_thread(check, path, length, kept.step)
                if not wanted() or kept.step <= self.step(kept.job):
                    raise Refused("that checkpoint is not needed any more")
                await asyncio.to_thread(self._put, path, kept)
        except ValueError as error:
            raise Refused(f"not a checkpoint of that expert: {error}") from error

    async def parts(self, job: int, digest: str = "", offset: int = 0) -> AsyncIterator[CheckpointPart]:
        """Yield a job's checkpoint in parts.

        Args:
            digest, offset: the site has this many bytes of the checkpoint with this digest, and does not get them again
                if that is still the checkpoint.

        Raises:
            Refused: there is none, or it is damaged.
        """
        kept = self.of(job)
        if kept is None:
            raise Refused("no checkpoint of that expert is kept")
        try:
            file = self._path(kept).open("rb")
        except OSError as error:
            raise self._drop_unusable(kept, error.strerror or "") from error
        with file:  # the open file stays readable if a later one replaces it
            if (await size_and_digest(file))[1].hex() != kept.digest:
                raise self._drop_unusable(kept, "it is damaged")
            start = offset if digest == kept.digest and offset <= kept.size else 0
            yield CheckpointPart(checkpoint=ExpertCheckpoint(**kept.model_dump()), offset=start)
            async for piece in pieces_of(file, start):
                yield CheckpointPart(piece=piece)

    def drop(self, job: int) -> None:
        """Delete the checkpoint of a job."""
        if kept := self._kept.pop(job, None):
            _delete(self._path(kept))

    def clear(self) -> None:
        """Delete all checkpoints of all plans; blocks."""
        self._kept.clear()
        shutil.rmtree(self._all, ignore_errors=True)

    def _take_in(self, path: Path) -> None:
        """Take in a file left from an earlier start; of two for one job, keep the later."""
        if PARTIAL.fullmatch(path.name):
            return
        found = NAME.fullmatch(path.name)
        with suppress(ValueError, OSError):
            number, step, digest = found.groups() if found else ("", "", "")
            kept = Kept(job=int(number), step=int(step), size=path.stat().st_size, digest=digest)
            if kept.step > self.step(kept.job):
                self.drop(kept.job)
                self._kept[kept.job] = kept
                return
        _delete(path)

    def _put(self, part: Path, kept: Kept) -> None:
        """Replace the job's previous checkpoint by this one."""
        durable.put(part, self._path(kept))
        self.drop(kept.job)
        self._kept[kept.job] = kept

    def _drop_unusable(self, kept: Kept, why: str) -> Refused:
        if self.of(kept.job) == kept:
            self.drop(kept.job)
        return Refused(f"the checkpoint after step {kept.step} is lost: {why}")

    def _path(self, kept: Kept) -> Path:
        return self._folder / f"{kept.job}-{kept.step}-{kept.digest}.safetensors"


def _delete(path: Path) -> None:
    with suppress(OSError):  # what cannot be deleted now is deleted with its plan
        path.unlink()
