"""experts.toml -> ExpertsConfig: the domains, the shape of their experts, and the sites that may train them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pier_node.base.toml import PositiveInt, Section, read_toml, validated
from pier_node.config.run import DataSection, ModelSection
from pier_node.trainer.data.sources import FAMILIES, HELD_OUT

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]

MADE_BY = "pier-coordinator experts init"
SMALLEST, MOST_DOMAINS = 3, 256
Difficulty = Literal["easy", "medium", "hard"]


class ExpertsSection(Section):
    """[experts]: what each domain's expert may be, and how much training all of them get together."""

    heterogeneity: Literal["auto", "MHo-IHo", "MHo-IHe", "MHe-IHo"] = "auto"
    """Auto chooses the size and the steps of each expert. The paper's modes: M is for model sizes, I for iterations
    (steps); Ho means equal, and He means a third each of small, medium and large, by difficulty."""
    difficulty: dict[Name, Difficulty] = Field(default_factory=dict)
    """Difficulty of domains by hand, as in the paper: { topics = "hard", tools = "easy" }, or "medium". Hard domains
    get the large size or many steps. The others are sorted by an estimate of where size and steps pay."""
    lineage: Literal["all-from-seed", "chain"] = "all-from-seed"
    """One expert for each domain, or one for each class of difficulty, trained on its domains one after the other."""
    sizes: tuple[Positive, Positive, Positive] = (1.0, 1.5, 2.0)
    """Inner width of the feed-forward layers of S, M and L, as multiples of model.ffn_dim. S is the model of the run,
    from which the experts branch, so its value is 1."""
    steps: tuple[PositiveInt, PositiveInt, PositiveInt] = (300, 400, 500)
    """Few, usual and many steps of a domain; auto uses few or more."""
    batch_size: PositiveInt = 8
    """Sequences per step."""
    lr: Positive = 3e-4
    """Learning rate of an expert after its warmup; from there a cosine falls to min_lr at its own last step."""
    min_lr: NotNegative = 3e-5
    """Learning rate at the end."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Decides the order of the rows, and how M and L are widened from S."""
    setup_s: NotNegative = 8.0
    """Seconds that an expert takes besides training and evaluation, to start workers, read text and save. An idle CPU
    core takes 8; `experts status` shows what each expert took."""
    fill_idle: bool = False
    """Sites that would be idle train their experts for longer; the ensemble then costs more than the budget."""
    budget_flops: NotNegative = 0.0
    """FLOPs of all domains together; 0: the cost of M with the usual steps."""
    horizon_s: NotNegative = 0.0
    """Instead of a budget, seconds in which all sites should finish without idling; 0: none."""
    lost_after_s: Annotated[float, Field(ge=1, le=1e7)] = 120.0
    """Seconds of silence after which a site is lost. Others then train its experts, from the coordinator's checkpoint
    or else from the start."""
    max_epochs: Annotated[float, Field(ge=1)] = 4.0
    """How often a text may be repeated; up to four times is nearly as good as new text (arXiv 2305.16264)."""

    @model_validator(mode="after")
    def check_menus(self) -> Self:
        """Menus must ascend, and options that exclude each other must not be combined."""
        if not self.sizes[0] < self.sizes[1] < self.sizes[2]:
            raise ValueError(f"sizes = {[*self.sizes]} must rise: S, M, L")
        if self.sizes[0] != 1.0:
            raise ValueError(f"sizes = {[*self.sizes]} must begin with 1: S is the model of the run")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr:g} must not be above lr = {self.lr:g}")
        if not self.steps[0] < self.steps[1] < self.steps[2]:
            raise ValueError(f"steps = {[*self.steps]} must rise: few, usual, many")
        if self.budget_flops and self.horizon_s:
            raise ValueError("budget_flops and horizon_s: the horizon takes the budget's place; set one of them")
        if self.lineage == "chain" and self.heterogeneity == "auto":
            raise ValueError('lineage = "chain" needs one of the paper\'s modes: heterogeneity = "MHo-IHo", …')
        if self.difficulty and self.heterogeneity == "auto":
            raise ValueError("difficulty: auto treats all domains alike; choose one of the paper's modes: MHo-IHe, …")
        return self


