"""What trains at a site, as its loop sees it: the workers (inner/workers.py), or a double in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from pier_node.shared import SharedVector


class Step(Protocol):
    """What the workers say now and then during a job."""

    @property
    def step(self) -> int:
        """The inner step that is done, counted from 0 over the run."""

    @property
    def loss(self) -> float:
        """The site's training loss at that step."""

    @property
    def tokens(self) -> int:
        """Tokens of the job so far."""

    @property
    def seconds(self) -> float:
        """Seconds of the job so far."""


class Report(Protocol):
    """What the workers say of a finished job."""

    @property
    def tokens(self) -> int:
        """Tokens trained on."""

    @property
    def seconds(self) -> float:
        """Seconds that it took."""

    @property
    def adam_step(self) -> int:
        """AdamW steps behind the published moments."""


class Trainer(Protocol):
    """The workers of this site: see inner/workers.py."""

    outbox: SharedVector
    adam_m: SharedVector
    adam_v: SharedVector

    async def run(
        self,
        first_step: int,
        steps: int,
        sequences: int,
        payload: Literal["weights", "gradient"],
        load: SharedVector,
        adam_step: int | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> Report:
        """Train from the weights in `load`, publish into `outbox`; with `adam_step`, load the moments first."""

    async def evaluate(self, weights: SharedVector) -> float:
        """Validation loss of these weights, nats a token."""
