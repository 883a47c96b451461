"""`pier-coordinator paths plan`: plans a pipeline and shows what to expect from it.

The problem comes from a file, or with `--data RUN` from what the sites of a run have measured. There are three
policies: every stage ("full"), some stages on planned paths ("skip"), and some stages on random paths ("random"). A
plan is compared with an equally well placed full pipeline and with lower bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from pier_coordinator.commands.client import Answer, Client
from pier_node.base.errors import PierError
from pier_node.base.units import UNKNOWN, amount, percent, rate, seconds, several
from pier_node.config.run import PipelineSection, RunConfig
from pier_node.outer.codec import codec
from pier_node.outer.layout import Layout
from pier_node.pipeline.activation_codec import Formats
from pier_node.pipeline.planner import build_problem
from pier_node.pipeline.planning.bounds import Bounds, lower_bounds
from pier_node.pipeline.planning.gantt import gantt_svg
from pier_node.pipeline.planning.plan import plan_to_dict, random_plan, random_routes
from pier_node.pipeline.planning.problem import LONGEST, Problem, Rules, problem_from_json, stage_sizes
from pier_node.pipeline.planning.search import Found, search
from pier_node.pipeline.planning.simulator import Schedule, simulate
from pier_proto.v1.peer_pb2 import Place

Policy = Literal["full", "skip", "random"]


def full_pipeline(problem: Problem) -> Problem:
    """The same sites and microbatches with paths through all stages; surplus sites stay idle.

    It may need more waves, because fewer sites create microbatches and so hold fewer. Raises PierError: there is no
    plan.
    """
    sizes = stage_sizes(len(problem.sites), problem.stages, problem.stages)
    most = min(problem.microbatches, 4 * problem.waves * problem.stages)
    full = replace(problem, stage_sizes=sizes, path_length=problem.stages, rules=Rules(max_jump=1))
    for waves in range(problem.waves, most):
        wider = replace(full, waves=waves)
        with suppress(PierError):
            random_plan(wider, 0)
            return wider
    return replace(full, waves=most)


FULL, SKIP = "full pipeline", "skip"
Told = Callable[[str, float, float], None]
"""Called with the plan being searched, the fraction done, and the best cost so far in seconds."""


@dataclass(frozen=True)
class Outcome:
    """`any_bounds` hold for every assignment of sites to stages, `bounds` for the plan's assignment."""

    policy: Policy
    problem: Problem
    found: Found
    schedule: Schedule
    full: Found
    any_bounds: Bounds
    bounds: Bounds

    @cached_property
    def gap(self) -> float:
        """How far the makespan is above the lower bound for any assignment: 0.1 is 10 % above."""
        return self.found.makespan_s / self.any_bounds.best_s - 1

    @cached_property
    def saved(self) -> float:
        """Saved fraction of the full pipeline's iteration time."""
        return 1 - self.found.iteration_s / self.full.iteration_s


def plan_paths(problem: Problem, policy: Policy, seed: int, seconds: float, told: Told) -> Outcome:
    """Plan by a policy. The search for each of the two plans takes that many seconds. Raises PierError."""
    whole = full_pipeline(problem)
    full = search(whole, seed, seconds, told=partial(told, FULL))
    if policy == "full":
        return _outcome(policy, whole, full, full)
    found = search(problem, seed, seconds, told=partial(told, SKIP))
    if policy == "random":
        plan = random_routes(problem, found.plan.stages, seed, step=0)
        schedule = simulate(problem, plan)
        found = Found(plan, schedule.makespan_s, found.sync_s, found.simulated, found.seconds, found.complete)
    return _outcome(policy, problem, found, full)


def _outcome(policy: Policy, problem: Problem, found: Found, full: Found) -> Outcome:
    bounds = lower_bounds(problem), lower_bounds(problem, found.plan)
    return Outcome(policy, problem, found, simulate(problem, found.plan), full, *bounds)


MOST_LINES = 24
"""Maximum number of pairs of sites in the table: the slowest ones; --json has all."""
TIMES = ("forward", "backward", "loss")


@dataclass(frozen=True)
class Measured:
    """What the sites of a run have measured.

    Attributes:
        sites: the sites, in the form of /api/pipeline.
        tensor: bytes of a tensor sent between two sites; None: not known, since each site chooses its precision.
        now_s: planned seconds of an iteration on the paths that the run uses; None: not known.
    """

    sites: list[Answer]
    tensor: int | None
    now_s: float | None

    def problem(self, section: PipelineSection, seed: int) -> Problem:
        """The planning problem, in which each site may hold any stage. Raises PierError."""
        return build_problem(section, self.places(), {}, seed)[0]

    def places(self) -> dict[str, Place]:
        """What each site has measured, by the site's name."""
        names = {site["node"]: site["name"] for site in self.sites}
        return {
            site["name"]: Place(
                memory=site["memory"],
                transfer={names[to]: took for to, took in site["transfer"].items() if to in names},
                **{key: site[key] for key in TIMES},
            )
            for site in self.sites
        }

    def view(self) -> RenderableType:
        """Two tables: the sites, and the links between them in both directions."""
        return Group(_sites_table(self.sites), "", *_lines_view(self.sites, self.tensor))


