"""Hands one request at a time to the workers, and hands it out again when they were restarted meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pier_node.errors import PierError
from pier_node.inner.group import Ended, Group, Team
from pier_node.inner.messages import (
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Job,
    Message,
    Progress,
    Publishing,
    Rate,
    Rated,
    Setup,
    Tokenizing,
)
from pier_node.inner.moments import SharedMoments
from pier_node.signals import Signal
from pier_node.units import amount

MAX_RESTARTS = 3
"""A site gives up when its workers die more often than this without finishing a job."""
START_SECONDS = 300.0
"""How long workers may take to start."""
SILENT_SECONDS = 1800.0
"""How long a request may go on without a word from the workers."""
TAIL_BYTES = 3000
"""How much of the log an error shows."""

Request = Job | Evaluate | Rate
Answer = Done | Evaluated | Rated

log = logging.getLogger(__name__)


class Foreman:
    """Between the one who asks and the workers, who may die.

    Args:
        setup: for every worker that comes.
        moments: that the workers share with this process.
        logfile: takes what launcher and workers print.
        count: workers to start; 0: one for each device.

    Attributes:
        team: the running workers; None before they have started.
    """

    def __init__(self, setup: Setup, moments: SharedMoments, logfile: Path, count: int) -> None:
        self.team: Team | None = None
        self._setup, self._moments, self._logfile, self._count = setup, moments, logfile, count
        self._moments_changed = True  # since the workers last loaded or made them
        self._request: Request | None = None
        self._on_progress: Callable[[Progress], None] | None = None
        self._answer: Answer | None = None
        self._error: Exception | None = None
        self._productive = False
        self._news, self._heard = Signal(), 0
        self._group: Group | None = None
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the workers; return when all have connected. Raises PierError when they do not."""
        self._logfile.parent.mkdir(parents=True, exist_ok=True)
        await self._launch()
        self._listener = asyncio.create_task(self._listen())
        await self._until(lambda: self.team is not None, START_SECONDS)

    async def ask(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> Answer:
        """What the workers answer to a request; one at a time. Raises PierError when they cannot or gave up."""
        self._request, self._on_progress, self._answer = request, on_progress, None
        if isinstance(request, Job) and request.load_adam:
            self._moments.accept(request.adam_step)
            self._moments_changed = True
        try:
            self._hand_out()
            await self._until(lambda: self._answer is not None, SILENT_SECONDS)
        finally:
            self._request = None
        assert self._answer is not None
        return self._answer

    async def stop(self) -> None:
        """End all workers, within seconds; again: nothing."""
        if self._listener is not None:
            self._listener.cancel()
        group, self._group = self._group, None
        if group is not None:
            await group.stop()

    async def _launch(self) -> None:
        self._group, self._productive = Group(self._logfile), False
        await self._group.start(self._count, MAX_RESTARTS)

    async def _until(self, seen: Callable[[], bool], patience: float) -> None:
        while not seen():
            if self._error is not None:
                raise self._error
            heard = self._heard
            await self._news.wait(patience)
            if heard == self._heard:
                raise self._explained(f"this site's workers said nothing for {patience:.0f} seconds")

    async def _listen(self) -> None:
        while self._group is not None:
            event = await self._group.events.get()
            try:
                await self._hear(event)
            except Exception as error:
                self._error = error  # whoever asks for something gets it
            self._heard += 1
            self._news.notify()

    async def _hear(self, event: Team | Message | Ended) -> None:
        match event:
            case Team():
                await self._welcome(event)
            case Ended():
                await self._relaunch(event)
            case Failed():
                self._error = PierError(event.problem, event.remedy)
            case Tokenizing():
                log.info("tokenizing: %s of text read; the files have %s", amount(event.read), amount(event.size))
            case Progress() if self._on_progress is not None:
                self._on_progress(event)
            case Publishing() | Done() | Evaluated() | Rated():
                self._advance(event)

    def _advance(self, event: Publishing | Answer) -> None:
        match event, self._request:
            case Publishing(), Job() as job if job.id == event.job:
                self._moments.torn = job.payload == "weights"
            case Done(), Job() as job if job.id == event.job:
                if job.payload == "weights":
                    self._moments.accept(event.adam_step)
                self._answer, self._productive = event, True
            case Evaluated(), Evaluate() as request if request.id == event.id:
                self._answer = event
            case Rated(), Rate() as request if request.id == event.id:
                self._answer = event

    async def _welcome(self, team: Team) -> None:
        if self._moments.torn:
            log.error("a worker died while it was writing AdamW's moments: they are restored, or begin at zero")
            await asyncio.to_thread(self._moments.restore)
        if self.team is not None:
            log.warning("a worker died: this site's workers were started again; %s says why", self._logfile)
        self._moments_changed = True
        self.team = team
        team.send(self._setup)
        self._hand_out()

    def _hand_out(self) -> None:
        if self.team is None or self._request is None:
            return
        self.team.send(self._with_moments(self._request) if isinstance(self._request, Job) else self._request)

    def _with_moments(self, job: Job) -> Job:
        load = self._moments_changed and job.payload == "weights"
        self._moments_changed &= not load
        return replace(job, load_adam=load, adam_step=self._moments.step)

    async def _relaunch(self, end: Ended) -> None:
        if not self._productive or self._group is None:
            raise self._explained(
                f"this site's workers cannot be kept running (exit code {end.code} after up to {MAX_RESTARTS} restarts)"
            )
        log.warning("the launcher of the workers ended with code %d; another one is started", end.code)
        await self._group.stop()
        await self._launch()

    def _explained(self, problem: str) -> PierError:
        tail = self._logfile.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return PierError(
            f"{problem}; {self._logfile} ends with:\n{tail}", "Mend what it shows, then start the node again."
        )
