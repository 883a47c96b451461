"""The planning problem: sites, links, stages and the rules of a path (SkipPipe, arXiv 2502.19913); also as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from pier_node.base.errors import PierError
from pier_node.base.units import several

Matrix = tuple[tuple[float, ...], ...]
FORBID: dict[str, Any] = {"extra": "forbid"}
"""For pydantic, which reads these classes from JSON: no unknown keys."""
LONGEST = 1e6
"""Upper limit of every time in a problem, in seconds, which keeps an iteration well below 2^63 ns."""
MOST_SITES, MOST_MICROBATCHES = 1000, 10_000


@dataclass(frozen=True)
class Site:
    """A site, with the seconds that one microbatch takes there in one stage.

    Args:
        memory: microbatches in flight that it can hold, from the start of their forward to the end of their backward.
    """

    __pydantic_config__: ClassVar = FORBID
    name: str
    forward_s: float
    backward_s: float
    loss_s: float
    memory: int


@dataclass(frozen=True)
class Rules:
    """How a path may deviate from visiting stages in order.

    A swap is a visit to a stage below the furthest one so far; its distance is how far below. A jump is the distance
    from the furthest stage so far to the next.
    """

    __pydantic_config__: ClassVar = FORBID
    max_swaps: int = 0
    max_distance: int = 1
    max_total: int = 2
    max_jump: int = 4


@dataclass(frozen=True)
class Problem:
    """Everything that a plan depends on. Raises PierError for impossible values.

    Args:
        transfer_s: [from][to], seconds that one activation, or its gradient, takes; the diagonal is not used.
        stage_sizes: number of sites for each stage, stage 0 (embedding, head, data) first; surplus sites stay idle.
        path_length: number of stages that a microbatch visits, stage 0 included.
        microbatches: number per iteration, distributed evenly over the waves.
        task_gap_s: seconds that a site idles after a task; `first_gap_s` after the forward of a new microbatch.
        wave_s: seconds after which the next wave may start.
        uplink_s: seconds that one activation occupies each site's uplink; () if transfers never share a line.
        gradient_s: [from][to], seconds that the gradients of one stage take; () if syncing replicas is not counted.
        max_intra_s: longest `transfer_s` allowed between two sites of one stage.
    """

    __pydantic_config__: ClassVar = FORBID
    sites: tuple[Site, ...]
    transfer_s: Matrix
    stage_sizes: tuple[int, ...]
    path_length: int
    microbatches: int
    waves: int = 1
    rules: Rules = field(default_factory=Rules)
    task_gap_s: float = 0.0
    first_gap_s: float = 0.0
    wave_s: float = 0.0
    uplink_s: tuple[float, ...] = ()
    gradient_s: Matrix = ()
    max_intra_s: float | None = None

    def __post_init__(self) -> None:
        _check_sites(self)
        _check_times(self)
        _check_counts(self)

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return len(self.stage_sizes)

    @property
    def title(self) -> str:
        """A short description of the problem."""
        return f"{several(self.microbatches, 'microbatch')} through {self.path_length} of {self.stages} stages"

    @cached_property
    def wave_sizes(self) -> tuple[int, ...]:
        """Number of microbatches in each wave: equal within one, larger waves first."""
        return even_parts(self.microbatches, self.waves)


def problem_from_json(text: str | bytes) -> Problem:
    """Parse a problem. Raises PierError: which key is wrong, and how."""
    try:
        return TypeAdapter(Problem).validate_json(text)
    except ValidationError as error:
        raise _refused(error) from error


def problem_to_json(problem: Problem) -> str:
    """The JSON that `problem_from_json` reads."""
    return json.dumps(asdict(problem), separators=(",", ":"))


def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Split a total into parts that are equal within one, larger parts first."""
    return tuple(total // parts + (index < total % parts) for index in range(parts))


def stage_sizes(sites: int, stages: int, path_length: int) -> tuple[int, ...]:
    """Sites for each stage so that all are equally busy: n_0 (L - 1) = (S - 1) n_s, up to rounding to whole numbers.

    Raises PierError: too few sites.
    """
    if stages > sites:
        raise PierError(f"{sites} sites cannot hold {stages} stages", "Use fewer stages, or more sites.")
    if path_length >= stages:
        return (sites // stages,) * stages
    first = min(max(1, round(sites / path_length)), sites - stages + 1)
    return (first, *even_parts(sites - first, stages - 1))


def _check_sites(problem: Problem) -> None:
    names = [site.name for site in problem.sites]
    _demand(1 <= len(names) <= MOST_SITES, f"{len(names)} sites", f"1 to {MOST_SITES} can be planned.")
    twice = sorted({name for name in names if names.count(name) > 1})
    _demand(not twice, f"two sites are called {', '.join(twice)}", "Give every site a name of its own.")
    for site in problem.sites:
        for key in ("forward_s", "backward_s"):
            value = getattr(site, key)
            _demand(0 < value <= LONGEST, f"{key} of {site.name} is {value:g}", f"Above 0, at most {LONGEST:g} s.")
        _duration(f"loss_s of {site.name}", site.loss_s)
        _demand(site.memory >= 1, f"memory of {site.name} is {site.memory}", "A site must hold one microbatch.")


def _check_times(problem: Problem) -> None:
    count = len(problem.sites)
    _square("transfer_s", problem.transfer_s, count)
    if problem.gradient_s:
        _square("gradient_s", problem.gradient_s, count)
    if problem.uplink_s:
        _row("uplink_s", problem.uplink_s, count)
    for key in ("task_gap_s", "first_gap_s", "wave_s"):
        _duration(key, getattr(problem, key))
    if problem.max_intra_s is not None:
        _duration("max_intra_s", problem.max_intra_s)


def _check_counts(problem: Problem) -> None:
    sizes, length, rules = problem.stage_sizes, problem.path_length, problem.rules
    _demand(len(sizes) >= 2, f"{len(sizes)} stages", "A pipeline has two or more.")
    _demand(min(sizes, default=1) >= 1, f"stage_sizes {list(sizes)}", "Every stage needs a site.")
    spare = len(problem.sites) - sum(sizes)
    _demand(spare >= 0, f"stages of {list(sizes)} sites need {sum(sizes)}, there are {len(problem.sites)}")
    _demand(2 <= length <= len(sizes), f"path_length {length} with {len(sizes)} stages", f"2 to {len(sizes)}.")
    most = MOST_MICROBATCHES
    _demand(1 <= problem.microbatches <= most, f"{problem.microbatches} microbatches", f"1 to {most} can be planned.")
    _demand(1 <= problem.waves <= problem.microbatches, f"{problem.waves} waves of {problem.microbatches} microbatches")
    for key, least in (("max_swaps", 0), ("max_distance", 0), ("max_total", 0), ("max_jump", 1)):
        value = getattr(rules, key)
        _demand(value >= least, f"rules.{key} is {value}", f"At least {least}.")


def _demand(holds: bool, found: str, remedy: str = "") -> None:
    if not holds:
        raise PierError(f"the pipeline cannot be planned: {found}", remedy)


def _duration(key: str, value: float) -> None:
    _demand(math.isfinite(value) and 0 <= value <= LONGEST, f"{key} is {value:g}", f"From 0 to {LONGEST:g} s.")


def _row(key: str, row: Sequence[float], count: int) -> None:
    _demand(len(row) == count, f"{key} has {len(row)} entries for {count} sites", "One for each site, in their order.")
    for index, value in enumerate(row):
        _duration(f"{key}[{index}]", value)


def _square(key: str, matrix: Matrix, count: int) -> None:
    _demand(len(matrix) == count, f"{key} has {len(matrix)} rows for {count} sites", "One for each site.")
    for index, row in enumerate(matrix):
        _row(f"{key}[{index}]", row, count)


def _refused(error: ValidationError) -> PierError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"]) or "the file"
    if first["type"] == "unexpected_keyword_argument":
        known = ", ".join(field.name for field in fields(Problem))
        return PierError(f"the problem has a key that means nothing: {key}", f"There are: {known}.")
    return PierError(f"the problem cannot be read: {key}: {first['msg']}", "docs/paths.md describes every key.")
