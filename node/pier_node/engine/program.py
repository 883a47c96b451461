"""What trains at a site, as its daemon sees it: a program of the site's owner, or Pier's own trainer.

The program connects to a Unix socket and says what its model is and what it can do (`Attach`). From then on the daemon
drives it: it names a vector to load and a number of inner steps (`Train`), and the program publishes its weights in
shared memory (`Done`). A program of the owner (any model and any loop, attached by `import pier`) keeps its optimizer
to itself; Pier's own trainer publishes AdamW's moments too, and can do what the abilities of `Attach` name. A program
that died is handed the same request again when it is back; docs/engine.md has the states and what each failure means.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pier_node.base.errors import PierError
from pier_node.base.patience import LearnedWait
from pier_node.base.processes import SocketFolder
from pier_node.base.shared import SharedVector
from pier_node.base.tasks import Hearing
from pier_node.base.units import amount
from pier_node.config.program import first_difference
from pier_node.config.run import RunConfig
from pier_node.engine import messages
from pier_node.engine.device import Device
from pier_node.engine.moments import Moments, SharedMoments
from pier_node.engine.ranks import RankTable
from pier_node.engine.training_process import Command, TrainingProcess
from pier_node.outer.layout import Layout

ATTACH_SECONDS = 600.0
"""How long a program may take to attach, at first and after each restart."""
FIRST_SECONDS = 1800.0
"""How long a program may say nothing while it is not known how long its steps take: torch.compile may be at work."""
FOLLOW_SECONDS = 3.0
"""What a program that has died may take to lose its connection after the next one has attached."""
REJOIN_SECONDS = 60.0
"""How long a program that has left the run may take to call pier.join again, before its site leaves too."""
DEAD_SECONDS = 5.0
"""How long a program may live on without one of its ranks: torchrun ends it within less."""
LOOK_SECONDS = 1.0
"""How often the daemon looks whether the program hangs."""
DUMP_SECONDS = 1.0
"""What a hung program gets to print where it is, and then to end on SIGTERM."""
LEAVE_SECONDS = 10.0
"""What a program gets to load the last weights and to end by itself."""
CLOSE_SECONDS = 3.0
"""What a program that keeps nothing to itself gets to end."""
END_SECONDS = 3600
"""What a program that this daemon has started gets to save its result after the run."""

Request = messages.Train | messages.Evaluate | messages.Rate | messages.Over
Answer = messages.Done | messages.Evaluated | messages.Rated | messages.Ready
T = TypeVar("T")

log = logging.getLogger(__name__)


class Patience:
    """How long a program has said nothing, and how long it may: learned from how long the same thing took before.

    What it said last tells what it is doing: loading weights after `Train`, a step after `Progress`, and so on.

    Args:
        floor: what it may take in any case, in seconds.
    """

    def __init__(self, floor: float) -> None:
        self._floor, self._factor = floor, 1
        self._learned: dict[type[messages.Message], LearnedWait] = {}
        self._doing: type[messages.Message] | None = None
        self._since = time.monotonic()

    def forget(self, floor: float) -> None:
        """There is a new process, which has everything to compile again."""
        self._floor, self._learned = floor, {}
        self.said(None)

    def double(self) -> None:
        """Be twice as patient: the next process may need as long for what this one seemed to hang in."""
        self._factor *= 2

    def said(self, message: messages.Message | None) -> None:
        """A message has come or gone; None: a connection has."""
        now = time.monotonic()
        if self._doing is not None and isinstance(message, messages.Progress | messages.Publishing | messages.Done):
            self._deadline.saw(now - self._since)
        takes_time = messages.Train | messages.Progress | messages.Publishing | messages.Publish
        self._doing, self._since = type(message) if isinstance(message, takes_time) else None, now

    @property
    def silent(self) -> float:
        """How long nothing has been said, in seconds."""
        return time.monotonic() - self._since

    def seconds(self) -> float:
        """How long nothing may be said."""
        return self._deadline.seconds() * self._factor

    @property
    def _deadline(self) -> LearnedWait:
        doing = self._doing or messages.Train
        return self._learned.setdefault(doing, LearnedWait(FIRST_SECONDS, self._floor))


@dataclass(frozen=True)
class RunView:
    """How the run stands, for a program that asks.

    Attributes:
        round: the last round that was committed; `sites`: live sites, this one included.
        losses: the last training loss of other sites, by name.
    """

    round: int
    sites: int
    losses: dict[str, float]


def alone() -> RunView:
    """How a run stands of which nothing is known."""
    return RunView(0, 1, {})


class Program:
    """The program of one site.

    Args:
        socket: where it connects; None: in a folder of this process, for a program that `command` starts.
        command: starts it; None: whoever started this daemon is the program, or will be.

    Attributes:
        attach: what the program has said of itself; None: it is not there yet.
        outbox: what the program published last, weights or a mean gradient, shape [parameters].
        recover_moments: called in a thread when a program died while it wrote moments; if it returns None: zeros.
        on_log: called with metrics of the program's own.
        on_left: called with the inner steps of the run that were done when the program has left it by itself.
        publishes_moments: whether a program that can is to publish its moments with its weights.
    """

    def __init__(self, socket: Path | None, command: Command | None) -> None:
        self._folder: SocketFolder | None = None
        if socket is None:
            self._folder = SocketFolder("program")
            socket = self._folder.path / "socket"
        self._socket = socket
        self._process = TrainingProcess(command, socket, self._fail, self._has_left) if command else None
        self.attach: messages.Attach | None = None
        self.device = Device()
        self.outbox = SharedVector(0)
        self.recover_moments: Callable[[], Moments | None] = lambda: None
        self.publishes_moments = True
        self._moments = SharedMoments(0, None, lambda: None)
        self._opened, self._has_opened = messages.Opened(0, 0), asyncio.Event()
        self._place: messages.Attached | None = None
        self._placed = self._ready = False
        self._request: Request | None = None
        self._answer: Answer | None = None
        self._on_progress: Callable[[messages.Progress], None] | None = None
        self._view: Callable[[], RunView] = alone
        self.on_log: Callable[[messages.Logged], None] = lambda _: None
        self.on_left: Callable[[int], None] = lambda _: None
        self._left: messages.Left | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._patience = Patience(0.0)
        self._table = RankTable(0)
        self._readers, self._waits_to_publish = 0, False
        self._diverged = self._over = self._stopping = False
        self._hearing = Hearing()
        self._ids, self._turn = itertools.count(1), asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def adam_m(self) -> SharedVector:
        """AdamW's first moments as the program published them, initially zeros; empty: it keeps its optimizer."""
        return self._moments.first

    @property
    def adam_v(self) -> SharedVector:
        """The second moments, as `adam_m`."""
        return self._moments.second

    def moments(self) -> tuple[SharedVector, SharedVector, int] | None:
        """AdamW's moments, and the number of steps behind them; None: none yet, or the program keeps them to itself."""
        return (self.adam_m, self.adam_v, self._moments.step) if self._moments.step else None

    @contextlib.asynccontextmanager
    async def moments_unchanged(self) -> AsyncIterator[None]:
        """Meanwhile the program does its steps, but does not publish what they made of the moments."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._let_publish()

    def _let_publish(self) -> None:
        moments = self.publishes_moments
        if self._waits_to_publish and not (moments and self._readers):
            self._waits_to_publish, self._moments.torn = False, moments
            self._say(messages.Publish(moments))

    def can(self, ability: messages.Ability) -> bool:
        """Whether the program has announced an ability."""
        return self.attach is not None and ability in self.attach.can

    # --- coming and going ----------------------------------------------------------------------

    async def attached(self) -> messages.Attach:
        """Listen, start the command if there is one, and wait until the program is there. Raises PierError."""
        self._server = await asyncio.start_unix_server(self._accept, path=self._socket, limit=messages.LINE_LIMIT)
        if self._process is not None:
            self._process.start()
        await self._expect(lambda: self.attach is not None, ATTACH_SECONDS, "has not called pier.join")
        assert self.attach is not None
        return self.attach

    async def opened(self) -> messages.Opened:
        """How many tokens it has, once it has told. A program of the site's owner need not tell."""
        await self._has_opened.wait()
        return self._opened

    def check(self, config: RunConfig) -> None:
        """Refuse a program whose model is not the run's. Raises PierError, which names the first difference."""
        if config.program is None:
            raise PierError(
                "this run trains Pier's own decoder, and not a model of a program",
                "Start this site without it: `pier-node start`. Or let your program found a run: docs/program.md.",
            )
        assert self.attach is not None
        if difference := first_difference(tuple(self.attach.tensors), config.program.tensors):
            raise PierError(
                f"the model of this program is not the run's: {difference}",
                "Build the model with the same code and settings as at the other sites.",
            )
        if self.attach.step_tokens != config.program.step_tokens:
            log.warning(
                "step_tokens is %d here and %d in the run, in which it should be the same at every site: the most that "
                "a step has at any. Tokens beyond the run's do not count when sites are averaged",
                *(self.attach.step_tokens, config.program.step_tokens),
            )

    def place(
        self,
        config: RunConfig,
        slot: int,
        slots: int,
        folder: Path,
        view: Callable[[], RunView] = alone,
    ) -> None:
        """Settle the program's place in a run.

        Args:
            slot, slots: it trains on part `slot` of `slots` of the data.
            folder: where it may keep files.
            view: returns how the run stands, which the program may ask.

        Raises:
            PierError: there is no room for the moments on the disk of the folder.
        """
        self._view = view
        length = Layout.of_run(config).length
        self.outbox = SharedVector(length)
        if config.program is None:
            self._moments = SharedMoments(length, folder, lambda: self.recover_moments())
        self._place = messages.Attached(
            outbox=self.outbox.path,
            table=self._table.path,
            slot=slot,
            slots=slots,
            total_steps=config.inner.total_steps,
            folder=str(folder),
            daemon=os.getpid(),
            publish=config.program is not None,
        )

    async def start(self) -> None:
        """Give the program its place, and start it if it is not there. Raises PierError.

        Afterwards the weights of a program of the site's owner are in `outbox`.
        """
        if self._server is None:
            await self.attached()
        self._enter()
        await self._expect(lambda: self._ready, ATTACH_SECONDS, "has not published its weights")

    async def finish(self, weights: SharedVector) -> None:
        """Hand the program the model of the finished run, and let it end as it likes. Raises PierError."""
        async with self._turn:
            if self._process is not None:
                self._process.over = True
            await self._ask(messages.Over(weights.path), ATTACH_SECONDS, "has not loaded the finished model")
        self._over = True
        if self._process is not None:
            log.info("the run is over; the training program has %d minutes to end", END_SECONDS // 60)
            await self._process.ended(END_SECONDS)

    def refuse(self, error: PierError) -> None:
        """Tell the program why its site cannot go on."""
        self._say(messages.Failed(error.problem, error.remedy))

    async def stop(self) -> None:
        """End the program, or let it go if it is not ours, within seconds. Requests in progress are cancelled."""
        for task in self._tasks:
            task.cancel()
        self._stopping, keeps_state = True, not self.can("moments")
        if self._process is not None:
            self._process.over = True
        if keeps_state and not self._over:
            self._say(messages.Over(""))
            with contextlib.suppress(TimeoutError):  # it keeps its optimizer's state, and goes
                await asyncio.wait_for(self._hearing.until(lambda: self._writer is None), LEAVE_SECONDS)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            if self._left and self._over:  # it may still have much to do
                await self._process.ended(END_SECONDS)
            await self._process.stop(LEAVE_SECONDS if keeps_state and self.attach else CLOSE_SECONDS)
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.remove()
        else:
            self._socket.unlink(missing_ok=True)

    # --- what it is asked for ------------------------------------------------------------------

    async def run(
        self,
        first_step: int,
        steps: int,
        sequences: int,
        payload: Literal["weights", "gradient"],
        load: SharedVector,
        adam_step: int | None = None,
        on_progress: Callable[[messages.Progress], None] | None = None,
    ) -> messages.Done:
        """Have the program do inner steps; their result is in `outbox` afterwards, and in `adam_m` and `adam_v`.

        Cancelling this does not stop the program, whose result still comes; the next request begins after it.

        Args:
            first_step: index in the whole run of the first inner step.
            steps: number of inner steps; 1 for a gradient.
            sequences: number that the site trains on per step, if the program does not make its own batches.
            payload: what to publish. With "gradient" no step is taken: neither weights nor moments change.
            load: weights to begin with, shape [parameters]; not `outbox`, because the steps may have to begin again.
            adam_step: begin with the moments now in `adam_m` and `adam_v`, which are that many steps old; 0: a
                program that keeps its optimizer to itself forgets its state. None: go on with those that it has.
            on_progress: called with what is done, a few times a second.

        Raises:
            PierError: the program cannot do them, or died too often; says why.
        """
        if payload == "gradient" and not self.can("gradient"):
            raise PierError("a program publishes weights, not gradients")
        forget, self._diverged = self._diverged or adam_step == 0, False
        request = messages.Train(
            id=next(self._ids),
            first_step=first_step,
            steps=steps,
            load=load.path,
            forget=forget,
            **vars(self._view()),
            sequences=sequences,
            publish=payload,
        )
        return await self._shielded(self._train(request, load, adam_step, on_progress))

    def enough(self) -> None:
        """Let the inner steps under way, if there are any, be the last ones of their request."""
        if self._ready and isinstance(request := self._request, messages.Train) and request.publish == "weights":
            self._say(messages.Enough(request.id))

    async def evaluate(self, weights: SharedVector) -> float:
        """Validation loss of these weights in nats per token; NaN: the program validates for itself.

        Raises PierError as `run` does.
        """
        if not self.can("evaluate"):
            return math.nan
        evaluated = await self._shielded(self._judge(messages.Evaluate(next(self._ids), weights.path), weights))
        assert isinstance(evaluated, messages.Evaluated)
        return evaluated.loss

    async def rate(self, weights: SharedVector, rows: Path) -> npt.NDArray[np.float64]:
        """Mean loss of each row of a file with these weights in nats per token, [rows]. Raises PierError as `run` does.

        Args:
            rows: .npy, [rows, context + 1] token ids.
        """
        if not self.can("rate"):
            raise PierError("the training program cannot rate texts")
        rated = await self._shielded(self._judge(messages.Rate(next(self._ids), weights.path, str(rows)), weights))
        assert isinstance(rated, messages.Rated)
        return np.array(rated.losses)

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _train(
        self,
        request: messages.Train,
        _load: SharedVector,
        adam_step: int | None,
        told: Callable[[messages.Progress], None] | None,
    ) -> messages.Done:
        # `_load` stays in memory for as long as the steps may have to be handed out again.
        async with self._turn:
            self._on_progress = told
            if adam_step is not None:
                self._moments.accept(adam_step, changed=True)
            watching = asyncio.create_task(self._watch())
            try:
                done = await self._ask(request, math.inf, "")
            finally:
                watching.cancel()
        assert isinstance(done, messages.Done)
        if not done.diverged:
            return done
        self._diverged = True
        log.warning(
            "most losses of the inner steps %d to %d are not finite: these steps do not count, and the program "
            "continues from the weights before them, without its optimizer's state",
            *(request.first_step, request.first_step + request.steps - 1),
        )
        return replace(done, tokens=0)

    async def _judge(self, request: messages.Evaluate | messages.Rate, _weights: SharedVector) -> Answer:
        # `_weights` stay in memory for as long as the request may have to be handed out again.
        async with self._turn:
            patience = max(FIRST_SECONDS, self.attach.patience if self.attach else 0.0)
            return await self._ask(request, patience, "has said nothing")

    async def _watch(self) -> None:
        """End a program that hangs, or the site of one that is not ours to end."""
        died_at, now = math.inf, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._writer is None or not self._ready:
                if self._patience.silent > ATTACH_SECONDS:
                    self._fail(self._silent("has not called pier.join", ATTACH_SECONDS))
                continue
            dead = self._table.dead()
            died_at = min(died_at, now()) if dead else math.inf
            if now() - died_at > DEAD_SECONDS:
                await self._end_hung(", ".join(dead))
            elif not self._waits_to_publish and self._patience.silent > (limit := self._patience.seconds()):
                await self._end_hung(f"it has said nothing for {limit:.0f} seconds, and {self._table.suspects()}")

    async def _forget_dead(self) -> bool:
        """End the connection of a rank 0 that has died, if a child that it forked holds it open. Returns whether so."""
        writer = self._writer
        if writer is None or not self._table.speaker_died:
            return False
        writer.close()
        await self._hearing.until(lambda: self._writer is not writer)
        return True

    async def _end_hung(self, why: str) -> None:
        if await self._forget_dead():
            return
        problem = f"the training program hangs: {why}"
        self._table.dump()
        self._ready = False
        if self._process is None:
            remedy = "End it and start it again. If it was only busy, give pier.join a longer `patience`."
            self._fail(PierError(problem, remedy))
            return
        self._patience.double()
        log.error("%s; it is ended and started again", problem)
        await self._process.restart(DUMP_SECONDS)

    # --- the conversation ----------------------------------------------------------------------

    async def _ask(self, request: Request, patience: float, fault: str) -> Answer:
        self._request, self._answer = request, None
        try:
            if self._ready:  # otherwise it is handed out with the next Ready
                self._hand_out(request)
            await self._expect(lambda: self._answer is not None, patience, fault)
        finally:
            self._request = None
        assert self._answer is not None
        return self._answer

    def _hand_out(self, request: Request) -> None:
        if isinstance(request, messages.Train) and request.publish == "weights" and self.can("moments"):
            request = replace(request, moments=self._moments.due())
        self._say(request)

    async def _expect(self, seen: Callable[[], bool], patience: float, fault: str) -> None:
        await self._hearing.expect(seen, patience, lambda: self._silent(fault, patience))

    def _silent(self, fault: str, seconds: float) -> PierError:
        problem, remedy = f"the training program {fault} for {seconds:.0f} seconds", "Its own output says more."
        return self._process.command.explained(problem, remedy) if self._process else PierError(problem, remedy)

    def _fail(self, error: Exception) -> None:
        """Raise an error to whoever waits, unless there was one before."""
        self._hearing.error = self._hearing.error or error
        self._hearing.hear()

    def _say(self, message: messages.Message) -> None:
        if self._writer is not None:
            self._writer.write(messages.encode(message))
            if not isinstance(message, messages.Enough):  # the program goes on with what it does
                self._patience.said(message)

    def _enter(self) -> None:
        """Tell the program its place, as soon as it is settled, and once."""
        if self._place is None or self._placed:
            return
        self._placed = True
        place = replace(self._place, table=self._table.path)
        if self.can("moments"):
            place = replace(place, adam_m=self.adam_m.path, adam_v=self.adam_v.path)
        self._say(place)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopping:
            writer.close()
        try:
            while line := await reader.readline():
                match messages.decode(line):
                    case messages.Attach() as attach:
                        await self._welcome(attach, writer)
                    case message if writer is self._writer:
                        self._hear(message)
                    case _:
                        pass  # it has been refused
                self._hearing.hear()
        except (PierError, ValueError) as error:  # ValueError: a line longer than LINE_LIMIT
            self._fail(PierError(f"the training program broke the protocol: {error}"))
        except ConnectionError:
            pass  # it died with unread data
        except Exception as error:
            self._fail(error)
        finally:
            writer.close()
            if writer is self._writer:
                self._writer, self._ready, self._waits_to_publish = None, False, False
                self._patience.said(None)
                self._hearing.hear()
                self._lost()

    def _hear(self, message: messages.Message) -> None:
        if not isinstance(message, messages.Logged):
            self._patience.said(message)
        match message, self._request:
            case messages.Ready(), messages.Over() if self._ready:
                self._answer = message
            case messages.Ready(), request:
                self._ready = True
                if self._place is not None:
                    self._place = replace(self._place, publish=False)
                self.device.told(message)
                if request is not None:
                    self._hand_out(request)
            case messages.Tokenizing(), _:
                size = f"the files have {amount(message.size)}" if message.size else "a stream"
                log.info("tokenizing: %s of text read; %s", amount(message.read), size)
            case messages.Opened(), _:
                self._opened = message
                self._has_opened.set()
            case messages.Progress(), _ if self._on_progress is not None:
                self._on_progress(message)
            case messages.Logged(), _ if self._ready:
                self.on_log(message)
            case messages.Publishing(), messages.Train(publish="weights") as train if message.job == train.id:
                self._waits_to_publish = self.can("moments")
                self._let_publish()
            case messages.Done(), messages.Train() as train if message.job == train.id:
                if train.publish == "weights":
                    self._moments.accept(message.adam_step)
                self._answer, self.device.peak_bytes = message, message.peak_bytes
                if self._process is not None:
                    self._process.progressed()
            case messages.Evaluated(), messages.Evaluate() as request if message.id == request.id:
                self._answer = message
            case messages.Rated(), messages.Rate() as request if message.id == request.id:
                self._answer = message
            case messages.Left(), _:
                self._left = message
            case messages.Failed(), _:
                self._hearing.error = PierError(message.problem, message.remedy)

    async def _welcome(self, attach: messages.Attach, writer: asyncio.StreamWriter) -> None:
        if attach.version != messages.VERSION:
            raise PierError(
                f"it speaks version {attach.version}, this daemon {messages.VERSION}: install one version of Pier"
            )
        if self._process is not None:  # it may have been started again before the end of the last one was seen here
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hearing.until(lambda: self._writer is None), FOLLOW_SECONDS)
            await self._forget_dead()
        if self._writer is not None:
            more = "Under torchrun every rank calls pier.join, after torch.distributed.init_process_group()."
            writer.write(messages.encode(messages.Failed("another program is attached to this daemon already", more)))
            writer.close()
            return
        if self.attach is not None and attach.tensors != self.attach.tensors:
            raise PierError("it came back with another model")
        self._writer, self._placed, self._ready, self._left = writer, False, False, None
        if self._moments.torn:
            log.error("a worker died while it was writing AdamW's moments: they are restored, or begin at zero")
            await asyncio.to_thread(self._moments.restore)
        if self.attach is not None:
            self._tell_that_it_is_back()
        self.attach, self._moments.changed = attach, True
        self._patience.forget(attach.patience)
        self._table = RankTable(attach.ranks)
        if self._process is not None:
            self._process.came()
        self._enter()

    def _tell_that_it_is_back(self) -> None:
        if self._process is not None and self._process.command.log is not None:
            logfile = self._process.command.log
            log.warning("a worker died: this site's workers were started again; %s says why", logfile)
        else:
            log.warning("the training program is back, and does the inner steps of this round again")

    def _lost(self) -> None:
        if self._left:
            self._wait_for_another()
            return
        if self._process is not None:
            self._process.died()
            return
        if self._stopping or self._over or isinstance(self._request, messages.Over) or self._hearing.error:
            return
        why = "".join(f": {who}" for who in self._table.dead(1)[:1])  # torchrun ends rank 0 with any other
        self._fail(
            PierError(f"the training program has ended{why}", "Start it again: it continues from its last round.")
        )

    def _wait_for_another(self) -> None:
        """Have the site leave the run as its program has, unless the program joins it again."""
        if self._process is None:
            self._leave()
            return
        left = self._left
        loop = asyncio.get_running_loop()
        loop.call_later(REJOIN_SECONDS, lambda: self._leave() if self._left is left else None)

    async def _has_left(self) -> bool:
        """Whether the program, which has ended, had left the run before; then the site leaves it now."""
        with contextlib.suppress(TimeoutError):  # its last words may not have been read yet
            await asyncio.wait_for(self._hearing.until(lambda: self._writer is None), FOLLOW_SECONDS)
        if self._left:
            self._leave()
        return self._left is not None

    def _leave(self) -> None:
        if self._left and not self._stopping:
            self._over = True
            self.on_left(self._left.step)
