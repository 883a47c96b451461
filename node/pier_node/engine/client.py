"""The program's end of the engine: what a training loop has of its site.

A site's program may have several ranks (torchrun). Rank 0 talks to the daemon and tells the others. docs/engine.md has
the states, engine/program.py is the daemon's end, engine/join.py finds the daemon. Pier's own trainer is such a program
too (trainer/worker.py): what differs between programs is how their weights and optimizers come and go, `TrainingState`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, SupportsFloat

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from pier_node.base.errors import PierError
from pier_node.engine import messages
from pier_node.engine.machines import Ranks, peak_bytes
from pier_node.engine.ranks import COLUMNS, STEPS, enter

TOLD_SECONDS = 0.5
"""How often the daemon hears how far the inner steps are."""
LOOK_SECONDS = 1.0
"""How often ranks look whether the site has to leave. It takes all of them, so that each looks after the same step."""
LOOKS = 8
"""How often they look in a round at least: a result may arrive (`Enough`)."""

log = logging.getLogger(__name__)


class StopTraining(Exception):
    """Raised by `Site.step` when there is nothing more to train. `Site.finished` says whether the run is over."""


@dataclass(frozen=True)
class State:
    """How a run stood when the site began its current inner steps, which it does once a round.

    Attributes:
        round: the last outer round that was committed; 0: none yet.
        step: index in the whole run of the next inner step, now.
        sites: live sites of the run, this one included.
        slot: this site's part of data that all sites share; see `Site.shard`.
        losses: the last training loss of other sites, by the site's name; sites that have told none are missing.
    """

    round: int
    step: int
    sites: int
    slot: int
    losses: Mapping[str, float]


class DaemonConnection:
    """Rank 0's connection to the daemon; at other ranks what rank 0 has heard.

    Args:
        stream: None: this is another rank.

    Attributes:
        ranks: those that train the model together.
    """

    def __init__(self, stream: socket.socket | None, ranks: Ranks) -> None:
        self._stream, self.ranks = stream, ranks
        self._heard = b""

    def send(self, message: messages.Message) -> None:
        """Tell the daemon; ranks but 0 say nothing. Raises PierError: it has ended."""
        if self._stream is not None:
            try:
                self._stream.sendall(messages.encode(message))
            except OSError as error:
                raise daemon_gone() from error

    def receive(self) -> messages.Message:
        """What the daemon says next, at every rank. Raises PierError: it refuses this program, or has ended."""
        line = self.ranks.share(self._line(self._stream) if self._stream is not None else b"")
        if not line:
            raise daemon_gone()
        message = messages.decode(line)
        if isinstance(message, messages.Failed):
            raise PierError(message.problem, message.remedy)
        return message

    def _line(self, stream: socket.socket) -> bytes:
        """The next line; b"": the daemon has ended."""
        while b"\n" not in self._heard:
            try:
                more = stream.recv(messages.LINE_LIMIT)
            except OSError:
                return b""
            if not more:
                return b""
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def look(self, again: int) -> tuple[bool, int]:
        """Whether `receive` would not have to wait, and rank 0's `again`; every rank hears the same."""
        stream = self._stream
        waiting = stream is not None and (b"\n" in self._heard or ready(stream, 0))
        news, steps = self.ranks.share(b"%d %d" % (waiting, again)).split()
        return news == b"1", int(steps)

    def close(self) -> None:
        """Leave the daemon alone."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # it has gone first
                self._stream.shutdown(socket.SHUT_RDWR)
            self._stream.close()


def ready(file: int | socket.socket, milliseconds: int | None = None) -> bool:
    """Whether a descriptor becomes readable, or ends, in that time; None: however long it takes.

    select(2) takes only descriptors below 1024, and a program may have opened more files than that.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(milliseconds))


def daemon_gone() -> PierError:
    """The error of a program whose daemon does not answer."""
    return PierError(
        "Pier's daemon has ended",
        "What it printed last says why; if it was killed, `dmesg` says whether memory ran out. "
        "Start this site again by the same command: it continues from the last committed round.",
    )


@contextlib.contextmanager
def _sharing() -> Iterator[None]:
    """Meanwhile the daemon's memory is mapped. Raises PierError: it has ended, and its memory with it."""
    try:
        yield
    except FileNotFoundError as error:
        if not str(error.filename).startswith("/proc/"):
            raise
        raise daemon_gone() from error


