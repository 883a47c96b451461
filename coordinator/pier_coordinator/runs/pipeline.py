"""The coordinator's view of a pipeline: what each site holds and has measured, from pulses, and the plan in use.

It is as recent as the sites' last pulses, and kept in memory only, since the sites report it again. The paths that a
site has planned are drawn by a separate process, which parses, checks and simulates what the site sent. Neither what a
site sends nor the libraries that the drawing needs can therefore hold up the coordinator.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pier_coordinator.runs.series import rounded
from pier_coordinator.store.facts import amount, whole
from pier_node.base.errors import PierError
from pier_node.base.processes import answer
from pier_node.config.run import SITES
from pier_node.wire.rules import NODE_ID
from pier_proto.v1.coordinator_pb2 import Paths

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator
    from pier_coordinator.runs.read_model import ReadModel

MOST_ROWS = 256
"""Maximum number of sites that the page shows."""
TIMES = ("forward", "backward", "loss")
WAYS = ("transfer", "round_trip")
PACE = 16
"""Number of steps over which the duration of a step is measured."""
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


@dataclass(frozen=True)
class PlaceRow:
    """A site's place in a pipeline; times are in seconds per microbatch, 0: not measured yet.

    Attributes:
        stage: the stage that it holds.
        memory: number of microbatches in flight that it can hold.
        transfer: node id -> seconds to send a tensor to that site.
        round_trip: node id -> round-trip time of heartbeats to that site, in seconds.
    """

    stage: int
    memory: int
    forward: float
    backward: float
    loss: float
    transfer: dict[str, float]
    round_trip: dict[str, float]

    @classmethod
    def of(cls, body: Any) -> PlaceRow | None:
        """Build it from a pulse; None: this is no place."""
        if not isinstance(body, dict) or (stage := whole(body, "stage")) is None:
            return None
        forward, backward, loss = (amount(body, key) for key in TIMES)
        transfer, round_trip = (_by_node(body.get(key)) for key in WAYS)
        return cls(stage, whole(body, "memory") or 0, forward, backward, loss, transfer, round_trip)

    def shown(self) -> dict[str, Any]:
        """The stage, the memory and the times for JSON."""
        times = {key: rounded(getattr(self, key)) for key in TIMES}
        return {"stage": self.stage, "memory": self.memory, **times}


class PipelineRows:
    """The state of the pipeline; empty if the run has none.

    Attributes:
        stamp: stamp of the last change.
        drawing: drawing of the paths in use; None: no site has sent any.
    """

    def __init__(self) -> None:
        self.stamp = 0
        self.drawing: Drawing | None = None
        self._version = 0
        self._places: dict[str, PlaceRow] = {}
        self._steps: deque[tuple[int, float]] = deque(maxlen=PACE)

    def pulse(self, node: str, pulse: Mapping[str, Any], stamp: int, now: float) -> None:
        """Take in a heartbeat; `now` is in seconds on any clock."""
        self.placed(node, pulse.get("place"), stamp)
        self.reached(whole(pulse, "inner_step"), now)

    def placed(self, node: str, body: Any, stamp: int) -> None:
        """Take in the place in a site's pulse; None: it has no stage."""
        place = PlaceRow.of(body)
        if place == self._places.get(node):
            return
        self.stamp = stamp
        if place is None:
            del self._places[node]
        else:
            self._places[node] = place

    def revoke(self, node: str, stamp: int) -> None:
        """Forget a site's place, and the number of steps: it may be a claim of that site."""
        self.placed(node, None, stamp)
        self._steps.clear()

    def reached(self, step: int | None, when: float) -> None:
        """Take in the number of steps that a site has done; `when` is in seconds on any clock."""
        if step is not None and (not self._steps or step > self._steps[-1][0]):
            self._steps.append((step, when))

    def step_seconds(self) -> float | None:
        """Mean duration of the latest steps, in seconds; None: not known yet."""
        if len(self._steps) < 2:
            return None
        (before, then), (now, when) = self._steps[0], self._steps[-1]
        return rounded((when - then) / (now - before))

    def drawn(self, drawing: Drawing, stamp: int) -> None:
        """Take in the drawing of the paths in use."""
        self.drawing, self._version, self.stamp = drawing, stamp, stamp

    def plan(self) -> dict[str, Any] | None:
        """The paths in use for JSON, without the picture.

        `seconds` is the duration of an iteration, without averaging. `version` changes whenever the picture does.
        """
        if (it := self.drawing) is None:
            return None
        return {"round": it.round, "title": it.title, "seconds": rounded(it.seconds), "version": self._version}

    def changes(self, since: int, name: Callable[[str], str]) -> dict[str, Any] | None:
        """What the page shows; None: no change since that stamp, or no pipeline. `name` gives that of a node id."""
        if self.stamp <= since or not (self._places or self.drawing):
            return None
        planned = enumerate(self.drawing.stages) if self.drawing else ()
        held = {node: stage for stage, nodes in planned for node in nodes}
        held |= {node: place.stage for node, place in self._places.items()}
        nodes = sorted(held, key=lambda node: (held[node], name(node)))[:MOST_ROWS]
        rows = [self._shown(node, name(node), held[node]) for node in nodes]
        return {"plan": self.plan(), "step_seconds": self.step_seconds(), "sites": rows}

    def _shown(self, node: str, name: str, stage: int) -> dict[str, Any]:
        busy = self.drawing.busy.get(node) if self.drawing else None
        place = self._places.get(node)
        known = place.shown() if place else dict.fromkeys(("memory", *TIMES))
        return {"node": node, "name": name, **known, "stage": stage, "busy": rounded(busy)}

    def measured(self, nodes: Mapping[str, str]) -> list[dict[str, Any]]:
        """A row for each of these sites (node id -> name), in order of node id; times are None if it has no stage."""
        rows = list[dict[str, Any]]()
        for node in sorted(nodes):
            place = self._places.get(node)
            told = place.shown() if place else dict.fromkeys(("stage", "memory", *TIMES))
            ways = {key: getattr(place, key) if place else {} for key in WAYS}
            rows.append({"node": node, "name": nodes[node], **ways, **told})
        return rows


def _by_node(ways: Any) -> dict[str, float]:
    """Seconds by node id, from a pulse; at most SITES entries are read."""
    if not isinstance(ways, dict):
        return {}
    return {to: amount(ways, to) for to in [*ways][:SITES] if isinstance(to, str) and NODE_ID.fullmatch(to)}


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
    from pier_node.pipeline.planning.gantt import gantt_svg
    from pier_node.pipeline.planning.plan import violations
    from pier_node.pipeline.planning.simulator import simulate

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