class SolverSection(Section):
    """[plan]: when the search for a better schedule may end."""

    time_limit_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Seconds for the solver, for all modes together."""
    gap: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """The search ends within this fraction of the lower bound."""


class DomainSection(Section):
    """[[domains]]: a text and an expert for it. Domains must not overlap."""

    name: Name
    source: Literal["builtin", "text", "jsonl", "parquet"] = "builtin"
    """Builtin is a part of Python's own library, by name; the others are files of text, JSON lines or Parquet."""
    path: str = ""
    """File or folder of the text."""
    text_field: str = "text"
    """The field (jsonl) or column (parquet) that holds the text."""
    weight: Positive = 1.0
    """Importance of this domain relative to the others."""
    sites: tuple[str, ...] = ()
    """Names of the only sites that may see the text; none: all."""

    @model_validator(mode="after")
    def check_source(self) -> Self:
        """A built-in domain must have a known name, and any other domain a path."""
        if self.source == "builtin" and self.name not in FAMILIES:
            raise ValueError(f"{self.name!r} is no built-in domain: {', '.join(FAMILIES)}; or set source and path")
        if self.source != "builtin" and not self.path:
            raise ValueError(f'source = "{self.source}" needs path = "FILE or FOLDER"')
        return self

    @property
    def data(self) -> DataSection:
        """The location of the text in the form of a run's configuration."""
        path = self.name if self.source == "builtin" else self.path
        return DataSection(source=self.source, path=path, text_field=self.text_field, validation=HELD_OUT)


class SiteSection(Section):
    """[[sites]]: a machine, as measured. Without any, the sites of the coordinator of --data are used."""

    name: Name
    tflops: Positive
    """Training speed in TFLOP/s: 1e-12 · (FLOPs per token) · (tokens/s), never the peak."""
    memory_gb: NotNegative = 0.0
    """Memory of the training device in GB; 0: enough."""
    line_mbit: NotNegative = 0.0
    """Bandwidth of its link in Mbit/s; 0: fast enough."""
    hours: NotNegative = 0.0
    """How long it is available, in hours; 0: as long as needed."""


class ExpertsConfig(Section):
    """The complete experts.toml."""

    experts: ExpertsSection = ExpertsSection()
    model: ModelSection = Field(default_factory=ModelSection)
    plan: SolverSection = SolverSection()
    domains: Annotated[tuple[DomainSection, ...], Field(min_length=SMALLEST, max_length=MOST_DOMAINS)] = tuple(
        DomainSection(name=name) for name in FAMILIES
    )
    sites: tuple[SiteSection, ...] = ()

    @model_validator(mode="after")
    def check_model(self) -> Self:
        """Experts of several sizes, and their mixture, are Pier's own decoders."""
        if self.model.transformers:
            raise ValueError('model.form = "transformers": experts are for Pier\'s own decoder (Llama, GPT-2)')
        return self

    @model_validator(mode="after")
    def check_names(self) -> Self:
        """Names must be unique, and what is named elsewhere must exist."""
        for kind, names in (("domains", [each.name for each in self.domains]), ("sites", [s.name for s in self.sites])):
            if twice := _twice(names):
                raise ValueError(f"two {kind} are called {twice!r}")
        if missing := sorted({*self.experts.difficulty} - {domain.name for domain in self.domains}):
            raise ValueError(f"experts.difficulty: there is no domain {missing[0]!r} in [[domains]]")
        if self.sites:
            known = {site.name for site in self.sites}
            for domain in self.domains:
                if missing := sorted({*domain.sites} - known):
                    raise ValueError(f"domain {domain.name!r}: there is no site {missing[0]!r} in [[sites]]")
        return self

    def sized(self) -> tuple[ModelSection, ModelSection, ModelSection]:
        """The models of S, M and L."""
        given = self.model.model_dump()
        small, medium, large = (
            ModelSection.model_validate({**given, "ffn_dim": max(1, round(factor * self.model.ffn_dim))})
            for factor in self.experts.sizes
        )
        return small, medium, large


def load(path: Path) -> ExpertsConfig:
    """Read experts.toml. Raises PierError, which names each key with an invalid value."""
    return validated(read_toml(path, MADE_BY), ExpertsConfig, str(path))


def _twice(names: Sequence[str]) -> str:
    return next((name for index, name in enumerate(names) if name in names[:index]), "")
