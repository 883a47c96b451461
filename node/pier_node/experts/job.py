"""A job: one expert for one site to train, as the coordinator assigns it, with everything that decides its weights."""

from __future__ import annotations

import hashlib
from typing import Annotated, Self

from pydantic import Field, model_validator

from pier_node.base.toml import Section
from pier_node.config.run import RunConfig, RunSection
from pier_node.experts.card import Finite, Hash, Size, artefact_name
from pier_node.experts.config import MOST_DOMAINS, DomainSection

SEED = -1
"""`after` of a job that branches from the run's own model."""


class ExpertJob(Section):
    """What to train.

    Attributes:
        number: position in the plan.
        domain_hash: hash of the text for which the plan was made (experts/domains.py).
        ffn_dim: inner feed-forward width; the rest of the model is that of the run.
        batch_size: sequences per step.
        max_epochs: maximum number of times that the text may be repeated.
        after: number of the job whose expert is the parent; SEED: the run's model.
        flops: total FLOPs, as planned.
    """

    number: Annotated[int, Field(ge=0, lt=MOST_DOMAINS)]
    domain: DomainSection
    domain_hash: Hash
    size: Size
    ffn_dim: Annotated[int, Field(ge=1, le=1 << 24)]
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)]
    lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)]
    min_lr: Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000_000)]
    max_epochs: Annotated[float, Field(ge=1, le=1e6)] = 4.0
    after: Annotated[int, Field(ge=SEED, lt=MOST_DOMAINS)] = SEED
    flops: Finite = 0.0

    @model_validator(mode="after")
    def check_rates(self) -> Self:
        """The learning rate must not rise."""
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr:g} must not be above lr = {self.lr:g}")
        return self

    def name(self, parent: str, run: RunConfig) -> str:
        """The name of the resulting expert; see `artefact_name`."""
        return artefact_name(parent, self.domain_hash, self.size, self.steps, self.seed, self.recipe(run))

    def recipe(self, run: RunConfig) -> str:
        """A hash of all settings of its model and training, 32 hex digits."""
        own = self.run(run)
        text = own.model.model_dump_json() + own.inner.model_dump_json()
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def run(self, run: RunConfig) -> RunConfig:
        """The training of this expert as a run of one site, with its own data, length, warmup and cosine."""
        inner = {
            "total_steps": self.steps,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "min_lr": self.min_lr,
            "warmup_steps": min(self.warmup_steps, self.steps // 2),
        }
        return RunConfig(
            run=RunSection(name=run.run.name, seed=self.seed),
            model=run.model.model_copy(update={"ffn_dim": self.ffn_dim}),
            data=self.domain.data,
            inner=run.inner.model_copy(update=inner),
        )
