"""`pier-coordinator paths plan --data RUN`: the problem that a run poses, of what its sites have measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pier.v1.peer_pb2 import Place
from pier_coordinator.commands.client import Answer, Client
from pier_coordinator.paths.policies import Policy
from pier_coordinator.paths.problem import Problem
from pier_node.config import RunConfig
from pier_node.errors import PierError
from pier_node.pipeline.config import PipelineSection
from pier_node.pipeline.posing import posed
from pier_node.units import UNKNOWN, amount, rate, seconds

MOST_LINES = 24
"""Pairs of sites that the table has, the slowest of them; --json has all."""
TIMES = ("forward", "backward", "loss")


@dataclass(frozen=True)
class Measured:
    """What the sites of a run have measured.

    Attributes:
        sites: as /api/pipeline has them.
        tensor: bytes of what travels between two sites; None: each site chooses its precision.
        now_s: seconds of an iteration on the paths that the run uses, as planned; None: not known.
    """

    sites: list[Answer]
    tensor: int | None
    now_s: float | None

    def problem(self, section: PipelineSection, seed: int) -> Problem:
        """Of sites that may hold any stage. Raises PierError."""
        return posed(section, self.places(), {}, seed)[0]

    def places(self) -> dict[str, Place]:
        """What each site has measured, by its name."""
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
        """Two tables: the sites, and the ways between them in both directions."""
        return Group(_sites_table(self.sites), "", *_lines_view(self.sites, self.tensor))


def of_run(folder: Path, policy: Policy | None, seed: int) -> tuple[Problem, Policy, Measured]:
    """What there is to plan in the run of a folder, by its own policy unless another is asked for.

    Raises:
        PierError: no coordinator runs, the run has no stages, or too few sites are here, or have measured.
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
    return measured.problem(section.model_copy(update={"paths": chosen}), seed), chosen, measured


def _tensor(config: RunConfig) -> int | None:
    each = {"fp32": 4, "bf16": 2}.get(config.inner.precision)
    return each and each * config.inner.batch_size * config.model.context * config.model.dim


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
