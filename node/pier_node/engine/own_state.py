"""The model and the optimizer of a site's owner, as `Site` moves them: the daemon never sees the optimizer's state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from pier_node.base.errors import PierError
from pier_node.engine import messages
from pier_node.engine.client import Link
from pier_node.engine.machines import Weights
from pier_node.engine.parameters import Vectors

KEPT_SECONDS = 300.0
"""How often the optimizer's state is written to the disk."""

log = logging.getLogger(__name__)


class OwnState:
    """The model and the optimizer of a site's owner.

    Args:
        vectors: the model's way in and out of shared memory.
        optimizer: None: it is not kept.
        link: to the daemon.
        evaluate: returns this rank's validation loss with the model's weights as they are, in nats per token; None: the
            program validates for itself.
    """

    adam_step = 0

    def __init__(
        self,
        vectors: Vectors,
        optimizer: Optimizer | None,
        link: Link,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        self._optimizer, self._link, self._ranks, self._evaluate = optimizer, link, link.ranks, evaluate
        self._weights, self._vectors = Weights(vectors, link.ranks), vectors
        self._outbox, self._file, self._kept_at = "", Path(), time.monotonic()
        self.can: Sequence[messages.Ability] = ["evaluate"] if evaluate else []

    @property
    def device(self) -> torch.device:
        """Where this rank has its part of the model."""
        return self._vectors.device

    def enter(self, place: messages.Attached) -> None:
        """Begin with the optimizer's state that this site has kept; a new site also with the program's weights."""
        self._outbox = place.outbox
        self._file = Path(place.folder) / f"optimizer-{self._ranks.own}-of-{self._ranks.count}.pt"
        self._restore()
        if place.publish:
            self._weights.store(self._outbox)
        self._link.send(messages.Ready())

    def load(self, job: messages.Train) -> None:
        """Take the weights; the optimizer goes on, unless it has to forget its state."""
        self._weights.load(job.load)
        if job.forget and self._optimizer is not None:
            self._optimizer.state.clear()
        if job.forget or time.monotonic() - self._kept_at > KEPT_SECONDS:
            self.keep()

    def publish(self, job: messages.Train) -> None:  # noqa: ARG002
        """Publish the weights."""
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
        """Load the weights."""
        self._weights.load(path)

    def keep(self) -> None:
        """Write the optimizer's state to the disk."""
        if self._optimizer is None:
            return
        self._kept_at = time.monotonic()
        part = self._file.with_suffix(".part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)  # on another machine than the daemon's, the first time
            torch.save({"kind": type(self._optimizer).__name__, "state": self._optimizer.state_dict()}, part)
            part.replace(self._file)
        except OSError as error:
            log.warning("the optimizer's state is not kept: %s: %s", part, error.strerror)

    def _restore(self) -> None:
        """Take the optimizer's state from the disk; what the program says of rates and decay stays."""
        if self._optimizer is None or not self._file.exists():
            return
        try:
            kept = torch.load(self._file, weights_only=True)
            if kept["kind"] != type(self._optimizer).__name__:
                raise ValueError(f"it is of {kept['kind']}")
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({**kept["state"], "param_groups": groups})
        except Exception as error:  # whatever is wrong with it, the site can go on without
            log.warning("the optimizer starts again: %s cannot be used: %s", self._file, error)
