"""The inner steps of a site as its loop sees them: what workers are told, and AdamW's moments between their jobs."""

from __future__ import annotations

from functools import partial

from pier_node.config import RunConfig
from pier_node.outer.schedule import Kind, RoundPlan
from pier_node.progress import Progress
from pier_node.shared import SharedVector, Vector
from pier_node.trainer import Step, Trainer


class InnerSteps:
    """Has the workers train, and keeps account of it in `progress`.

    Attributes:
        adam_step: AdamW steps behind the moments; 0: there are none yet.
        resting: workers are between jobs, so that nobody writes what they publish.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, progress: Progress) -> None:
        self._config, self._trainer, self._progress = config, trainer, progress
        self.adam_step = 0
        self.resting = True
        self._load_moments = False

    @property
    def weights(self) -> Vector:
        """What the last job has published: weights, or a mean gradient; shape [parameters]."""
        return self._trainer.outbox.array

    @property
    def moments(self) -> tuple[SharedVector, SharedVector]:
        """AdamW's m and v as the last job has published them."""
        return self._trainer.adam_m, self._trainer.adam_v

    async def train(self, plan: RoundPlan, steps: int, start: SharedVector) -> int:
        """Do the last `steps` of a round's inner steps from the weights in `start`. Returns the tokens trained on."""
        progress, synchronous = self._progress, plan.kind is Kind.SYNC
        before = progress.tokens
        self.resting = False  # and so it stays when this is cut off
        report = await self._trainer.run(
            first_step=plan.first_step + plan.steps - steps,
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
        progress.inner_step = plan.first_step + plan.steps
        return report.tokens

    async def evaluate(self, anchor: SharedVector) -> float:
        """Validation loss of these weights, nats a token."""
        return await self._trainer.evaluate(anchor)

    def take_moments(self, adam_m: SharedVector | None, adam_v: SharedVector | None, adam_step: int) -> None:
        """Go on with these moments of AdamW, if there are any."""
        if adam_m is None or adam_v is None:
            return
        self._trainer.adam_m.array[:] = adam_m.array
        self._trainer.adam_v.array[:] = adam_v.array
        self.adam_step, self._load_moments = adam_step, True

    def forget_moments(self) -> None:
        """Go on as if nothing had been trained."""
        for vector in self.moments:
            vector.array.fill(0)
        self.adam_step, self._load_moments = 0, True

    def _stepped(self, tokens_before: int, step: Step) -> None:
        progress = self._progress
        progress.inner_step, progress.loss = step.step + 1, step.loss
        progress.tokens = tokens_before + step.tokens
        progress.tokens_per_second = step.tokens / step.seconds if step.seconds > 0 else 0.0
