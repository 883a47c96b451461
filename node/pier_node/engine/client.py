"""The program's end of the engine: what `import pier` gives to a training loop.

A site's program may have several ranks (torchrun). Rank 0 talks to the daemon and tells the others; every rank copies
its own part of the model between its device and the shared vectors of the host, parameter by parameter, so that no
device ever holds a second copy of the model. Sharded parameters (DTensor: FSDP2, tensor parallelism) move slice by
slice: nothing is gathered. docs/engine.md has the states.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from pier_node.base.errors import PierError
from pier_node.base.processes import SocketFolder
from pier_node.base.shared import attach
from pier_node.base.toml import read_toml
from pier_node.config.program import described
from pier_node.engine.messages import (
    Attach,
    Attached,
    Done,
    Failed,
    Message,
    Over,
    Progress,
    Publishing,
    Ready,
    Train,
    decode,
    encode,
)
from pier_node.engine.program import ENGINE_VARIABLE, VERSION

JOIN_VARIABLE = "PIER_JOIN"
"""Environment variable that settles which site of a simulation a process is (pier/simulation.py), as JSON."""
TOLD_SECONDS = 0.5
"""How often the daemon hears how far the inner steps are."""
KEPT_SECONDS = 300.0
"""How often the optimizer's state is written to the disk."""
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What DistributedDataParallel, torch.compile and others put into the names of parameters."""


class StopTraining(Exception):
    """Raised by `Site.step` when there is nothing more to train. `Site.finished` says whether the run is over."""


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that a run shares, by their names without wrappers: they require gradients; tied ones count once."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            found[name] = parameter
    if not found:
        raise PierError(
            "the model has no parameter that requires a gradient", "There is nothing that sites could share."
        )
    return found


class Vectors:
    """The model's way in and out of flat vectors of fp32 in host memory, in the order of `trained`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rank: int) -> None:
        self._parameters, self._rank = parameters, rank

    @property
    def device(self) -> torch.device:
        """Where this rank has its part of the model."""
        return next(iter(self._parameters.values())).device

    @property
    def length(self) -> int:
        """Elements of the whole model, however it is sharded."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    def load(self, path: str) -> None:
        """Take this rank's part of the weights from a shared vector."""
        flat = torch.from_numpy(attach(path, self.length))
        with torch.no_grad():
            for local, part, _ in self._parts(flat):
                local.copy_(part)

    def store(self, path: str) -> None:
        """Write this rank's part of the weights to a shared vector, unless a lower rank has the same."""
        flat = torch.from_numpy(attach(path, self.length))
        for local, part, first in self._parts(flat):
            if first:
                part.copy_(local.detach())

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Each parameter's local tensor, its place in `flat`, and whether this rank is the first that has it."""
        offset = 0
        for parameter in self._parameters.values():
            whole = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            data = parameter.data
            if not isinstance(data, DTensor):
                yield data, whole, self._rank == 0
                continue
            shape, start = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
            for dimension, (size, begin) in enumerate(zip(shape, start)):
                whole = whole.narrow(dimension, begin if size else 0, size)
            place = tuple(data.device_mesh.get_coordinate() or ())
            first = all(index == 0 for index, kind in zip(place, data.placements) if kind.is_replicate())
            yield data.to_local(), whole, first


class Link:
    """Rank 0's connection to the daemon; at other ranks what rank 0 has heard."""

    def __init__(self, stream: socket.socket | None) -> None:
        self._stream = stream
        self._file = stream.makefile("rb") if stream else None

    def send(self, message: Message) -> None:
        """Tell the daemon; ranks but 0 say nothing. Raises PierError: it has ended."""
        if self._stream is not None:
            try:
                self._stream.sendall(encode(message))
            except OSError as error:
                raise _daemon_gone() from error

    def receive(self) -> Message:
        """What the daemon says next, at every rank. Raises PierError: it refuses this program, or has ended."""
        line = [self._file.readline() if self._file else b""]
        if ranks() > 1:
            dist.broadcast_object_list(line, src=0)
        if not line[0]:
            raise _daemon_gone()
        message = decode(line[0])
        if isinstance(message, Failed):
            raise PierError(message.problem, message.remedy)
        return message

    def close(self) -> None:
        """Leave the daemon alone."""
        if self._stream is not None and self._file is not None:
            with contextlib.suppress(OSError):  # it has gone first
                self._stream.shutdown(socket.SHUT_RDWR)
            self._file.close()
            self._stream.close()


def _daemon_gone() -> PierError:
    return PierError("Pier's daemon has ended", "Start the program again: it goes on from the last round of the run.")


def ranks() -> int:
    """Processes of this program."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This one among them."""
    return dist.get_rank() if ranks() > 1 else 0


