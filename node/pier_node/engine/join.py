"""`pier.join`: how a program finds its daemon, or starts one beside itself, and what a site does with its model.

`Site` moves the program's weights and its optimizers' state; the daemon never sees the latter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from pier_node.base.errors import PierError
from pier_node.base.processes import SocketFolder, outlive_parent
from pier_node.base.shared import Vector
from pier_node.base.toml import read_toml
from pier_node.engine import messages
from pier_node.engine.client import DaemonConnection, Site, daemon_gone, ready
from pier_node.engine.machines import Ranks, Weights
from pier_node.engine.optimizers import Optimizers
from pier_node.engine.parameters import Vectors
from pier_node.engine.training_process import ENGINE_VARIABLE, PROGRAM_VARIABLE

JOIN_VARIABLE = "PIER_JOIN"
"""Environment variable that settles which site of a simulation a process is (pier/simulation.py), as JSON."""
END_SECONDS = 5.0
"""What a program gets to end by itself when the daemon that started it has died, and the other way round."""
WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")
"""Packages that wrap optimizers, and keep it in `optimizer`."""
LEAVE_SECONDS = 60.0
"""What a daemon gets to leave its run politely after its program has."""
KEPT_SECONDS = 300.0
"""How often the optimizers' state is written to the disk."""

_joined = WeakValueDictionary[tuple[int, str], Site]()
"""The sites of a process, by its id and their daemon's socket or their folder; a fork inherits those of its parent."""

log = logging.getLogger(__name__)


class Daemon:
    """A daemon that this program has started: `pier-node start` beside rank 0."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = SocketFolder("program")
        self.socket = self._folder.path / "socket"
        environment = {**os.environ, **environment, PROGRAM_VARIABLE: str(os.getpid())}
        command = [sys.executable, "-m", "pier_node.cli", "start", "--program-socket", str(self.socket), *options]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def connect(self) -> socket.socket:
        """The connection to it. Raises PierError: it has ended, and has said why."""
        while True:
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect(str(self.socket))
                return stream
            except OSError:
                stream.close()
            if self._process.poll() is not None:
                raise PierError(
                    "Pier's daemon did not start",
                    "What it printed says why: above, or in the terminal of a notebook's server if its kernel shows no "
                    "output of other programs.",
                )
            time.sleep(0.05)

    def wait(self, finished: bool) -> None:
        """Until it has ended; after a finished run it may have to serve other sites for a while."""
        try:
            self._process.wait(None if finished else LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.remove()

    def give_up(self) -> None:
        """End it, because the run cannot be joined; if it is the one who says so, it ends by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.terminate()
        self.wait(finished=False)