class _Steps:
    """Inner steps since the last outer round.

    Attributes:
        done: how many.
        tokens: that this rank has trained on in them.
        loss, gradient_norm: of the last one for which they were read; NaN: the loop does not tell.
        began, told: when the first one began, and when the daemon last heard of one.
        look_at: after how many all ranks look whether there is news.
    """

    def __init__(self) -> None:
        self.done, self.tokens = 0, 0.0
        self.loss = self.gradient_norm = math.nan
        self.began = self._looked = time.monotonic()
        self.told, self.look_at = 0.0, 1
        self._losses, self._finite, self._looked_at, self._warned = 0, torch.zeros(()), 0, False
        self._last: float | Tensor = math.nan
        self._norm: float | Tensor = math.nan

    def saw(self, loss: float | Tensor | None, gradient_norm: float | Tensor | None) -> None:
        """Note what a step came to, without waiting for the device that computes it."""
        if gradient_norm is not None:
            self._norm = gradient_norm
        if loss is None:
            return
        self._last = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss)
        self._finite = self._finite.to(self._last.device) + self._last.isfinite()
        self._losses += 1

    def read(self, first_step: int) -> None:
        """Wait for what the last step came to, and warn of the first loss that was not finite."""
        self.gradient_norm = float(self._norm)
        if not self._losses:
            return
        self.loss = float(self._last)
        if not math.isfinite(self.loss) and not self._warned:
            self._warned = True
            log.warning("the loss is not finite since about inner step %d", first_step + int(self._finite))

    @property
    def losses(self) -> tuple[int, int]:
        """How many losses this rank was told, and how many of them were finite."""
        return self._losses, int(self._finite)

    def steps_until_look(self, steps: int) -> int:
        """How many fit into LOOK_SECONDS, as fast as those since the last look; at most `steps` / LOOKS."""
        now = time.monotonic()
        seconds = (now - self._looked) / max(self.done - self._looked_at, 1)
        self._looked, self._looked_at = now, self.done
        return max(1, min(int(LOOK_SECONDS / max(seconds, 1e-4)), steps // LOOKS))


class TrainingState(Protocol):
    """A model and its optimizer. All ranks call the same methods in the same order.

    Attributes:
        can: what the daemon may ask for besides inner steps.
    """

    can: Sequence[messages.Ability]

    @property
    def adam_step(self) -> int:
        """Number of AdamW steps behind the moments that were published; 0: the program keeps its optimizer."""

    @property
    def device(self) -> torch.device:
        """Where this rank has its part of the model."""

    def enter(self, place: messages.Attached) -> None:
        """Take the site's place in the run, and tell the daemon `Ready`."""

    def load(self, job: messages.Train) -> None:
        """Take what the inner steps of `job` begin with."""

    def publish(self, job: messages.Train) -> None:
        """Write what they have come to into the shared vectors; return when all ranks have."""

    def answer(self, request: messages.Evaluate | messages.Rate) -> None:
        """Do what one of the abilities is for, and tell the daemon."""

    def finish(self, path: str) -> None:
        """Load the model of the finished run from a shared vector; if called again, again."""

    def keep(self) -> None:
        """Keep what the daemon does not: the site leaves."""


class Site:
    """This program's place in a run.

    Args:
        training: the model and its optimizer.
        link: to the daemon, which has been told what the program is.
        step_tokens: tokens of an inner step at this site, at most.
        optimizers: in the order in which they step; `with` counts the steps of the last one.
        left: called when the site has left its daemon alone, with whether the run is finished.

    Attributes:
        slot, slots: this site trains on part `slot` of `slots` of data that all sites share; see `shard`.
        total_steps: T, inner steps of the whole run.
        finished: the run is over, and the model is its result.
        closed: it has left its daemon alone.
        daemon: process id of the daemon.
    """

    def __init__(
        self,
        training: TrainingState,
        link: DaemonConnection,
        step_tokens: int,
        optimizers: Sequence[Optimizer] = (),
        left: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._training, self._link, self._ranks = training, link, link.ranks
        self._step_tokens, self._optimizers, self._left = step_tokens, optimizers, left
        self._steps, self._logged, self._hooks = _Steps(), messages.Waiting(), list[Any]()
        self.finished = self.closed = self._between = self._told_excess = False
        self._process = os.getpid()
        place = link.receive()
        if not isinstance(place, messages.Attached):
            raise PierError("Pier's daemon could not enter the run", "What it printed says why.")
        ranks = self._ranks
        self._row = enter(place.table, ranks.count, ranks.own) if ranks.here else np.zeros(COLUMNS, np.float32)
        self.slot, self.slots, self.total_steps = place.slot, place.slots, place.total_steps
        self.daemon = place.daemon
        training.enter(place)
        self._over = self._result = ""
        self._job = messages.Train(0, self.total_steps, 0, "", forget=False, round=0, sites=1, losses={})
        with contextlib.suppress(StopTraining), _sharing():  # `step` raises it again
            self._next()
        atexit.register(self._end_with_program)  # its daemon must not be left waiting

    @property
    def step_index(self) -> int:
        """Index in the whole run of the next inner step. It jumps when other sites were ahead."""
        return self._job.first_step + self._steps.done

    @property
    def state(self) -> State:
        """How the run stands: round, step, sites, slot, and the losses of other sites."""
        return State(self._job.round, self.step_index, self._job.sites, self.slot, self._job.losses)

    def step(
        self,
        tokens: SupportsFloat | None = None,
        loss: float | Tensor | None = None,
        gradient_norm: float | Tensor | None = None,
    ) -> None:
        """An inner step is done: the optimizer has changed the weights. Every H-th call is an outer round.

        Args:
            tokens: that this rank has trained on; its share of them, if several ranks train on the same; None: the same
                share of `step_tokens` as every rank.
            loss: of the step, for people who look at the run.
            gradient_norm: likewise, before it was clipped.

        Raises:
            StopTraining: the run is over, or this site leaves it.
            PierError: the daemon has ended, or does not want this program any more; or `with` counts the steps.
        """
        if self._hooks:
            raise PierError(
                "`with pier.join(...)` counts the optimizer's steps, and site.step would count each of them twice",
                "Leave out either of them. In the `with` form, site.log takes what people are to see.",
            )
        self._count(tokens, loss, gradient_norm)

    def _count(
        self,
        tokens: SupportsFloat | None = None,
        loss: float | Tensor | None = None,
        gradient_norm: float | Tensor | None = None,
    ) -> None:
        if self.finished:  # of a run that was over before this step
            self._training.finish(self._result)
        self._check_over()
        steps, now = self._steps, time.monotonic()
        own = self._step_tokens / self._ranks.count if tokens is None else float(tokens)
        if not 0 <= own < math.inf:
            raise PierError(f"site.step(tokens={own}): no step has so many", "Give what this rank has trained on.")
        steps.done += 1
        self._row[STEPS] += 1
        steps.tokens += own
        steps.saw(loss, gradient_norm)
        last, tell = steps.done >= self._job.steps, now - steps.told > TOLD_SECONDS
        if last or tell:
            steps.read(self._job.first_step)
            self._tell_logged()
        if tell:
            self._tell_progress(now)
        with _sharing():
            if last:
                self._exchange()
            elif steps.done >= steps.look_at:
                news, again = self._link.look(steps.steps_until_look(self._job.steps))
                steps.look_at += again
                if news:
                    self._interrupted()

    def log(self, metrics: Mapping[str, str | SupportsFloat]) -> None:
        """Note metrics of your own, such as `{"accuracy": 0.5}`: the site's trackers and its status show them.

        They are told with the steps, twice a second at most, and when the site is closed; of a name that is logged more
        often the last value counts. Ranks but 0 log nothing. What does not fit is left out, with a warning.

        Args:
            metrics: by name, at most 64 of them: finite numbers, or texts of at most 200 characters. Names may have up
                to 64 characters between slashes, which group them: "valid/accuracy".
        """
        if self._ranks.own == 0:
            self._logged.add(metrics, self.step_index)

    def shard(self, data: Sequence[Any]) -> list[Any]:
        """This site's part of data that all sites have in the same order: every `slots`-th, from `slot` on."""
        return [data[index] for index in range(self.slot, len(data), self.slots)]

    def close(self) -> None:
        """Keep the optimizer's state, and leave the run; a daemon that this program started ends politely."""
        try:
            if not (self._over or self.closed) and self._process == os.getpid():
                self._training.keep()
        finally:
            self._leave(by_itself=True)

    def _end_with_program(self) -> None:
        """Close, if the program has not, unless an error ends it."""
        error = getattr(sys, "last_value", None)
        self._end(type(error) if error else None)

    def _end(self, kind: type[BaseException] | None) -> None:
        if kind is None:
            self.close()
        else:  # an optimizer that was interrupted in its step is not worth keeping
            self._leave(by_itself=kind in (StopTraining, KeyboardInterrupt))

    def _leave(self, by_itself: bool) -> None:
        if self.closed or self._process != os.getpid():  # a fork ends with a copy of this, and must end only itself
            return
        self.closed = True
        atexit.unregister(self._end_with_program)  # it would keep the model in memory
        while self._hooks:
            self._hooks.pop().remove()
        with contextlib.suppress(PierError):  # the daemon has gone first
            self._tell_logged()
            if by_itself and not self._over:
                self._link.send(messages.Left(self.step_index))
        self._link.close()
        self._left(self.finished)

    def __enter__(self) -> Self:
        if not self._optimizers:
            raise PierError("`with pier.join(...)` counts the optimizer's steps", "Give pier.join the optimizer too.")
        # Before the step too: one more would change the model of a run that is over.
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._check_over()))
        self._hooks.append(self._optimizers[-1].register_step_post_hook(lambda *_: self._count()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._end(None if isinstance(error, SystemExit) and not error.code else kind)
        return kind is StopTraining

    # --- a round -------------------------------------------------------------------------------

    def _exchange(self) -> None:
        steps, job, training = self._steps, self._job, self._training
        self._between = True
        self._link.send(messages.Publishing(job.id))
        training.publish(job)
        tokens, losses, finite = self._ranks.sums(steps.tokens, *steps.losses)
        if "moments" not in training.can:  # Pier's own trainer takes larger steps in a solo start
            self._check_tokens(tokens / steps.done)
        self._link.send(
            messages.Done(
                job.id,
                steps=steps.done,
                tokens=round(tokens),
                adam_step=training.adam_step,
                seconds=time.monotonic() - steps.began,
                peak_bytes=peak_bytes(training.device),
                diverged="moments" not in training.can and 2 * finite < losses,
            )
        )
        self._next()
        self._between = False

    def _check_tokens(self, of_a_step: float) -> None:
        if of_a_step > self._step_tokens + 0.5 and not self._told_excess and self._ranks.own == 0:
            self._told_excess = True
            log.warning(
                "a step had %.0f tokens here, and step_tokens is %d: more do not count when sites are averaged",
                *(of_a_step, self._step_tokens),
            )

    def _tell_progress(self, now: float) -> None:
        steps = self._steps
        steps.told, tokens, seconds = now, round(steps.tokens * self._ranks.count), now - steps.began
        step, loss, norm = self.step_index - 1, steps.loss, steps.gradient_norm
        self._link.send(messages.Progress(step, loss, tokens, seconds, norm))

    def _tell_logged(self) -> None:
        if metrics := self._logged.take():
            self._link.send(messages.Logged(self._logged.step, metrics))

    def _interrupted(self) -> None:
        """The daemon has said something in the middle of inner steps. Raises StopTraining."""
        match message := self._link.receive():
            case messages.Over():
                self._finish(message)
                self._check_over()
            case messages.Enough():
                if message.job == self._job.id:
                    self._exchange()
            case _:
                raise PierError(f"the daemon says {type(message).__name__} in the middle of inner steps")

    def _next(self) -> None:
        """Wait for the next inner steps, and load what they begin with. Raises StopTraining."""
        while not isinstance(message := self._link.receive(), messages.Train):
            match message:
                case messages.Over():
                    self._finish(message)
                    self._check_over()
                case messages.Enough():
                    pass  # they were done already
                case messages.Evaluate() | messages.Rate() if self._training.can:
                    self._training.answer(message)
                case _:
                    raise PierError(f"the daemon says {type(message).__name__} where inner steps were to come")
        # The clock runs already: loading the weights takes time of the device's.
        self._steps, self._job = _Steps(), message
        self._training.load(message)

    def _finish(self, over: messages.Over) -> None:
        self.finished = bool(over.load)
        self._over = "the run is over" if self.finished else "this site leaves the run"
        if self.finished:
            self._result = over.load
            self._training.finish(self._result)
        else:
            self._training.keep()
        self._ranks.meet()
        with contextlib.suppress(PierError):
            self._link.send(messages.Ready())

    def _check_over(self) -> None:
        if self._over:
            raise StopTraining(self._over)
        again = "Close this site, and call pier.join again: it continues from the last committed round."
        if self.closed:
            raise PierError("this site has left the run: it was closed", again)
        if self._between:  # Ctrl+C in a notebook, whose loop is then started again
            raise PierError("this site was interrupted while it exchanged weights, so it has none to go on with", again)
