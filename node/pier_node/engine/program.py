"""A training program of the site's owner, as its daemon sees it: any model and any loop, attached by `import pier`.

The program connects to a Unix socket and says what its model is (`Attach`). From then on the daemon drives it as it
drives Pier's own workers (trainer/workers.py): it names a vector to load and a number of inner steps (`Train`), and the
program publishes its weights in shared memory (`Done`). The optimizer stays in the program and never enters the
protocol. A program that died is handed the same steps again when it is back, from the same weights; docs/engine.md
has the states and what each failure means.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pier_node.base.errors import PierError
from pier_node.base.processes import SocketFolder
from pier_node.base.shared import SharedVector
from pier_node.base.tasks import Hearing
from pier_node.config.program import first_difference
from pier_node.config.run import RunConfig
from pier_node.engine.messages import (
    LINE_LIMIT,
    Attach,
    Attached,
    Done,
    Failed,
    Logged,
    Message,
    Over,
    Progress,
    Publishing,
    Ready,
    Train,
    decode,
    encode,
)
from pier_node.engine.ranks import RankTable
from pier_node.engine.supervisor import Moments, end
from pier_node.outer.deadline import Deadline
from pier_node.outer.layout import Layout

VERSION = 3
"""Of the messages between daemon and program."""
ENGINE_VARIABLE = "PIER_ENGINE"
"""Environment variable that tells a program where its daemon listens."""
ATTACH_SECONDS = 600.0
"""How long a program may take to attach, at first and after each restart."""
FIRST_SECONDS = 1800.0
"""How long a program may say nothing while it is not known how long its steps take: torch.compile may be at work."""
DEAD_SECONDS = 5.0
"""How long a program may live on without one of its ranks: torchrun ends it within less."""
LOOK_SECONDS = 1.0
"""How often the daemon looks whether the program hangs."""
DUMP_SECONDS = 1.0
"""What a hung program gets to print where it is, and then to end on SIGTERM."""
LEAVE_SECONDS = 10.0
"""What a program gets to load the last weights and to end by itself."""
END_SECONDS = 3600
"""What a program that this daemon has started gets to save its result after the run."""
RESTART_SECONDS = 1.0
MAX_RESTARTS = 3
"""A command that ends more often than this without finishing its inner steps is not started again."""

log = logging.getLogger(__name__)


class Patience:
    """How long a program has said nothing, and how long it may: learned from how long the same thing took before.

    What it said last tells what it is doing: loading weights after `Train`, a step after `Progress`, and so on.

    Args:
        floor: what it may take in any case, in seconds.
    """

    def __init__(self, floor: float) -> None:
        self._floor, self._factor = floor, 1
        self._learned: dict[type[Message], Deadline] = {}
        self._doing: type[Message] | None = None
        self._since = time.monotonic()

    def forget(self, floor: float) -> None:
        """There is a new process, which has everything to compile again."""
        self._floor, self._learned = floor, {}
        self.said(None)

    def double(self) -> None:
        """Be twice as patient: the next process may need as long for what this one seemed to hang in."""
        self._factor *= 2

    def said(self, message: Message | None) -> None:
        """A message has come or gone; None: a connection has."""
        now = time.monotonic()
        if self._doing is not None and isinstance(message, Progress | Publishing | Done):
            self._deadline.saw(now - self._since)
        self._doing, self._since = type(message) if isinstance(message, Train | Progress | Publishing) else None, now

    @property
    def silent(self) -> float:
        """How long nothing has been said, in seconds."""
        return time.monotonic() - self._since

    def seconds(self) -> float:
        """How long nothing may be said."""
        return self._deadline.seconds() * self._factor

    @property
    def _deadline(self) -> Deadline:
        doing = self._doing or Train
        return self._learned.setdefault(doing, Deadline(FIRST_SECONDS, self._floor))


def _silent(fault: str, seconds: float) -> PierError:
    return PierError(f"the training program {fault} for {seconds:.0f} seconds", "Its own output says more.")


@dataclass(frozen=True)
class Standing:
    """How the run stands, for a program that asks.

    Attributes:
        round: the last round that was committed; `sites`: live sites, this one included.
        losses: the last training loss of other sites, by name.
    """

    round: int
    sites: int
    losses: dict[str, float]


class Program:
    """The program of one site.

    Args:
        socket: where it connects; None: in a folder of this process, for a program that `command` starts.
        command: starts it; "": whoever started this daemon is the program, or will be.

    Attributes:
        attach: what the program has said of its model; None: it is not there yet.
        outbox: the weights that the program published last, shape [parameters].
        adam_m, adam_v: empty; a program's optimizer is its own.
    """

    def __init__(self, socket: Path | None, command: str) -> None:
        self._folder = None if socket else SocketFolder("program")
        self._socket = socket or self._folder_path()
        self._command = command
        self.attach: Attach | None = None
        self.outbox = self.adam_m = self.adam_v = SharedVector(0)
        self.recover_moments: Callable[[], Moments | None] = lambda: None
        self._place: Attached | None = None
        self._ready = False
        self._request: Train | Over | None = None
        self._answer: Done | Ready | None = None
        self._on_progress: Callable[[Progress], None] | None = None
        self._standing: Callable[[], Standing] = lambda: Standing(0, 1, {})
        self._on_log: Callable[[Logged], None] = lambda _: None
        self._writer: asyncio.StreamWriter | None = None
        self._patience = Patience(0.0)
        self._table = RankTable(0)
        self._productive, self._diverged = True, False
        self._hearing = Hearing()
        self._over = False
        self._ids, self._turn = itertools.count(1), asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._running: asyncio.Task[Done] | None = None
        self._ending: asyncio.Task[None] | None = None

    def _folder_path(self) -> Path:
        assert self._folder is not None
        return self._folder.path / "socket"

    # --- coming and going ----------------------------------------------------------------------

    async def attached(self) -> Attach:
        """Listen, start the command if there is one, and wait until the program is there. Raises PierError."""
        self._server = await asyncio.start_unix_server(self._accept, path=self._socket, limit=LINE_LIMIT)
        if self._command:
            self._keeping = asyncio.create_task(self._keep_running())
        await self._expect(lambda: self.attach is not None, ATTACH_SECONDS, "has not called pier.join")
        assert self.attach is not None
        return self.attach

    def check(self, config: RunConfig) -> None:
        """Refuse a program whose model is not the run's. Raises PierError, which names the first difference."""
        if config.program is None:
            raise PierError(
                "this run trains Pier's own decoder, and not a model of a program",
                "Start this site without a program: `pier-node start` with the same --peers.",
            )
        assert self.attach is not None
        if difference := first_difference(tuple(self.attach.tensors), config.program.tensors):
            raise PierError(
                f"the model of this program is not the run's: {difference}",
                "Build the model with the same code and settings as at the other sites.",
            )

    def place(
        self,
        config: RunConfig,
        slot: int,
        folder: Path,
        standing: Callable[[], Standing],
        on_log: Callable[[Logged], None],
    ) -> None:
        """Settle the program's place in a run that `check` has accepted.

        Args:
            folder: the site's.
            standing: returns how the run stands, which the program may ask.
            on_log: called with metrics of the program's own.
        """
        self._standing, self._on_log = standing, on_log
        length, kept = Layout.of_run(config).length, folder / "program"
        kept.mkdir(parents=True, exist_ok=True)
        self.outbox, slots = SharedVector(length), config.run.sites
        self._place = Attached(
            outbox=self.outbox.path,
            table=self._table.path,
            slot=slot % slots,
            slots=slots,
            total_steps=config.inner.total_steps,
            folder=str(kept),
            daemon=os.getpid(),
        )

    async def start(self) -> None:
        """Give the program its place; its weights are in `outbox` afterwards. Raises PierError."""
        self._say(self._place)
        await self._expect(lambda: self._ready, ATTACH_SECONDS, "has not published its weights")

    async def run(
        self,
        first_step: int,
        steps: int,
        sequences: int,  # noqa: ARG002 - a program makes its own batches
        payload: Literal["weights", "gradient"],
        load: SharedVector,
        adam_step: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Done:
        """Have the program do inner steps; its weights are in `outbox` afterwards.

        Cancelling this does not stop the program, whose result still comes; the next steps begin after it.

        Args:
            first_step: index in the whole run of the first inner step.
            load: weights to begin with, shape [parameters].
            adam_step: 0: the program's optimizer forgets its state; None: it does not.
            on_progress: called with what is done, a few times a second.

        Raises:
            PierError: the program cannot do them, or ended too often.
        """
        if payload != "weights":
            raise PierError("a program publishes weights, not gradients")
        forget, self._diverged = self._diverged or adam_step == 0, False
        run = self._standing()
        request = Train(
            next(self._ids), first_step, steps, load.path, forget, round=run.round, sites=run.sites, losses=run.losses
        )
        self._running = asyncio.create_task(self._train(request, load, on_progress))
        return await asyncio.shield(self._running)

    async def _train(self, request: Train, _load: SharedVector, told: Callable[[Progress], None] | None) -> Done:
        # `_load` stays in memory for as long as the steps may have to be handed out again.
        async with self._turn:
            self._on_progress = told
            watching = asyncio.create_task(self._watch())
            try:
                done = await self._ask(request, math.inf, "")
            finally:
                watching.cancel()
        assert isinstance(done, Done)
        if not done.diverged:
            return done
        self._diverged = True
        log.warning(
            "most losses of the inner steps %d to %d are not finite: these steps do not count, and the program "
            "continues from the weights before them, without its optimizer's state",
            *(request.first_step, request.first_step + request.steps - 1),
        )
        return replace(done, tokens=0)

    async def _watch(self) -> None:
        """End a program that hangs, or the site of one that is not ours to end."""
        died_at, now = math.inf, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._writer is None or not self._ready:
                if self._patience.silent > ATTACH_SECONDS:
                    self._fail(_silent("has not called pier.join", ATTACH_SECONDS))
                continue
            dead = self._table.dead()
            died_at = min(died_at, now()) if dead else math.inf
            if now() - died_at > DEAD_SECONDS:
                await self._end_hung(", ".join(dead))
            elif self._patience.silent > (limit := self._patience.seconds()):
                await self._end_hung(f"it has said nothing for {limit:.0f} seconds, and {self._table.suspects()}")

    async def _end_hung(self, why: str) -> None:
        problem = f"the training program hangs: {why}"
        self._table.dump()
        process, self._ready = self._process, False
        if process is None:
            remedy = "End it and start it again. If it was only busy, give pier.join a longer `patience`."
            self._fail(PierError(problem, remedy))
            return
        self._patience.double()
        log.error("%s; it is ended and started again", problem)
        ending = self._ending = asyncio.create_task(end(process, DUMP_SECONDS))
        await asyncio.shield(ending)

    async def evaluate(self, _weights: SharedVector) -> float:
        """NaN: a program validates for itself."""
        return math.nan

    def moments(self) -> None:
        """A program keeps its optimizer to itself."""
        return

    async def finish(self, weights: SharedVector) -> None:
        """Hand the program the model of the finished run, and let it end as it likes. Raises PierError."""
        async with self._turn:
            await self._ask(Over(weights.path), ATTACH_SECONDS, "has not loaded the finished model")
        self._over = True
        if self._process is not None and self._process.returncode is None:
            log.info("the run is over; the training program has %d minutes to end", END_SECONDS // 60)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_SECONDS)

    def refuse(self, error: PierError) -> None:
        """Tell the program why its site cannot go on."""
        self._say(Failed(error.problem, error.remedy))

    async def stop(self) -> None:
        """End the program, or let it go if it is not ours, within seconds."""
        if self._running is not None:
            self._running.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
        if not self._over:
            self._say(Over(""))
            with contextlib.suppress(TimeoutError):  # it keeps its optimizer's state, and goes
                await asyncio.wait_for(self._hearing.until(lambda: self._writer is None), LEAVE_SECONDS)
        if self._process is not None:
            await end(self._process, LEAVE_SECONDS)
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.remove()
        else:
            self._socket.unlink(missing_ok=True)

    # --- the conversation ----------------------------------------------------------------------

    async def _ask(self, request: Train | Over, patience: float, fault: str) -> Done | Ready:
        self._request, self._answer = request, None
        try:
            if self._ready:  # otherwise it is handed out with the next Ready
                self._say(request)
            await self._expect(lambda: self._answer is not None, patience, fault)
        finally:
            self._request = None
        assert self._answer is not None
        return self._answer

    async def _expect(self, seen: Callable[[], bool], patience: float, fault: str) -> None:
        await self._hearing.expect(seen, patience, lambda: _silent(fault, patience))

    def _fail(self, error: PierError) -> None:
        """Raise an error to whoever waits, unless there was one before."""
        self._hearing.error = self._hearing.error or error
        self._hearing.hear()

    def _say(self, message: Message | None) -> None:
        if self._writer is not None and message is not None:
            self._writer.write(encode(message))
            self._patience.said(message)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self._hear(decode(line), writer)
                self._hearing.hear()
        except (PierError, ValueError) as error:  # ValueError: a line longer than LINE_LIMIT
            self._fail(PierError(f"the training program broke the protocol: {error}"))
        except ConnectionResetError:
            pass
        finally:
            writer.close()
            if writer is self._writer:
                self._writer, self._ready = None, False
                self._patience.said(None)
                self._hearing.hear()
                self._lost()

    def _hear(self, message: Message, writer: asyncio.StreamWriter) -> None:
        if writer is self._writer and not isinstance(message, Logged):
            self._patience.said(message)
        match message:
            case Attach():
                self._welcome(message, writer)
            case Ready() if writer is self._writer:
                self._ready = True
                if isinstance(self._request, Over):
                    self._answer = message
                elif self._request is not None:
                    self._say(self._request)
            case Progress() if self._on_progress is not None:
                self._on_progress(message)
            case Logged() if writer is self._writer and self._ready:
                self._on_log(message)
            case Done() if isinstance(self._request, Train) and message.job == self._request.id:
                self._answer, self._productive = message, True
            case Failed():
                self._hearing.error = PierError(message.problem, message.remedy)
            case _:
                pass

    def _welcome(self, attach: Attach, writer: asyncio.StreamWriter) -> None:
        if attach.version != VERSION:
            raise PierError(f"it speaks version {attach.version}, this daemon {VERSION}: install one version of Pier")
        if self.attach is not None and attach.tensors != self.attach.tensors:
            raise PierError("it came back with another model")
        if self._writer is not None:
            more = "Under torchrun every rank calls pier.join, after torch.distributed.init_process_group()."
            writer.write(encode(Failed("another program is attached to this daemon already", more)))
            writer.close()
            return
        if self.attach is not None:
            log.warning("the training program is back, and does the inner steps of this round again")
        self.attach, self._writer, self._ready = attach, writer, False
        self._patience.forget(attach.patience)
        self._table = RankTable(attach.ranks)
        if self._place is not None:
            self._place = replace(self._place, table=self._table.path)
        self._say(self._place)

    def _lost(self) -> None:
        if self._command or self._over or isinstance(self._request, Over) or self._hearing.error:
            return
        why = "".join(f": {who}" for who in self._table.dead(1)[:1])  # torchrun ends rank 0 with any other
        self._fail(PierError(f"the training program has ended{why}", "Start it again: it goes on from its last round."))

    # --- a command -----------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        restarts = 0
        while True:
            environment = {**os.environ, ENGINE_VARIABLE: str(self._socket)}
            try:
                program, *words = shlex.split(self._command)
                found = shutil.which(program) or program
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "pier_node.base.processes", found, *words),  # ends with this daemon
                    stdin=asyncio.subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl+C in the daemon's terminal is the daemon's to decide about
                )
            except (OSError, ValueError) as error:
                self._fail(PierError(f"--exec: {self._command}: {error}", "Give a command that can be run here."))
                return
            self._productive = False
            code = await self._process.wait()
            if self._over or isinstance(self._request, Over):
                return
            restarts = 0 if self._productive else restarts + 1
            if restarts > MAX_RESTARTS:
                self._fail(PierError(f"the training program ends again and again (exit code {code})", self._command))
                return
            log.warning("the training program ended with exit code %d; it is started again", code)
            await asyncio.sleep(RESTART_SECONDS)