class OwnState:
    """The model and the optimizers of a site's owner.

    Args:
        vectors: the model's way in and out of shared memory.
        optimizers: whose state is kept.
        link: to the daemon.
        evaluate: returns this rank's validation loss with the model's weights as they are, in nats per token; None: the
            program validates for itself.
    """

    adam_step = 0

    def __init__(
        self,
        vectors: Vectors,
        optimizers: Sequence[Optimizer],
        link: DaemonConnection,
        evaluate: Callable[[], float] | None,
    ) -> None:
        self._optimizers = Optimizers(optimizers, vectors.parameters)
        self._link, self._ranks, self._evaluate = link, link.ranks, evaluate
        self._weights, self._vectors = Weights(vectors, link.ranks), vectors
        self._outbox, self._file, self._kept_at = "", Path(), time.monotonic()
        self._result: list[Vector | None] = []
        self.can: Sequence[messages.Ability] = ["evaluate"] if evaluate else []

    @property
    def device(self) -> torch.device:
        """Where this rank has its part of the model."""
        return self._vectors.device

    def enter(self, place: messages.Attached) -> None:
        """Begin with the optimizers' state that this site has kept; a new site also with the program's weights."""
        self._outbox = place.outbox
        self._file = Path(place.folder) / f"optimizer-{self._ranks.own}-of-{self._ranks.count}.pt"
        self._optimizers.restore(self._file)
        if place.publish:
            self._weights.store(self._outbox)
        self._link.send(messages.Ready())

    def load(self, job: messages.Train) -> None:
        """Take the weights; the optimizers go on, unless they have to forget their state."""
        self._weights.load(job.load)
        if job.forget:
            self._optimizers.forget()
        if job.forget or time.monotonic() - self._kept_at > KEPT_SECONDS:
            self.keep()

    def publish(self, job: messages.Train) -> None:  # noqa: ARG002
        """Publish the weights."""
        self._vectors.check()
        self._weights.store(self._outbox)

    def answer(self, request: messages.Evaluate | messages.Rate) -> None:
        """Tell the mean over the ranks of the validation loss with these weights, which stay loaded."""
        if self._evaluate is None or not isinstance(request, messages.Evaluate):
            raise PierError(f"this program cannot {type(request).__name__.lower()}")
        self._weights.load(request.weights)
        with torch.no_grad():
            loss = float(self._evaluate())
        (total,) = self._ranks.sums(loss)
        self._link.send(messages.Evaluated(request.id, total / self._ranks.count))

    def finish(self, path: str) -> None:
        """Load the weights, and keep them: the daemon may be gone when they are wanted again."""
        if not self._result:
            self._result = [self._weights.mapped(path)]
        self._weights.take(*self._result)

    def keep(self) -> None:
        """Write the optimizers' state to the disk."""
        self._kept_at = time.monotonic()
        self._optimizers.keep(self._file)


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step_tokens: SupportsIndex,
    config: Mapping[str, Any] | str | Path | None = None,
    peers: str | Sequence[str] = (),
    token: str | None = None,
    token_file: str | Path | None = None,
    folder: str | Path = "pier-data",
    patience: float = 300.0,
    evaluate: Callable[[], float] | None = None,
    **options: Any,
) -> Site:
    """Make this program a site of a run: call it in every rank, after the model is wrapped, before the first step.

    Started by `pier-node start --exec`, it uses that daemon, and what the command says of the run counts. Otherwise it
    starts a daemon beside rank 0, which prints the command that makes the next site.

    Args:
        model: its parameters that require gradients are shared; LoRA adapters alone, if only they do.
        optimizer: its state is kept on the disk, and its steps are counted by `with pier.join(...)`. A list of several,
            in the order in which they step: all their states are kept, and the steps of the last one are counted.
        step_tokens: tokens that this site trains on in one inner step, at most; the same at every site.
        config: found a run: tables as of a run.toml, or its path; see docs/program.md.
        peers: join a run: addresses, HOST:PORT, of its sites.
        token, token_file: what the first site printed.
        folder: this site's data folder; with neither config nor peers it continues the run that is in there.
        patience: seconds that may pass between two steps, such as for a validation or a checkpoint, before the program
            counts as hung. Long steps make it longer; while their length is not known yet, it is half an hour.
        evaluate: called in every rank, without gradients, when the run wants the validation loss of the weights that
            the model then has; returns this rank's, in nats per token. It may be called before this returns, and may
            take half an hour, or `patience` if that is longer. None: the run shows none.
        options: any other option of `pier-node start`, such as listen="0.0.0.0:7700"; flags are True.

    Raises:
        PierError: the run cannot be joined; it says what is wrong and what to do.
    """
    whole_tokens, optimizers = _whole(step_tokens), _plain(optimizer)
    ranks = Ranks()
    vectors = Vectors(model, ranks.own)
    if JOIN_VARIABLE in os.environ:
        simulated = json.loads(os.environ[JOIN_VARIABLE])
        config = None if "peers" in simulated else _with_sites(config, simulated["sites"])
        peers, token, token_file = simulated.get("peers", ()), None, simulated.get("token_file")
        folder, options = simulated["folder"], {"listen": simulated["listen"], "name": Path(simulated["folder"]).name}
    words, tables = ["--data", str(folder), *_words(peers, token_file, options)], _as_json(config)
    place = os.getpid(), os.environ.get(ENGINE_VARIABLE, str(Path(folder).resolve()))
    if (before := _joined.get(place)) and not before.closed:  # a notebook's cell, run again after an error
        raise PierError(f"this process is a site in {place[1]} already", "Close that one first: site.close().")
    daemon, stream = _connected(words, token) if ranks.own == 0 else (None, None)
    link = DaemonConnection(stream, ranks)
    with _given_up(daemon, link):
        own = OwnState(vectors, optimizers, link, evaluate)
        tensors, version = list(vectors.tensors), messages.VERSION
        link.send(messages.Attach(version, tensors, whole_tokens, tables, ranks.count, float(patience), [*own.can]))
        site = _joined[place] = Site(own, link, whole_tokens, optimizers, daemon.wait if daemon else lambda _: None)
    if ENGINE_VARIABLE in os.environ and ranks.here:
        end_with(site.daemon)
    return site


