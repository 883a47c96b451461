"""Copies of experts' checkpoints at the coordinator, so that another site can continue if this one is lost.

Training does not wait while a checkpoint is sent, and sending takes a small fraction of the time. The last checkpoint
of an expert is sent if another expert branches from it, so that a site that takes over a chain can continue in the
middle. A fetched checkpoint is used only if it matches its description and belongs to that expert; otherwise the expert
starts from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import aclosing
from io import BufferedReader
from pathlib import Path

from pier_node.base.patience import Backoff
from pier_node.base.tasks import cancel_and_wait
from pier_node.experts.job import ExpertJob
from pier_node.experts.resume import FILE, Kept, check, most_bytes
from pier_node.site.coordinator.client import CoordinatorClient
from pier_node.site.coordinator.expert_messages import kept as kept_of
from pier_node.site.coordinator.link import NoLease, Refused, Unreachable
from pier_node.wire.files import Arriving, size_and_digest
from pier_proto.v1.coordinator_pb2 import CheckpointPart

SHARE = 0.05
"""Largest fraction of the time spent on sending checkpoints, from the second one on."""
REFUSALS = 3
"""Refusals after which a last checkpoint is not retried: what the coordinator has of it may be damaged once."""
PATIENCE = 60.0
"""Seconds to wait for a coordinator that does not answer before an expert starts over needlessly; a transfer that makes
progress may be interrupted for as long again."""

log = logging.getLogger(__name__)


class ExpertCheckpoints:
    """The expert checkpoints of one site.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, line: CoordinatorClient, clock: Callable[[], float] = time.monotonic) -> None:
        self.line, self.clock = line, clock
        self._due = -float("inf")
        self._giving: asyncio.Task[None] | None = None
        self._last: list[asyncio.Task[None]] = []
        self._sends = False

    def of(self, plan: str, job: ExpertJob, kept: Kept | None, followed: bool) -> JobCheckpoints:
        """The checkpoints of a job; see JobCheckpoints."""
        return JobCheckpoints(self, plan, job, kept, followed)

    def give(self, plan: str, job: int, step: int, path: Path) -> None:
        """Send this checkpoint in the background, unless another is being sent or it is too soon."""
        if not self._sends and self._giving is None and self.clock() >= self._due:
            self._giving = asyncio.create_task(self._give_once(plan, job, step, path.open("rb")))

    def give_last(self, plan: str, job: int, step: int, path: Path) -> None:
        """Send this checkpoint in the background after earlier ones, and retry until the coordinator has answered."""
        self._last = [task for task in self._last if not task.done()]
        self._last.append(asyncio.create_task(self._give_until([*self._last], plan, job, step, path.open("rb"))))

    async def drop(self) -> None:
        """Cancel the checkpoint being sent, unless a last one waits for it."""
        if self._giving is not None and all(task.done() for task in self._last):
            await cancel_and_wait(self._giving)

    async def end(self) -> None:
        """Cancel everything."""
        await cancel_and_wait(*([self._giving] if self._giving else []), *self._last)

    async def _give_once(self, plan: str, job: int, step: int, file: BufferedReader) -> None:
        try:
            with file:  # the next checkpoint replaces the file name but not this open file
                await self._give(plan, job, step, file)
        finally:
            self._giving = None

    async def _give_until(
        self, before: Collection[asyncio.Task[None]], plan: str, job: int, step: int, file: BufferedReader
    ) -> None:
        backoff, refused = Backoff(first=1.0, last=60.0), 0
        with file:  # its folder may be deleted in the meantime
            while before := [*filter(None, (*(task for task in before if not task.done()), self._giving))]:
                await asyncio.wait(before)
            while problem := await self._give(plan, job, step, file):
                refused += isinstance(problem, Refused)
                if isinstance(problem, OSError) or refused >= REFUSALS:
                    return
                await asyncio.sleep(max(backoff.seconds(), self._due - self.clock()))
                while self._giving:
                    await asyncio.wait([self._giving])

    async def _give(self, plan: str, job: int, step: int, file: BufferedReader) -> Exception | None:
        """Send the checkpoint once. Returns why the coordinator has not taken it; None: it has."""
        began, self._sends = self.clock(), True
        try:
            size, digest = await size_and_digest(file)
            kept = Kept(job=job, step=step, size=size, digest=digest.hex())
            await self.line.give_checkpoint(plan, kept, file)
        except Refused as refused:
            log.warning("the coordinator does not keep a checkpoint at step %d: %s", step, refused)
            return refused
        except (NoLease, Unreachable, OSError) as problem:
            log.info("the coordinator does not get a checkpoint at step %d: %s", step, problem)
            return problem
        finally:
            now, self._sends = self.clock(), False
            self._due = now + (now - began) * (1 / SHARE - 1)
        return None