def of_run(folder: Path, policy: Policy | None, seed: int) -> tuple[Problem, Policy, Measured]:
    """The planning problem of a folder's run, with the run's policy unless another is given.

    Raises:
        PierError: no coordinator runs, the run has no stages, or too few sites are live or have measured.
    """
    client = Client.of(folder)
    config = client.home.config
    section = config.pipeline
    if section.stages < 2:
        raise PierError(
            f"the run of {folder} is no pipeline: its run.toml has no [pipeline] with stages",
            "docs/pipeline.md says how to make it one. To plan sites that a file describes: --problem FILE.",
        )
    told = client.get("/api/pipeline")
    measured = Measured(told["sites"], _tensor(config), told["plan"] and told["plan"]["seconds"])
    _require(folder, measured.sites, section.stages)
    chosen = policy or section.paths
    problem = measured.problem(section.model_copy(update={"paths": chosen}), seed)
    return with_averaging(problem, config, measured.tensor), chosen, measured


def with_averaging(problem: Problem, config: RunConfig, tensor: int | None) -> Problem:
    """The problem with the seconds that replicas need to average what they exchange, as a mean over the iterations.

    A stage of mean size is assumed to travel at the rate of the measured tensors, their latency included.

    Args:
        tensor: bytes that `problem.transfer_s` was measured with; None: not known, and averaging is not counted.
    """
    if tensor is None:
        return problem
    outer, stage = config.outer, Layout.of(config.model).length // config.pipeline.stages
    each = codec(outer.codec).size(stage) / (1 if outer.algorithm == "sync" else outer.inner_steps)
    times = tuple(tuple(min(took * each / tensor, LONGEST) for took in row) for row in problem.transfer_s)
    return replace(problem, gradient_s=times)


def _tensor(config: RunConfig) -> int | None:
    """Mean bytes of what a site sends to the next; None: they depend on the device."""
    possible = {"bf16": (True,), "fp32": (False,)}.get(config.inner.precision, (True, False))
    sizes = {round(Formats.of(config, bf16).mean_size) for bf16 in possible}
    return sizes.pop() if len(sizes) == 1 else None


def _require(folder: Path, sites: Sequence[Answer], stages: int) -> None:
    if not sites:
        raise PierError(
            f"no site of the run of {folder} is here",
            f"`pier-coordinator nodes --data {folder}` shows who should be; "
            f"`pier-coordinator invite --data {folder}` lets more in.",
        )
    if len(sites) < stages:
        raise PierError(
            f"{len(sites)} of the run's sites are here: too few for {stages} stages, each needs one",
            f"Start the others, or let more in: `pier-coordinator invite --data {folder}`.",
        )
    missing = [str(site["name"]) for site in sites if not (site["forward"] and site["backward"])]
    if missing:
        raise PierError(
            f"not measured yet: {', '.join(missing)}",
            "A site measures while it trains: ask again after its first steps. "
            f"`pier-coordinator status --data {folder}` shows how far they are.",
        )


def _sites_table(sites: Sequence[Answer]) -> Table:
    table = Table(box=None, pad_edge=False, title="Measured for a microbatch", title_justify="left", title_style="bold")
    for name in ("site", "stage", *TIMES, "memory"):
        table.add_column(name, justify="left" if name == "site" else "right", no_wrap=True)
    for site in sorted(sites, key=lambda it: (it["stage"], it["name"])):
        times = (_seconds(site[key]) for key in TIMES)
        table.add_row(Text(str(site["name"])), str(site["stage"]), *times, str(site["memory"]))
    return table


def _lines_view(sites: Sequence[Answer], tensor: int | None) -> Iterator[RenderableType]:
    title = f"A tensor{f' of {amount(tensor)}' if tensor else ''} on its way, there and back"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("between", "", "there", "back", "there at", "back at", "round trip"):
        table.add_column(name, justify="left" if name in ("between", "") else "right", no_wrap=True)
    pairs = [(a, b) for at, a in enumerate(sites) for b in sites[at + 1 :] if _took(a, b) or _took(b, a)]
    pairs.sort(key=lambda it: -max(_took(*it), _took(*reversed(it))))
    for a, b in pairs[:MOST_LINES]:
        ways = _took(a, b), _took(b, a)
        speeds = (rate(tensor / took) if tensor and took else UNKNOWN for took in ways)
        trip = a["round_trip"].get(b["node"]) or b["round_trip"].get(a["node"])
        table.add_row(Text(str(a["name"])), Text(str(b["name"])), *map(_seconds, ways), *speeds, _seconds(trip))
    yield table
    if len(pairs) > MOST_LINES:
        yield f"and {len(pairs) - MOST_LINES} faster ones: --json has all"


def _took(source: Answer, target: Answer) -> float:
    return float(source["transfer"].get(target["node"], 0.0))


def _seconds(time: float | None) -> str:
    return seconds(time) if time else UNKNOWN


