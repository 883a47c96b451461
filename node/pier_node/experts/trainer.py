"""Trains one expert from its parent to its card, on the workers of a site (HDEE, arXiv 2502.19385).

For the workers this is a run of its own: AdamW from zero, warmup, and a cosine to the expert's own last step. They
train from checkpoint to checkpoint. Neither the positions of the checkpoints nor being killed in between changes a bit
of the result.

An expert is accepted if it beats its parent on the dev split of its domain by more than two standard errors, from a
bootstrap over the rows. Rows are paired: both models are scored on the same rows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.base.tasks import run_to_end
from pier_node.config.run import ModelSection, RunConfig
from pier_node.engine.messages import Progress
from pier_node.engine.program import Program
from pier_node.experts.card import CARD_FILE, Card, digest_of, load_card
from pier_node.experts.domains import Text, read_text
from pier_node.experts.job import ExpertJob
from pier_node.experts.mixture import Array
from pier_node.experts.resume import FILE, ResumeState
from pier_node.outer.layout import Layout
from pier_node.trainer.command import Workers, own_trainer
from pier_node.trainer.data.corpus import SiteData
from pier_node.trainer.model.cost import flops_per_token
from pier_node.trainer.model.export import export

DRAWS = 1000
ERRORS = 2.0
"""Number of standard errors by which an expert must be better."""
WORST = 1000.0
"""Maximum bits per byte that a row counts. A diverged model, with NaN, gets this value."""


@dataclass(frozen=True)
class Verdict:
    """Bits per byte on the dev split; `standard_error` is that of parent_loss - loss."""

    loss: float
    parent_loss: float
    standard_error: float

    @property
    def accepted(self) -> bool:
        """Whether the expert replaces its parent for the domain."""
        return self.parent_loss - self.loss > ERRORS * self.standard_error


def judged(expert: Array, parent: Array, seed: int = 0) -> Verdict:
    """The verdict on an expert. Deterministic for the same arguments.

    Args:
        expert, parent: nats per byte of each row, [rows]; all rows have the same length.
    """
    own, other = (_bits(losses) for losses in (expert, parent))
    gains = other - own
    picks = np.random.default_rng(seed).integers(0, len(gains), (DRAWS, len(gains)))
    return Verdict(float(own.mean()), float(other.mean()), float(gains[picks].mean(axis=1).std(ddof=1)))


def _bits(losses: Array) -> Array:
    return np.minimum(np.nan_to_num(losses, nan=math.inf) / math.log(2), WORST)


PROBE = 10
"""Steps after which the duration of a step is known."""
CHECKPOINT_SECONDS = 60.0
ONE_FILE = 1 << 60

Told = Callable[[Progress], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parent:
    """What an expert branches from. `name` is that of an expert, or the digest of the run's state, hex."""

    name: str
    model: ModelSection
    weights: Vector


@dataclass(frozen=True)
class Shop:
    """Where experts are trained.

    Attributes:
        run: the site's run; experts take from it what their job does not specify.
        folder: the site's folder; each expert gets a folder of its name in `experts`.
        workers: number of workers to start; 0: one per device.
    """

    run: RunConfig
    folder: Path
    workers: int = 0
    checkpoint_seconds: float = CHECKPOINT_SECONDS

    def place(self, name: str) -> Path:
        """The folder of a finished expert."""
        return self.folder / "experts" / name


class CheckpointSink(Protocol):
    """Where else the checkpoints of an expert are kept: see site/expert_checkpoints.py."""

    async def fetched(self, folder: Path, name: str, length: int, own: int) -> bool:
        """Fetch a checkpoint later than `own` steps into the folder. Returns whether there is one."""

    def saved(self, path: Path, step: int) -> None:
        """A new checkpoint is saved. The file stays unchanged as long as it is open."""


async def train_expert(
    job: ExpertJob, parent: Parent, shop: Shop, told: Told, elsewhere: CheckpointSink | None = None
) -> Card:
    """Train an expert and return its card; its model is stored next to it. A finished expert is not trained again.

    Args:
        told: called with the progress, a few times per second.
        elsewhere: where else its checkpoints are kept; None: only here.

    Raises:
        PierError: the text is not the one of the plan or is too short, or the workers cannot continue.
    """
    name = job.name(parent.name, shop.run)
    done = shop.place(name)
    if (done / CARD_FILE).exists():
        return await asyncio.to_thread(load_card, done)
    work = done.with_name(f"{name}.work")
    work.mkdir(parents=True, exist_ok=True)
    text = await read_text(job, shop.run.model.context, work)
    training = _Training(job, parent, shop, text, work, told, elsewhere)
    state, verdict = await training.run()
    # The thread continues in any case: nothing else may start in this folder meanwhile.
    card = await run_to_end(asyncio.to_thread(_finish, training, state, verdict))
    log.info(
        "the expert of %s is %s: %.4f bits per byte, its parent %.4f (± %.4f)",
        *(job.domain.name, "accepted" if card.accepted else "refused, its parent stands in"),
        *(card.loss, card.parent_loss, card.standard_error),
    )
    return card


