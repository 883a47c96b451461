"""[pipeline] of run.toml (arXiv 2502.19913; spec/skippipe.md section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pier_node.config_section import Fraction, Section

if TYPE_CHECKING:
    from pier_node.config import OuterSection


class PipelineSection(Section):
    """[pipeline]: the model in stages (docs/pipeline.md). Without [outer] replicas of a stage average at each step."""

    stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages of consecutive blocks, a site holds one of them; 1: no pipeline, every site trains the whole model."""
    paths: Literal["full", "skip", "random"] = "skip"
    """full: a microbatch visits all stages. skip: some, on planned paths. random: other ones in each step."""
    skip: Fraction = 0.25
    """The part of the stages that a microbatch does not visit, to the nearest number of stages."""
    swaps: Annotated[int, Field(ge=0, le=8)] = 0
    """Visits of a stage after a later one that a path may have."""
    microbatches: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Of an iteration, each of inner.batch_size sequences."""
    memory: Annotated[int, Field(ge=1, lt=10_000)] = 3
    """Microbatches in flight that a site can hold."""
    plan_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Of the search for paths, whenever there is something to plan anew."""

    @property
    def path_length(self) -> int:
        """L, stages that a microbatch visits, the first one included."""
        return self.stages if self.paths == "full" else max(round(self.stages * (1 - self.skip)), min(self.stages, 2))


def outer_of_pipeline(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run.toml, with what follows from [pipeline] for an [outer] that is not there, or says less.

    No site of a pipeline can start alone: the start of Pier is a synchronous one.
    """
    section, outer = tables.get("pipeline"), tables.get("outer")
    if not isinstance(section, dict) or section.get("stages", 1) in (0, 1):
        return tables
    if outer is None:
        return {**tables, "outer": {"algorithm": "sync"}}
    if isinstance(outer, dict) and outer.get("algorithm", "pier") == "pier":
        return {**tables, "outer": {"start": "sync", **outer}}
    return tables


def outer_flaw(outer: OuterSection) -> str:
    """What of [outer] the replicas of a stage cannot do, and what to do instead; "" if nothing is."""
    if outer.start == "solo":
        return 'outer.start = "solo": no site of a pipeline has the whole model: use "sync" or "none"'
    plain = {
        "codec": "none",
        "robust": "none",
        "max_weight": 2.0,
        "overlap": False,
        "fragments": 1,
        "final_merge": False,
    }
    for key, value in plain.items():
        if getattr(outer, key) != value:
            return f"outer.{key} = {getattr(outer, key)!r} is not there for the stages of a pipeline: leave it out"
    return ""