@dataclass
class Tally:
    """Inner steps since the last outer round."""

    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    began: float = field(default_factory=time.monotonic)
    told: float = 0.0


class Site:
    """This program's place in a run.

    Attributes:
        slot, slots: this site trains on part `slot` of `slots` of data that all sites share; see `shard`.
        total_steps: T, inner steps of the whole run.
        step_index: inner steps of the run that are done, at this site or by those that it joined.
        finished: the run is over, and the model is its result.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, link: Link, step_tokens: int, daemon: Daemon | None = None
    ) -> None:
        parameters = trained(model)
        self._vectors, self._optimizer, self._link, self._daemon = Vectors(parameters, rank()), optimizer, link, daemon
        self._step_tokens, self._tally, self._kept_at = step_tokens, Tally(), time.monotonic()
        self._hook: Any = None
        atexit.register(self.close)  # a program that ends without it must not leave its daemon waiting
        self.finished = False
        place = link.receive()
        if not isinstance(place, Attached):
            raise PierError("Pier's daemon could not enter the run", "What it printed says why.")
        if place.length != self._vectors.length:
            raise PierError(f"the run's model has {place.length} parameters, this one {self._vectors.length}")
        self._place = place
        self.slot, self.slots, self.total_steps = place.slot, place.slots, place.total_steps
        self._restore_optimizer()
        self._publish()
        link.send(Ready())
        self._job = self._next()

    @property
    def step_index(self) -> int:
        """Index in the whole run of the next inner step."""
        return self._job.first_step + self._tally.steps

    def step(self, tokens: int | None = None, loss: float | Tensor | None = None) -> None:
        """An inner step is done: the optimizer has changed the weights. Every H-th call is an outer round.

        Args:
            tokens: that this rank has trained on; None: `step_tokens`, shared among the ranks.
            loss: of the step, for people who look at the run.

        Raises:
            StopTraining: the run is over, or this site leaves it.
            PierError: the daemon has ended, or does not want this program any more.
        """
        tally = self._tally
        tally.steps += 1
        tally.tokens += self._step_tokens // ranks() if tokens is None else int(tokens)
        now = time.monotonic()
        last = tally.steps >= self._job.steps
        if loss is not None and (last or now - tally.told > TOLD_SECONDS):
            tally.loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if last:
            self._exchange()
        elif now - tally.told > TOLD_SECONDS:
            tally.told, all_tokens = now, tally.tokens * ranks()
            step = self._job.first_step + tally.steps - 1
            self._link.send(Progress(step, tally.loss, all_tokens, now - tally.began))

    def shard(self, data: Sequence[Any]) -> list[Any]:
        """This site's part of data that all sites have in the same order: every `slots`-th, from `slot` on."""
        return [data[index] for index in range(self.slot, len(data), self.slots)]

    def close(self) -> None:
        """Leave the run; a daemon that this program started ends politely."""
        if self._hook is not None:
            self._hook.remove()
        self._link.close()
        if self._daemon is not None:
            self._daemon.wait()

    def __enter__(self) -> Self:
        if self._optimizer is None:
            raise PierError("`with pier.join(...)` counts the optimizer's steps", "Give pier.join the optimizer too.")
        self._hook = self._optimizer.register_step_post_hook(lambda *_: self.step())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.close()
        return kind is StopTraining

    # --- a round -------------------------------------------------------------------------------

    def _exchange(self) -> None:
        tally, job = self._tally, self._job
        self._link.send(Publishing(job.id))
        self._publish()
        tokens, loss = _summed(tally, self._vectors.device)
        seconds = time.monotonic() - tally.began
        self._link.send(Done(job.id, tokens, loss, adam_step=0, seconds=seconds, peak_bytes=0))
        self._job = self._next()

    def _publish(self) -> None:
        self._vectors.store(self._place.outbox)
        if ranks() > 1:
            dist.barrier()

    def _next(self) -> Train:
        """Wait for the next inner steps, and load what they begin with. Raises StopTraining."""
        match message := self._link.receive():
            case Train():
                self._vectors.load(message.load)
                self._keep_optimizer()
                self._tally = Tally()
                return message
            case Over():
                self.finished = bool(message.load)
                if self.finished:
                    self._vectors.load(message.load)
                    if ranks() > 1:
                        dist.barrier()
                    self._link.send(Ready())
                else:
                    self._keep_optimizer(now=True)
                raise StopTraining("the run is over" if self.finished else "this site leaves the run")
        raise PierError(f"the daemon says {type(message).__name__} where inner steps were to come")

    # --- the optimizer is the program's own ----------------------------------------------------

    @property
    def _optimizer_file(self) -> Path:
        return Path(self._place.folder) / f"optimizer-{rank()}-of-{ranks()}.pt"

    def _keep_optimizer(self, now: bool = False) -> None:
        if self._optimizer is None or not (now or time.monotonic() - self._kept_at > KEPT_SECONDS):
            return
        self._kept_at = time.monotonic()
        part = self._optimizer_file.with_suffix(".part")
        torch.save(self._optimizer.state_dict(), part)
        part.replace(self._optimizer_file)

    def _restore_optimizer(self) -> None:
        if self._optimizer is None or not self._optimizer_file.exists():
            return
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):  # of another optimizer: it begins anew
            self._optimizer.load_state_dict(torch.load(self._optimizer_file, weights_only=True))


