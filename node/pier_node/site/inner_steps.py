"""The inner steps of a site: how many it does before a round, the interface to what trains, and AdamW's moments.

A site does all inner steps of a round, fewer if it is slow (`outer.adaptive_steps`), and only the remaining ones if it
is late. Sites of unequal speed finish together if each does steps in proportion to its speed; the mean of their updates
is weighted by tokens.

What trains is the program of engine/program.py, or a test double in a simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from pier_node.base.shared import SharedVector
from pier_node.config.run import OuterSection, RunConfig
from pier_node.engine import messages
from pier_node.outer.schedule import Kind, RoundPlan
from pier_node.rounds.progress import Progress
from pier_proto.v1.peer_pb2 import Pulse

ALIKE = 0.85
"""Sites with at least this fraction of the fastest site's speed do all steps: smaller differences are noise."""
LEAST = 1 / 8
"""Fraction of the steps that even the slowest site does: a site that learns nothing costs more than it contributes."""


def steps_worth_doing(
    plan: RoundPlan, outer: OuterSection, progress: Progress, others: Collection[Pulse], late: bool
) -> int:
    """Number of inner steps to do before the round of `plan`.

    Args:
        progress: this site's progress. Steps of this round that it has done already, before a restart or before a
            result arrived, are not done again.
        others: the pulses of the other participants.
        late: this site has just caught up. It does as many steps as the furthest of the other sites has left.
    """
    if plan.kind in (Kind.SOLO, Kind.SYNC):
        return plan.steps
    done = progress.inner_step - plan.first_step
    if late:
        done = max(done, *(pulse.inner_step - plan.first_step for pulse in others), 0)
    share = pace(progress.tokens_per_second, others) if outer.adaptive_steps else 1.0
    return min(max(plan.steps - done, 0), max(int(share * plan.steps), 1))  # better early than late


def pace(speed: float, others: Collection[Pulse]) -> float:
    """This site's speed as a fraction of the fastest site's, from LEAST to 1; 1 as long as it is not known.

    Args:
        speed: of this site, in tokens per second.
    """
    fastest = max((pulse.tokens_per_second for pulse in others), default=0.0)
    if not speed or not fastest or speed >= ALIKE * fastest:
        return 1.0
    return max(speed / fastest, LEAST)


class Trainer(Protocol):
    """What trains at this site: see engine/program.py."""

    @property
    def outbox(self) -> SharedVector:
        """What it published last: weights, or a mean gradient; shape [parameters]."""

    @property
    def adam_m(self) -> SharedVector:
        """AdamW's first moments as it published them; empty if it keeps its optimizer to itself."""

    @property
    def adam_v(self) -> SharedVector:
        """The second moments, as `adam_m`."""

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
        """Train from the weights in `load` and publish into `outbox`; with `adam_step`, load the moments first."""

    def enough(self) -> None:
        """Let the inner steps under way, if there are any, be the last ones of their job."""

    async def evaluate(self, weights: SharedVector) -> float:
        """Validation loss of these weights, in nats per token."""


class Trained(NamedTuple):
    """What a job came to: tokens that were trained on, and how many of its steps are left."""

    tokens: int = 0
    left: int = 0


class InnerSteps:
    """Runs training jobs on the workers and accounts for them in `progress`.

    Attributes:
        adam_step: number of AdamW steps behind the moments; 0: there are none yet.
        resting: the workers are between jobs, so nothing writes to what they publish.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, progress: Progress) -> None:
        self._config, self._trainer, self._progress = config, trainer, progress
        self.adam_step = 0
        self.resting = True
        self._load_moments = False

    async def train(
        self, plan: RoundPlan, steps: int, start: SharedVector, until: asyncio.Task[Any] | None = None
    ) -> Trained:
        """Do the last `steps` inner steps of a round from the weights in `start`.

        Args:
            until: once this has ended fewer steps are enough, unless half of them are done.
        """
        progress, synchronous = self._progress, plan.kind is Kind.SYNC
        before, first = progress.tokens, plan.first_step + plan.steps - steps
        speed = progress.tokens_per_second
        self.resting = False  # stays False if this is cancelled
        async with self._enough_after(until, first + steps // 2):
            report = await self._trainer.run(
                first_step=first,
                steps=steps,
                sequences=self._config.inner.batch_size * (self._config.run.sites if plan.kind is Kind.SOLO else 1),
                payload="gradient" if synchronous else "weights",
                load=start,
                adam_step=self.adam_step if self._load_moments else None,
                on_progress=partial(self._stepped, before),
            )
        self.resting = True
        if not synchronous:
            self._load_moments, self.adam_step = False, report.adam_step
        progress.tokens = before + report.tokens
        progress.compute += report.seconds
        progress.inner_step = first + report.steps
        if report.steps < steps:  # so few that loading the weights counts
            progress.tokens_per_second = speed
        return Trained(report.tokens, steps - report.steps)

    @contextlib.asynccontextmanager
    async def _enough_after(self, until: asyncio.Task[Any] | None, half: int) -> AsyncIterator[None]:
        """Meanwhile no more steps are asked for once `until` has ended, unless step `half` was done by then."""

        async def wait(task: asyncio.Task[Any]) -> None:
            await asyncio.wait([task])
            if self._progress.inner_step < half:
                self._trainer.enough()

        waiting = asyncio.create_task(wait(until)) if until is not None else None
        try:
            yield
        finally:
            if waiting is not None:
                waiting.cancel()

    def take_moments(self, adam_m: SharedVector | None, adam_v: SharedVector | None, adam_step: int) -> None:
        """Continue with these AdamW moments, if there are any."""
        if adam_m is None or adam_v is None:
            return
        self._trainer.adam_m.array[:] = adam_m.array
        self._trainer.adam_v.array[:] = adam_v.array
        self.adam_step, self._load_moments = adam_step, True

    def forget_moments(self) -> None:
        """Reset the moments, as if nothing had been trained."""
        for vector in (self._trainer.adam_m, self._trainer.adam_v):
            vector.array.fill(0)
        self.adam_step, self._load_moments = 0, True

    def _stepped(self, tokens_before: int, step: messages.Progress) -> None:
        progress = self._progress
        progress.inner_step, progress.loss, progress.gradient_norm = step.step + 1, step.loss, step.gradient_norm
        progress.tokens = tokens_before + step.tokens
        progress.tokens_per_second = step.tokens / step.seconds if step.seconds > 0 else 0.0
