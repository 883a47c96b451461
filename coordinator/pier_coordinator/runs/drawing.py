"""Draws the paths that a site has planned, in a process of its own: what it sent is read, checked and simulated there.

So nothing that it can have sent, nor the libraries that this takes, hold up the coordinator.
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
"""Seconds that a drawing may take; three are usual."""
LOOK = 0.5
"""Seconds between two looks whether there are new paths."""
REST = 5.0
"""Seconds after a drawing in which there is none: whoever sends many paths costs little."""
LARGEST = 8 << 20
"""Characters of a picture."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawing:
    """Paths as they are shown.

    Attributes:
        round: the first that they were for.
        title: what goes where, in words.
        seconds: an iteration as it is planned, without the averaging of gradients.
        stages: the node ids of each.
        busy: node id -> part of the iteration in which it computes.
        svg: the Gantt chart.
    """

    round: int
    title: str
    seconds: float
    stages: list[list[str]]
    busy: dict[str, float]
    svg: str


async def keep_drawn(coordinator: Coordinator, board: ReadModel) -> None:
    """Draw new paths for the page as they come, for ever."""
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
    """The drawing, with names for node ids. Raises PierError: these are no paths, or it takes too long."""
    words = json.dumps({"content": paths.content.decode(errors="replace"), "names": dict(names)})
    quick = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # one simulation is not worth to be compiled for
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
    """All of a drawing but its round.

    Raises PierError, ValueError, KeyError, TypeError: these are no paths, or such as are not allowed.
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
    """Draw what stdin says, write the drawing to stdout."""
    words = json.load(sys.stdin)
    print(json.dumps(drawn(words["content"], words["names"])))


if __name__ == "__main__":
    main()