def _summed(tally: Tally, device: torch.device) -> tuple[int, float]:
    """Tokens of all ranks, and their mean loss; `device`: where the ranks' model is."""
    loss = tally.loss if math.isfinite(tally.loss) else 0.0
    if ranks() == 1:
        return tally.tokens, loss
    sums = torch.tensor([tally.tokens, loss], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return int(sums[0]), float(sums[1]) / ranks()


# --- finding the daemon ------------------------------------------------------------------------


class Daemon:
    """A daemon that this program has started: `pier-node start` beside rank 0."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = SocketFolder("program")
        self.socket = self._folder.path / "socket"
        command = [sys.executable, "-m", "pier_node.cli", "start", "--program-socket", str(self.socket), *options]
        self._process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)

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
                raise PierError("Pier's daemon did not start", "What it printed says why.")
            time.sleep(0.05)

    def wait(self) -> None:
        """Until it has ended, which it does when the program is gone or the run is over."""
        self._process.wait()
        self._folder.remove()


def join(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step_tokens: int,
    config: Mapping[str, Any] | str | Path | None = None,
    peers: str | Sequence[str] = (),
    token: str | None = None,
    token_file: str | Path | None = None,
    folder: str | Path = "pier-data",
    **options: Any,
) -> Site:
    """Make this program a site of a run: call it in every rank, after the model is wrapped, before the first step.

    Started by `pier-node start --exec`, it uses that daemon, and the arguments about the run are the command's to give.
    Otherwise it starts a daemon beside rank 0, which prints the command that makes the next site.

    Args:
        model: its parameters that require gradients are shared; LoRA adapters alone, if only they do.
        optimizer: its state is kept on the disk, and its steps are counted by `with pier.join(...)`.
        step_tokens: tokens that this site trains on in one inner step, at most; the same at every site.
        config: found a run: tables as of a run.toml, or its path; see docs/program.md.
        peers: join a run: addresses, HOST:PORT, of its sites.
        token, token_file: what the first site printed.
        folder: this site's data folder; with neither config nor peers it goes on with the run that is in there.
        options: any other option of `pier-node start`, such as listen="0.0.0.0:7700".

    Raises:
        PierError: the run cannot be joined; it says what is wrong and what to do.
    """
    if JOIN_VARIABLE in os.environ:
        simulated = json.loads(os.environ[JOIN_VARIABLE])
        config = None if "peers" in simulated else _with_sites(config, simulated["sites"])
        peers, token, token_file = simulated.get("peers", ()), None, simulated.get("token_file")
        folder, options = simulated["folder"], {"listen": simulated["listen"], "name": Path(simulated["folder"]).name}
    daemon, stream = None, None
    if rank() == 0:
        path = os.environ.get(ENGINE_VARIABLE)
        if path:
            stream = socket.socket(socket.AF_UNIX)
            stream.connect(path)
        else:
            words, environment = _start_options(peers, token, token_file, folder, options)
            daemon = Daemon(words, environment)
            stream = daemon.connect()
    link = Link(stream)
    tensors = list(described((name, tuple(parameter.shape)) for name, parameter in trained(model).items()))
    link.send(Attach(VERSION, tensors, step_tokens, "" if config is None else json.dumps(_read(config))))
    return Site(model, optimizer, link, step_tokens, daemon)


def _read(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else read_toml(Path(config), "pier-node init")


def _with_sites(config: Mapping[str, Any] | str | Path | None, sites: int) -> dict[str, Any]:
    tables = _read(config or {})
    return {**tables, "run": {**tables.get("run", {}), "sites": sites}}


def _start_options(
    peers: str | Sequence[str],
    token: str | None,
    token_file: str | Path | None,
    folder: str | Path,
    options: Mapping[str, Any],
) -> tuple[list[str], dict[str, str]]:
    words = ["--data", str(folder)]
    for peer in [peers] if isinstance(peers, str) else peers:
        words += ["--peers", peer]
    if token_file is not None:
        words += ["--token-file", str(token_file)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return words, {"PIER_TOKEN": token} if token else {}