@dataclass(frozen=True)
class Search:
    """How to plan.

    Attributes:
        policy: None: the run's policy; "skip" for a problem from a file.
        seed: seed of the search.
        seconds: duration of each search.
    """

    policy: Policy | None
    seed: int
    seconds: float


def plan_file(file: Path, how: Search, as_json: bool, svg: Path | None) -> None:
    """Plan the problem that a file describes and show the plan. Raises PierError."""
    _plan(problem_from_json(file.read_bytes()), how.policy or "skip", how, as_json, svg, None)


def plan_run(folder: Path, how: Search, as_json: bool, svg: Path | None) -> None:
    """Plan for the sites of a run, from their measurements, and show the plan. This does not change the run.

    Raises:
        PierError: see `of_run`.
    """
    problem, policy, measured = of_run(folder, how.policy, how.seed)
    _plan(problem, policy, how, as_json, svg, measured)


def _plan(
    problem: Problem, policy: Policy, how: Search, as_json: bool, svg: Path | None, measured: Measured | None
) -> None:
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[best]}")
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress:
        bar = progress.add_task("compiling", total=1.0, best="")

        def told(what: str, part: float, best_s: float) -> None:
            progress.update(
                bar,
                description=what,
                completed=part,
                best=f"best so far {best_s:.2f} s" if math.isfinite(best_s) else "",
            )

        outcome = plan_paths(problem, policy, how.seed, how.seconds, told)
    if svg:
        svg.write_text(gantt_svg(outcome.problem, outcome.found.plan, outcome.schedule, _title(outcome)))
    if as_json:
        print(json.dumps(as_dict(outcome) | ({"measured": asdict(measured)} if measured else {})))
        return
    if measured:
        console.print(measured.view(), "")
    console.print(_title(outcome), style="bold", highlight=False)
    console.print(summary(outcome, measured.now_s if measured else None), "")
    console.print(stages_table(outcome))


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """The outcome as a dict for scripts; times in seconds, utilisation by site."""
    found, full, problem = outcome.found, outcome.full, outcome.problem
    names = [site.name for site in problem.sites]
    return {
        "policy": outcome.policy,
        "makespan_s": found.makespan_s,
        "sync_s": found.sync_s,
        "per_microbatch_s": found.iteration_s / problem.microbatches,
        "full_pipeline": {"makespan_s": full.makespan_s, "sync_s": full.sync_s, "saved": outcome.saved},
        "lower_bound_s": outcome.any_bounds.best_s,
        "lower_bound_of_assignment_s": outcome.bounds.best_s,
        "gap": outcome.gap,
        "utilisation": dict(zip(names, outcome.schedule.utilisation, strict=True)),
        "simulated": found.simulated,
        "seconds": found.seconds,
        "complete": found.complete,
        "plan": plan_to_dict(problem, found.plan),
    }


def summary(outcome: Outcome, now_s: float | None) -> Table:
    """A table that compares the plan with the full pipeline, the bounds and, if known, the paths that the run uses."""
    found, full, count = outcome.found, outcome.full, outcome.problem.microbatches
    table = Table(box=None, pad_edge=False)
    for name in ("", "an iteration", "a microbatch", "of the full pipeline"):
        table.add_column(name, justify="right" if name else "left")
    rows = {
        "this plan": found.iteration_s,
        "full pipeline, placed as well": full.iteration_s,
        "bound with these stages": outcome.bounds.best_s,
        "bound with any stages": outcome.any_bounds.best_s,
    }
    for name, taken in rows.items():
        share = percent(taken / full.iteration_s)
        table.add_row(name, f"{taken:.2f} s", f"{taken / count:.3f} s", share)
    if found.sync_s:
        averaging = "of this plan, averaging between replicas"
        table.add_row(averaging, f"{found.sync_s:.2f} s", f"{found.sync_s / count:.3f} s", UNKNOWN)
    if now_s:  # planned from earlier measurements: a share of this full pipeline would mislead
        own = "the run's own paths, as it planned them" + (", without averaging" if found.sync_s else "")
        table.add_row(own, f"{now_s:.2f} s", f"{now_s / count:.3f} s", UNKNOWN)
    ended = "to its end" if found.complete else "to the deadline: a slower machine finds less, and not always the same"
    table.caption = f"{found.simulated:,} plans simulated in {found.seconds:.1f} s, {ended}"
    return table


def stages_table(outcome: Outcome) -> Table:
    """A table of the sites, stage by stage: the stage that each holds, and for which share of an iteration it works."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "site", "busy"):
        table.add_column(name, justify="left" if name == "site" else "right", no_wrap=True)
    for stage, sites in enumerate(outcome.found.plan.stages):
        for site in sites:
            name, busy = outcome.problem.sites[site].name, outcome.schedule.utilisation[site]
            table.add_row(str(stage), Text(name), percent(busy))
    return table


def _title(outcome: Outcome) -> str:
    problem, found = outcome.problem, outcome.found
    stages = f"{problem.title} on {several(len(problem.sites), 'site')}"
    return f"{outcome.policy}: {stages}: {found.makespan_s:.2f} s, {percent(outcome.gap)} above the lower bound"