def export_parent(parent: Parent, shop: Shop) -> Path:
    """The folder of a parent that stands in for a refused expert; a parent that is an expert has its own.

    Raises PierError.
    """
    import torch

    folder = shop.place(parent.name[:32])
    if not (folder / "config.json").exists():
        work = folder.with_name(f"{folder.name}.work")
        for left in (work, folder):  # left by a site that was killed
            shutil.rmtree(left, ignore_errors=True)
        export(parent.model, torch.from_numpy(parent.weights), work, shard_bytes=ONE_FILE).rename(folder)
    return folder


@dataclass
class _Training:
    """The training from the parent to the last step."""

    job: ExpertJob
    parent: Parent
    shop: Shop
    text: Text
    work: Path
    told: Told
    elsewhere: CheckpointSink | None

    def __post_init__(self) -> None:
        self.config, self.name = self.job.run(self.shop.run), self.job.name(self.parent.name, self.shop.run)
        self._weights = SharedVector(Layout.of(self.config.model).length)

    async def run(self) -> tuple[ResumeState, Verdict]:
        async with AsyncExitStack() as stack:
            # The seed and the text decide the order of the rows, not the site.
            workers = Workers(self.shop.workers)
            trainer = own_trainer(self.config, self.job.domain_hash, SiteData(), self.shop.folder, workers)
            stack.push_async_callback(trainer.stop)
            await trainer.start()
            self._weights.array[:] = await asyncio.to_thread(self._branched)
            before = await trainer.rate(self._weights, self.text.rows)
            state = await self._train(trainer)
            after = await trainer.rate(self._weights, self.text.rows)
        return state, judged(after, before)

    def _branched(self) -> Vector:
        import torch

        from pier_node.trainer.model.initial import widened

        flat = torch.from_numpy(self.parent.weights)
        made: Vector = widened(self.parent.model, self.config.model, flat, self.job.seed).numpy()
        return made

    async def _train(self, trainer: Program) -> ResumeState:
        """The last state, whose weights are in `self._weights`."""
        vectors = self._weights.array, trainer.adam_m.array, trainer.adam_v.array
        state, kept = ResumeState(0, 0, *vectors), await self._newest_checkpoint()
        if kept is not None:
            for vector, found in zip(vectors, (kept.weights, kept.adam_m, kept.adam_v), strict=True):
                vector[:] = found
            log.info("the expert of %s continues at step %d", self.job.domain.name, kept.step)
            state = replace(kept, weights=vectors[0], adam_m=vectors[1], adam_v=vectors[2])
        steps = PROBE
        while state.step < self.job.steps:
            state, seconds = await self._train_to_checkpoint(trainer, state, min(steps, self.job.steps - state.step))
            steps = max(1, int(steps * self.shop.checkpoint_seconds / max(seconds, 1e-3)))
        return state

    async def _newest_checkpoint(self) -> ResumeState | None:
        """The latest checkpoint available here or elsewhere."""
        length = len(self._weights.array)
        own = await asyncio.to_thread(ResumeState.load, self.work, self.name, length)
        step = own.step if own else 0
        if self.elsewhere is None or not await self.elsewhere.fetched(self.work, self.name, length, step):
            return own
        return await asyncio.to_thread(ResumeState.load, self.work, self.name, length)

    async def _train_to_checkpoint(self, trainer: Program, state: ResumeState, steps: int) -> tuple[ResumeState, float]:
        """Train that many steps and save a checkpoint. Returns the state and the seconds taken."""
        done = await trainer.run(
            first_step=state.step,
            steps=steps,
            sequences=self.job.batch_size,
            payload="weights",
            load=self._weights,
            adam_step=state.step,
            on_progress=self.told,
        )
        self._weights.array[:] = trainer.outbox.array
        state = replace(state, step=state.step + steps, tokens=state.tokens + done.tokens)
        await asyncio.to_thread(state.save, self.work, self.name)
        if self.elsewhere is not None:
            self.elsewhere.saved(self.work / FILE, state.step)
        return state, done.seconds


def _finish(training: _Training, state: ResumeState, verdict: Verdict) -> Card:
    """Write the model and the card. They appear together under their name."""
    import torch

    job, model = training.job, training.config.model
    made = export(model, torch.from_numpy(state.weights), training.work / "model", shard_bytes=ONE_FILE)
    card = Card(
        name=training.name,
        domain=job.domain.name,
        domain_hash=job.domain_hash,
        parent=training.parent.name,
        size=job.size,
        steps=state.step,
        seed=job.seed,
        recipe=job.recipe(training.shop.run),
        tokens=state.tokens,
        flops=flops_per_token(model) * state.tokens,
        epochs=state.tokens / training.text.tokens,
        digest=digest_of(made),
        loss=verdict.loss,
        parent_loss=verdict.parent_loss,
        standard_error=verdict.standard_error,
        accepted=verdict.accepted,
    )
    card.save(made)
    made.rename(training.shop.place(training.name))
    shutil.rmtree(training.work)
    return card