def _whole(step_tokens: SupportsIndex) -> int:
    """`step_tokens` as Python's own number, whatever counted them."""
    if isinstance(step_tokens, SupportsIndex) and (tokens := operator.index(step_tokens)) > 0:
        return tokens
    raise PierError(f"step_tokens = {step_tokens!r}: a step has tokens", "Give the most that a step has here: an int.")


def _plain(given: Any) -> list[Optimizer]:
    """The optimizers themselves, inside what Accelerate or Lightning wrap them in."""
    optimizers = given if isinstance(given, Sequence) else [] if given is None else [given]
    return [_unwrapped(optimizer) for optimizer in optimizers]


def _unwrapped(optimizer: Any) -> Optimizer:
    while type(optimizer).__module__.partition(".")[0] in WRAPPERS:
        optimizer = optimizer.optimizer
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise PierError(
        f"pier.join takes a torch.optim.Optimizer, or a list of several, and not a {type(optimizer).__name__}",
        "Give those that train the model, in the order in which they step; None, if nothing of them is to be kept.",
    )


@contextlib.contextmanager
def _given_up(daemon: Daemon | None, link: DaemonConnection | None = None) -> Iterator[None]:
    """End the daemon that was started for this program, if the run cannot be joined."""
    try:
        yield
    except BaseException:
        if link is not None:
            link.close()
        if daemon is not None:
            daemon.give_up()
        raise


def _connected(words: Sequence[str], token: str | None) -> tuple[Daemon | None, socket.socket]:
    """The daemon that this program starts with these options, unless one has started it; and the connection to it."""
    if ENGINE_VARIABLE not in os.environ:
        daemon = Daemon(words, {"PIER_TOKEN": token} if token else {})
        with _given_up(daemon):
            return daemon, daemon.connect()
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(os.environ[ENGINE_VARIABLE])
    except OSError as error:
        stream.close()
        raise daemon_gone() from error
    return None, stream


def end_with(daemon: int) -> None:
    """Have this process end soon after the daemon that started it: a rank could wait for the others for ever.

    A step that is under way gets END_SECONDS, so that `Site.step` can raise its error first.
    """
    outlive_parent()  # which would be SIGKILL without a word, if this is not one of several ranks

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):
            ready(os.pidfd_open(daemon))
        log.error("Pier's daemon has died, and its training program ends too: run the same `pier-node start` again")
        time.sleep(END_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, name="pier-daemon", daemon=True).start()


def _read(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else read_toml(Path(config), "pier-node init")


def _as_json(config: Mapping[str, Any] | str | Path | None) -> str:
    try:
        return "" if config is None else json.dumps(_read(config))
    except TypeError as error:
        raise PierError(
            f"config: {error}", "Give what a run.toml can hold: strings, numbers, truth values, lists and tables."
        ) from error


def _with_sites(config: Mapping[str, Any] | str | Path | None, sites: int) -> dict[str, Any]:
    tables = _read(config or {})
    return {**tables, "run": {**tables.get("run", {}), "sites": sites}}


def _words(peers: str | Sequence[str], token_file: str | Path | None, options: Mapping[str, Any]) -> list[str]:
    words = [word for peer in ([peers] if isinstance(peers, str) else peers) for word in ("--peers", peer)]
    if token_file is not None:
        words += ["--token-file", str(token_file)]
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
