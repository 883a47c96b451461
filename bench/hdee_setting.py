"""What bench/hdee.py trains: the planner's own recipes of every mode for one experts.toml, and what they share."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from pier_coordinator.commands.experts import planned
from pier_coordinator.commands.experts_view import Planning
from pier_coordinator.experts.plan import Plan, accepted
from pier_coordinator.experts.recipe import MODES
from pier_coordinator.experts.task import MIDDLE
from pier_node.config.run import RunConfig
from pier_node.experts.config import Difficulty, DomainSection, ExpertsConfig
from pier_node.experts.job import ExpertJob
from pier_node.trainer.data.sources import FAMILIES

BASE = "MHo-IHo"
"""What all others are compared with."""
DENSE = "dense M", "dense L"
SEED_MODEL = "seed model"
SIZES = "SML"
INSTALLED = {
    "headers": "pyarrow/include/arrow",
    "scripts": "playwright/driver/package/lib",
    "metrics": "matplotlib/mpl-data/fonts/afm",
    "vendors": "netaddr/eui",
    "solvers": "sympy/solvers",
    "graphs": "networkx/algorithms",
    "icons": "material/templates/.icons/fontawesome",
    "stubs": "mypy/typeshed/stdlib",
}
"""More domains, in files of packages that the tests and docs need: C++, JavaScript, tables, Python, SVG."""

BY_HAND: dict[str, Difficulty] = {
    "topics": "hard",
    "docstrings": "hard",
    "network": "medium",
    "formats": "easy",
    "concurrency": "medium",
    "numbers": "medium",
    "encodings": "easy",
    "tools": "medium",
}
"""Classes as a person would set them by the kind of text: prose, code, and tables and readers of file formats."""


def section(name: str) -> DomainSection:
    """Where the text of a domain is."""
    if name in FAMILIES:
        return DomainSection(name=name)
    path = Path(sysconfig.get_path("purelib"), INSTALLED[name])
    return DomainSection(name=name, source="text", path=str(path))


@dataclass(frozen=True)
class Setting:
    """The same for all seeds; see bench/hdee.py for why.

    Attributes:
        excluded: domains on which no model is trained.
        dense_share: part of the experts' compute that dense models get.
        private: those of `domains` that only their own experts are trained on, not the seed model and no dense one.
        by_hand: classes of difficulty; of domains without one they are estimated.
        chain: one expert for each class, which goes through its domains.
    """

    domains: tuple[str, ...] = FAMILIES
    excluded: tuple[str, ...] = (*INSTALLED,)
    private: tuple[str, ...] = ()
    by_hand: Mapping[str, Difficulty] = field(default_factory=dict)
    chain: bool = False
    dense_share: float = 1.0
    dim: int = 64
    layers: int = 3
    ffn_dim: int = 128
    context: int = 128
    batch_size: int = 8
    sizes: tuple[float, float, float] = (1.0, 2.0, 3.0)
    steps: tuple[int, int, int] = (225, 300, 375)
    lr: float = 3e-3
    warmup_steps: int = 20
    seed_steps: int = 600
    seed_lr: float = 3e-3
    seed_warmup: int = 50
    test_rows: int = 200
    prior_rows: int = 60
    seeds: tuple[int, ...] = (1, 2, 3)

    @property
    def shared(self) -> tuple[str, ...]:
        """The domains that all may see."""
        return tuple(name for name in self.domains if name not in self.private)

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Domains that have a table of their own, beside that of all that were trained on."""
        groups = {"excluded": self.excluded}
        if self.private:
            groups |= {"private": self.private, "shared": self.shared}
        return {name: domains for name, domains in groups.items() if domains}

    def run(self, seed: int) -> RunConfig:
        """The run that makes the seed model."""
        model = {"dim": self.dim, "layers": self.layers, "heads": 4, "ffn_dim": self.ffn_dim, "context": self.context}
        inner = {"total_steps": self.seed_steps, "batch_size": self.batch_size, "warmup_steps": self.seed_warmup}
        rates = {"lr": self.seed_lr, "min_lr": self.seed_lr / 10, "precision": "fp32"}
        tables = {"run": {"name": "hdee", "seed": seed}, "model": {"preset": "llama-1m", **model}}
        return RunConfig.model_validate({**tables, "inner": {**inner, **rates}})

    def experts(self, seed: int = 1) -> ExpertsConfig:
        """What the planner is asked: three unequal sites, which decide who trains what and not what is trained."""
        wanted = {key: getattr(self, key) for key in ("sizes", "steps", "batch_size", "lr", "warmup_steps")}
        if self.by_hand:
            wanted |= {"difficulty": dict(self.by_hand), "heterogeneity": BASE}  # `auto` refuses classes
        if self.chain:
            wanted |= {"lineage": "chain", "heterogeneity": BASE}
        return ExpertsConfig.model_validate(
            {
                "experts": {**wanted, "min_lr": self.lr / 10, "seed": seed},
                "model": self.run(seed).model.model_dump(),
                "domains": [section(name) for name in self.domains],
                "sites": [{"name": f"site{speed}", "tflops": speed / 100} for speed in (1, 2, 3)],
            }
        )


class Arms:
    """Every mode's experts, and the dense models of the same compute."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.planning: Planning = planned(setting.experts(), Path())

    def plan(self, mode: str) -> Plan:
        """Of a mode of the planner."""
        plan = next(plan for name, plan in self.planning.plans.items() if name == mode)
        if not isinstance(plan, Plan):
            raise plan
        return plan

    def jobs(self, mode: str, seed: int) -> dict[str, ExpertJob]:
        """The experts of a mode, by domain; those of a chain in its order."""
        planning, config = self.planning, self.setting.experts(seed)
        made = accepted(config, planning.task, self.plan(mode), planning.sites, planning.digests)
        return {each.job.domain.name: each.job for each in made.jobs}

    def dense_steps(self, size: str) -> int:
        """Steps of one model of a size for what all experts together take, or its share of that."""
        flops = self.planning.task.sizes[SIZES.index(size)].flops * self.planning.task.step_tokens
        return round(self.setting.dense_share * self.plan(BASE).budget / flops)

    def flops(self, arm: str) -> float:
        """Of an arm's domain phase; of the seed model, its own."""
        if arm not in (*DENSE, SEED_MODEL):
            return self.plan(arm).flops
        size, task = (arm[-1], self.planning.task) if arm in DENSE else ("S", self.planning.task)
        steps = self.dense_steps(size) if arm in DENSE else self.setting.seed_steps
        return steps * task.sizes[SIZES.index(size)].flops * task.step_tokens

    def of_size(self, domain: str, size: str, seed: int) -> ExpertJob:
        """An expert of a domain with the usual steps and a size."""
        kind, job = SIZES.index(size), self.jobs(BASE, seed)[domain]
        ffn_dim = self.setting.experts(seed).sized()[kind].ffn_dim
        return job.model_copy(update={"size": size, "ffn_dim": ffn_dim, "steps": self.setting.steps[MIDDLE]})

    @cached_property
    def permuted(self) -> tuple[str, str, str]:
        """Three domains whose sizes are permuted: where size pays least, middling and most, as estimated."""
        ranked = np.argsort(self.planning.difficulty.size.value, kind="stable")
        low, middle, high = (self.setting.domains[ranked[index]] for index in (0, len(ranked) // 2, -1))
        return low, middle, high


def modes() -> tuple[str, ...]:
    """The planner's modes, the base first."""
    return BASE, *(mode for mode in MODES if mode != BASE)


def every_arm() -> Sequence[str]:
    """All that can be compared, in the order of the tables."""
    return *modes(), *DENSE, SEED_MODEL