class JobCheckpoints:
    """The checkpoints of one job, as its trainer uses them (experts/trainer.py).

    Args:
        kept: the coordinator's.
        followed: whether another expert branches from this one.
    """

    def __init__(self, site: ExpertCheckpoints, plan: str, job: ExpertJob, kept: Kept | None, followed: bool) -> None:
        self._site, self._plan, self._job, self._kept, self._followed = site, plan, job, kept, followed

    async def fetched(self, folder: Path, name: str, length: int, own: int) -> bool:
        """Fetch the coordinator's checkpoint if it is later than this site's own.

        Returns whether it is now in the folder.

        Args:
            folder, name, length: of the expert: see ResumeState.load.
            own: step of this site's own checkpoint; 0: it has none.
        """
        if self._kept is None or self._kept.step <= own:
            return False
        called, arriving = f"the expert of {self._job.domain.name}", Arriving(folder, FILE)
        try:
            step, path = await self._patiently(self._kept, arriving, name, length)
            path.replace(folder / FILE)
        except (NoLease, Refused, Unreachable, ValueError, OSError) as problem:
            begins = f"continues at step {own}" if own else "begins again"
            log.warning("%s %s: its checkpoint cannot be used: %s", called, begins, problem)
            arriving.drop()
            return False
        log.info("%s resumed at step %d from its checkpoint", called, step)
        return True

    def saved(self, path: Path, step: int) -> None:
        """Send a new checkpoint. The last one is sent only if another expert branches from this one."""
        if step < self._job.steps:
            self._site.give(self._plan, self._job.number, step, path)
        elif self._followed:
            self._site.give_last(self._plan, self._job.number, step, path)

    async def _patiently(self, kept: Kept, arriving: Arriving, name: str, length: int) -> tuple[int, Path]:
        """Fetch the checkpoint in as many transfers as it takes, see `_fetch`."""
        backoff, until = Backoff(first=0.25, last=8.0), self._site.clock() + PATIENCE
        while True:
            here = arriving.here()
            try:
                return await self._fetch(kept, arriving, name, length)
            except (NoLease, Unreachable) as problem:
                log.info("a checkpoint cannot be fetched yet: %s", problem)
                if arriving.here() != here:
                    backoff, until = Backoff(first=0.25, last=8.0), self._site.clock() + PATIENCE
                elif self._site.clock() >= until:
                    raise
            await asyncio.sleep(backoff.seconds())

    async def _fetch(self, kept: Kept, arriving: Arriving, name: str, length: int) -> tuple[int, Path]:
        """Fetch what is not here yet of the coordinator's checkpoint, and check it.

        Returns the step after which it was made, and where it is.

        Raises:
            NoLease, Refused, Unreachable: it cannot be fetched.
            ValueError: it does not match its description, or is not of the expert of that name with that many
                parameters.
            OSError: it cannot be written.
        """
        async with aclosing(self._site.line.fetch_checkpoint(self._plan, kept, *arriving.here())) as parts:
            first = await anext(parts, CheckpointPart())
            found = kept_of(first.checkpoint)  # the one of the order, or a later one
            if found.step > self._job.steps:
                raise ValueError(f"it is after {found.step} steps, of {self._job.steps} in all")
            if found.size > most_bytes(length):
                raise ValueError(f"{found.size} bytes: one of that expert has {most_bytes(length)} at most")
            pieces = (part.piece async for part in parts)
            path = await arriving.receive(pieces, found.size, found.digest, first.offset)
        await asyncio.to_thread(check, path, length, found.step, name)
        return found.step, path
