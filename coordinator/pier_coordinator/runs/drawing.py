"""Draws the paths that a site has planned: a separate process parses, checks and simulates what the site sent.

Neither what a site sends nor the libraries that the drawing needs can therefore hold up the coordinator.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pier_node.base.errors import PierError
from pier_node.base.processes import answer
from pier_proto.v1.coordinator_pb2 import Paths

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator
    from pier_coordinator.runs.read_model import ReadModel

DEADLINE = 30.0
"""Maximum duration of a drawing, in seconds; 3 s is usual."""
LOOK = 0.5
"""Seconds between two checks for new paths."""
REST = 5.0
"""Seconds without drawing after each one, so that a site that sends many paths costs little."""
LARGEST = 8 << 20
"""Maximum size of a drawing, in characters of JSON."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawing:
    """Paths as the page shows them.

    Attributes:
        round: the first round that they were for.
        title: what goes where, in words.
        seconds: planned duration of an iteration, without the averaging of gradients.
        stages: node ids of the sites of each stage.
        busy: node id -> fraction of the iteration in which the site computes.
        svg: the Gantt chart.
    """

    round: int
    title: str
    seconds: float
    stages: list[list[str]]
    busy: dict[str, float]
    svg: str


async def keep_drawn(coordinator: Coordinator, board: ReadModel) -> None:
    """Draw new paths for the page as they arrive, until cancelled."""
    seen: Paths | None = None
    while True:
        paths, pause = coordinator.paths(), LOOK
        if paths is not None and paths is not seen:
            seen, pause = paths, REST
            try:
                board.drawn(await draw(paths, {site.node: site.name for site in coordinator.sites.values()}))
            except PierError as error:
                log.warning("%s", error)
        await asyncio.sleep(pause)


async def draw(paths: Paths, names: Mapping[str, str]) -> Drawing:
    """Draw paths, with names instead of node ids. Raises PierError: they are invalid, or it takes too long."""
    words = json.dumps({"content": paths.content.decode(errors="replace"), "names": dict(names)})
    quick = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # compiling is not worth it for one simulation
    try:
        found = await answer(__name__, stdin=words.encode(), within=DEADLINE, env=quick)
    except TimeoutError as error:
        raise _refused(paths, f"it took longer than {DEADLINE:.0f} s") from error
    except OSError as error:
        raise _refused(paths, str(error)) from error
    if found.code or len(found.output) > LARGEST:
        last = found.errors.strip().rpartition("\n")[2]
        raise _refused(paths, ascii(last[-300:]) if found.code else "the picture is too large")
    told: dict[str, Any] = json.loads(found.output)
    return Drawing(paths.round, **told)


def _refused(paths: Paths, why: str) -> PierError:
    return PierError(f"the paths that a site planned for round {paths.round} cannot be drawn: {why}", "")


def drawn(content: str, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a drawing, except its round.

    Raises:
        PierError, ValueError, KeyError, TypeError: these are no paths, or paths that are not allowed.
    """
    from pier_node.pipeline.paths_file import parse_paths
    from pier_node.pipeline.planning.check import violations
    from pier_node.pipeline.planning.gantt import gantt_svg
    from pier_node.pipeline.planning.simulate import simulate

    found = parse_paths(content.encode(), {})
    problem, plan = found.problem, found.plan
    if wrong := violations(problem, plan):
        raise PierError(wrong[0], "")
    schedule, nodes = simulate(problem, plan), [site.name for site in problem.sites]
    named = replace(problem, sites=tuple(replace(site, name=names.get(site.name, site.name)) for site in problem.sites))
    title = f"{problem.title}: {schedule.makespan_s:.2f} s"
    drawing = Drawing(
        round=found.round,
        title=problem.title,
        seconds=schedule.makespan_s,
        stages=[[nodes[site] for site in sites] for sites in plan.stages],
        busy=dict(zip(nodes, schedule.utilisation, strict=True)),
        svg=gantt_svg(named, plan, schedule, title),
    )
    return {key: value for key, value in asdict(drawing).items() if key != "round"}


def main() -> None:
    """Draw the paths on stdin and write the drawing to stdout."""
    words = json.load(sys.stdin)
    print(json.dumps(drawn(words["content"], words["names"])))


if __name__ == "__main__":
    main()
