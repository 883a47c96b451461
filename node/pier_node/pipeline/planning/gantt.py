"""The Gantt chart of a schedule as SVG: a row per site with its uplink below, and a colour for each microbatch."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from html import escape

from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulator import Schedule, Task, Transfer

GOLDEN = 0.618033988749895
"""Turns of the colour wheel from one microbatch to the next, so that neighbours look different."""


def colour(microbatch: int, darker: bool = False) -> str:
    """The colour of a microbatch as #rrggbb; a backward is darker than its forward."""
    red, green, blue = colorsys.hls_to_rgb(microbatch * GOLDEN % 1.0, 0.42 if darker else 0.64, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


WIDTH, LABEL, RIGHT, TOP = 1200, 170, 20, 64
ROW, BAR, LINE = 30, 16, 5
DARK = "text{fill:#e7ecf3}.dim{fill:#9aa8b8}.grid{stroke:#2b3440}.ground{fill:#151b23}.loss{fill:#fff;stroke:#fff}"
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-size:15px;font-weight:600}.dim{fill:#666}"
    ".grid{stroke:#e4e4e4}.wait{stroke-dasharray:2 2}.ground{fill:#fff}.loss{fill:#111;stroke:#111}"
    f"@media(prefers-color-scheme:dark){{{DARK}}}"
)
"""Supports dark pages; the colours of microbatches are visible on both backgrounds."""
LEGEND = (
    "light: forward · dark: backward · black, or white on dark: loss · dashed: waiting · below: on the way · "
    "a colour: a microbatch"
)


def gantt_svg(problem: Problem, plan: Plan, schedule: Schedule, title: str) -> str:
    """The complete SVG, stages from top to bottom."""
    order = [site for sites in plan.stages for site in sites]
    top = {site: TOP + ROW * index for index, site in enumerate(order)}
    height = TOP + ROW * len(order) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" class="ground"/>',
        f'<text x="12" y="22" class="title">{escape(title)}</text>',
        f'<text x="12" y="42" class="dim">{escape(LEGEND)}</text>',
        *_axis(schedule.makespan_s, height),
        *_labels(problem, plan, top),
        *(part for task in schedule.tasks for part in _task(task, top[task.site], schedule.makespan_s)),
        *(_transfer(it, top[it.source], schedule.makespan_s) for it in schedule.transfers),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(seconds: float, makespan: float) -> float:
    return LABEL + (WIDTH - LABEL - RIGHT) * seconds / makespan


def _axis(makespan: float, height: int) -> Iterator[str]:
    step = _nice(makespan / 10)
    for index in range(int(makespan / step) + 1):
        x = _x(index * step, makespan)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 8}"/>'
        yield f'<text class="dim" x="{x:.1f}" y="{TOP - 9}" text-anchor="middle">{index * step:g} s</text>'


def _nice(step: float) -> float:
    """The step rounded up to 1, 2 or 5 times a power of ten."""
    scale = 10.0 ** len(str(int(step))) / 10 if step >= 1 else 0.001
    while True:
        for factor in (1, 2, 5):
            if scale * factor >= step:
                return scale * factor
        scale *= 10


def _labels(problem: Problem, plan: Plan, top: dict[int, int]) -> Iterator[str]:
    for stage, sites in enumerate(plan.stages):
        for site in sites:
            name = escape(problem.sites[site].name)
            yield f'<text x="12" y="{top[site] + 13}"><tspan class="dim">{stage}</tspan>  {name}</text>'


def _task(task: Task, y: int, makespan: float) -> Iterator[str]:
    x, end, came = (_x(it, makespan) for it in (task.start_s, task.end_s, task.arrival_s))
    fill = colour(task.microbatch, darker=task.kind == "backward")
    drawn = 'class="loss"' if task.kind == "loss" else f'fill="{fill}"'
    if x - came > 0.5:
        middle = y + BAR / 2
        line = "loss wait" if task.kind == "loss" else "wait"
        stroke = colour(task.microbatch)
        yield f'<line class="{line}" x1="{came:.1f}" x2="{x:.1f}" y1="{middle}" y2="{middle}" stroke="{stroke}"/>'
    said = f"{task.kind} of microbatch {task.microbatch}: {task.start_s:.2f} to {task.end_s:.2f} s"
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{max(end - x, 0.5):.1f}" height="{BAR}" {drawn}>'
        f"<title>{said}, waited {task.start_s - task.arrival_s:.2f} s</title></rect>"
    )


def _transfer(it: Transfer, y: int, makespan: float) -> str:
    x, end = _x(it.start_s, makespan), _x(it.end_s, makespan)
    fill = colour(it.microbatch, darker=it.kind == "backward")
    return (
        f'<rect x="{x:.1f}" y="{y + BAR + 3}" width="{end - x:.1f}" height="{LINE}" fill="{fill}" opacity="0.45">'
        f"<title>microbatch {it.microbatch} on its way, {it.end_s - it.start_s:.2f} s</title></rect>"
    )
