"""Supervises a site's workers from its daemon: the processes, their sockets, and the request that they work on.

The supervisor sends one request at a time, and sends it again if the workers were restarted in the meantime. AdamW's
moments are in shared memory, so they survive the death of the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pier_node.base.errors import PierError
from pier_node.base.processes import SocketFolder
from pier_node.base.shared import SharedVector, Vector
from pier_node.base.tasks import Hearing
from pier_node.base.units import amount
from pier_node.engine.messages import (
    LINE_LIMIT,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Hello,
    Job,
    Message,
    Progress,
    Publishing,
    Rate,
    Rated,
    Setup,
    Tokenizing,
    decode,
    encode,
)

Moments = tuple[Vector, Vector, int]
"""First and second moments, shape [parameters] each, and the number of AdamW steps behind them."""


class SharedMoments:
    """The moments after the last job that published any; initially zeros.

    Args:
        recover: returns replacement moments when a worker dies while it publishes them; None: zeros.

    Attributes:
        first: shape [parameters].
        second: shape [parameters].
        step: number of AdamW steps behind them.
        torn: a job is publishing them.
    """

    def __init__(self, length: int, recover: Callable[[], Moments | None]) -> None:
        self.first, self.second = SharedVector(length), SharedVector(length)
        self.step, self.torn = 0, False
        self._recover = recover

    def accept(self, step: int) -> None:
        """Mark the moments as complete, with `step` steps behind them."""
        self.step, self.torn = step, False

    def restore(self) -> None:
        """Replace torn moments by complete ones."""
        first, second, step = self._recover() or (0.0, 0.0, 0)
        self.first.array[:], self.second.array[:] = first, second
        self.accept(step)


LEAVE_SECONDS = 3.0
"""Seconds for workers to leave by themselves, and then for the launcher after SIGTERM."""


@dataclass(frozen=True)
class WorkerGroup:
    """Event: every worker has connected.

    After a restart there is a new group, and the old one receives nothing more.
    """

    hello: Hello
    """The hello of one of them."""
    writers: tuple[asyncio.StreamWriter, ...]

    def send(self, message: Message) -> None:
        """Send a message to every worker."""
        line = encode(message)
        for writer in self.writers:
            writer.write(line)


@dataclass(frozen=True)
class Ended:
    """Event: the launcher has ended, and with it all workers."""

    code: int


@dataclass(eq=False)
class _Conversation:
    """A connection and the attempt that its worker belongs to; -1: not known yet."""

    task: asyncio.Task[None]
    writer: asyncio.StreamWriter
    attempt: int = -1


class Group:
    """A launcher and the workers that it keeps alive.

    Args:
        log: file for the output of launcher and workers.

    Attributes:
        events: the events in order: a WorkerGroup before any message from its workers.
        home: folder of the socket, for this user only; it is removed with the group.
    """

    def __init__(self, log: Path) -> None:
        self.events: asyncio.Queue[WorkerGroup | Message | Ended] = asyncio.Queue()
        self._folder = SocketFolder("workers")
        self.home = self._folder.path
        self._log = log
        self._stopping = False
        self._attempt = -1
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._conversations: set[_Conversation] = set()
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, workers: int, max_restarts: int) -> None:
        """Listen, and start the launcher; 0 workers: one per device."""
        socket = self.home / "socket"
        self._server = await asyncio.start_unix_server(self._accept, path=socket, limit=LINE_LIMIT)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *launcher(socket, workers, max_restarts),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C in the daemon's terminal must not reach them
            )
        self._watch = asyncio.create_task(self._report_end(self._process))

    async def stop(self) -> None:
        """End everything within seconds: by closing the sockets, then by SIGTERM, then by SIGKILL."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        for conversation in self._conversations:
            conversation.writer.close()
        if self._process is not None:
            await end(self._process, LEAVE_SECONDS)
        await _heard_out(self._conversations)
        if self._server is not None:
            self._server.close()  # last: until now it rejected late workers
        self._folder.remove()

    async def _report_end(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await _heard_out(self._conversations)
        self.events.put_nowait(Ended(code))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        conversation = _Conversation(task, writer)
        self._conversations.add(conversation)
        if self._stopping:
            writer.close()
        try:
            await self._converse(conversation, reader)
        except (PierError, ValueError) as error:  # ValueError: a line longer than LINE_LIMIT
            self.events.put_nowait(Failed(f"a worker broke the protocol: {error}", ""))
        except ConnectionResetError:
            pass  # it died with unread data: the launcher handles that
        finally:
            self._conversations.discard(conversation)
            writer.close()

    async def _converse(self, conversation: _Conversation, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            match decode(line):
                case Hello() as hello:
                    await self._enrol(hello, conversation)
                case message:
                    self.events.put_nowait(message)

    async def _enrol(self, hello: Hello, conversation: _Conversation) -> None:
        conversation.attempt = hello.attempt
        # The launcher ends a whole attempt before it starts the next, so the last attempt's messages come first.
        await _heard_out({other for other in self._conversations if -1 < other.attempt < hello.attempt})
        if hello.attempt > self._attempt:
            self._attempt, self._writers = hello.attempt, {}
        self._writers[hello.rank] = conversation.writer
        if len(self._writers) == hello.world:
            self.events.put_nowait(WorkerGroup(hello, tuple(self._writers.values())))


async def _heard_out(conversations: set[_Conversation]) -> None:
    if conversations:
        await asyncio.wait([conversation.task for conversation in conversations], timeout=LEAVE_SECONDS)


def launcher(socket: Path, workers: int, max_restarts: int) -> list[str]:
    """The command that starts the launcher."""
    options = ["--socket", str(socket), "--workers", str(workers), "--max-restarts", str(max_restarts)]
    return [sys.executable, "-m", "pier_node.trainer.worker", *options]


async def end(process: asyncio.subprocess.Process, patience: float) -> None:
    """End a child: let it end by itself, then send SIGTERM, then SIGKILL to it and its descendants.

    Args:
        patience: seconds that each of the first two steps may take.
    """
    family = _family(process.pid) if process.returncode is None else []
    if not await _ended(process, patience):
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await _ended(process, patience)
    for relative in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            relative.kill()
    await process.wait()


async def _ended(process: asyncio.subprocess.Process, patience: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), patience)
    return process.returncode is not None


def _family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, also those in sessions of their own, as torchrun's workers are."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


MAX_RESTARTS = 3
"""A site gives up when its workers die more often than this without finishing a job."""
START_SECONDS = 300.0
"""Maximum seconds for workers to start."""
SILENT_SECONDS = 1800.0
"""Maximum seconds of silence from the workers during a request."""
TAIL_BYTES = 3000
"""Bytes of the log that an error message shows."""

Request = Job | Evaluate | Rate
Answer = Done | Evaluated | Rated

log = logging.getLogger(__name__)


class Supervisor:
    """Mediates between the caller and the workers, which may die.

    Args:
        setup: sent to every worker that connects.
        moments: shared by the workers and this process.
        logfile: for the output of launcher and workers.
        count: number of workers to start; 0: one per device.

    Attributes:
        team: the running workers; None before they have started.
    """

    def __init__(self, setup: Setup, moments: SharedMoments, logfile: Path, count: int) -> None:
        self.team: WorkerGroup | None = None
        self._setup, self._moments, self._logfile, self._count = setup, moments, logfile, count
        self._moments_changed = True  # since the workers last loaded or produced them
        self._request: Request | None = None
        self._on_progress: Callable[[Progress], None] | None = None
        self._answer: Answer | None = None
        self._productive = False
        self._hearing = Hearing()
        self._group: Group | None = None
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the workers; return when all have connected. Raises PierError when they do not."""
        self._logfile.parent.mkdir(parents=True, exist_ok=True)
        await self._launch()
        self._listener = asyncio.create_task(self._listen())
        await self._expect(lambda: self.team is not None, START_SECONDS)

    async def ask(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> Answer:
        """The workers' answer to a request; one at a time. Raises PierError when they cannot do it or gave up."""
        self._request, self._on_progress, self._answer = request, on_progress, None
        if isinstance(request, Job) and request.load_adam:
            self._moments.accept(request.adam_step)
            self._moments_changed = True
        try:
            self._hand_out()
            await self._expect(lambda: self._answer is not None, SILENT_SECONDS)
        finally:
            self._request = None
        assert self._answer is not None
        return self._answer

    async def stop(self) -> None:
        """End all workers within seconds; a second call does nothing."""
        if self._listener is not None:
            self._listener.cancel()
        group, self._group = self._group, None
        if group is not None:
            await group.stop()

    async def _launch(self) -> None:
        self._group, self._productive = Group(self._logfile), False
        await self._group.start(self._count, MAX_RESTARTS)

    async def _expect(self, seen: Callable[[], bool], patience: float) -> None:
        silence = f"this site's workers said nothing for {patience:.0f} seconds"
        await self._hearing.expect(seen, patience, lambda: self._explained(silence))

    async def _listen(self) -> None:
        while self._group is not None:
            event = await self._group.events.get()
            try:
                await self._hear(event)
            except Exception as error:
                self._hearing.error = error  # raised to the next caller
            self._hearing.hear()

    async def _hear(self, event: WorkerGroup | Message | Ended) -> None:
        match event:
            case WorkerGroup():
                await self._welcome(event)
            case Ended():
                await self._relaunch(event)
            case Failed():
                self._hearing.error = PierError(event.problem, event.remedy)
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

    async def _welcome(self, team: WorkerGroup) -> None:
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
