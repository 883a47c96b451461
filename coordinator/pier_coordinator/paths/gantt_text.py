"""A schedule as a Gantt chart for the terminal: a line for each site, a column for a part of the iteration."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pier_coordinator.paths.colours import colour
from pier_coordinator.paths.plan import Plan
from pier_coordinator.paths.problem import Problem
from pier_coordinator.paths.schedule import BACKWARD, LOSS, Schedule, Task
from pier_node.units import percent

MARKS = {"forward": "█", "backward": "▓", "loss": "◆"}
WAITING, ON_THE_WAY = "·", "─"
LEGEND = "█ forward  ▓ backward  ◆ loss  ─ sends  · waits; a colour is a microbatch"
Cell = tuple[int, str, str]
"""How much it matters, its mark, its colour."""


def gantt_text(problem: Problem, plan: Plan, schedule: Schedule, width: int) -> RenderableType:
    """The chart, `width` columns for the iteration."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right")
    table.add_column("site", no_wrap=True)
    table.add_column(f"0 {f' {schedule.makespan_s:.2f} s':─>{width - 2}}", no_wrap=True)
    table.add_column("busy", justify="right")
    lines = _lines(schedule, width)
    for stage, sites in enumerate(plan.stages):
        for site in sites:
            busy = percent(schedule.utilisation[site])
            table.add_row(str(stage), Text(problem.sites[site].name), lines[site], busy)
    return Group(table, Text(LEGEND, "dim"))


def _lines(schedule: Schedule, width: int) -> list[Text]:
    grid: list[list[Cell]] = [[(0, " ", "")] * width for _ in range(schedule.sites)]
    for it in schedule.transfers:
        _fill(grid[it.source], schedule, it.start_s, it.end_s, (1, ON_THE_WAY, "dim"))
    for task in schedule.tasks:
        _fill(grid[task.site], schedule, task.arrival_s, task.start_s, (2, WAITING, "dim"))
        _fill(grid[task.site], schedule, task.start_s, task.end_s, _cell(task))
    return [Text.assemble(*((mark, style) for _, mark, style in row)) for row in grid]


def _cell(task: Task) -> Cell:
    style = "bold" if task.kind == LOSS else colour(task.microbatch, darker=task.kind == BACKWARD)
    return 4 if task.kind == LOSS else 3, MARKS[task.kind], style


def _fill(row: list[Cell], schedule: Schedule, start_s: float, end_s: float, cell: Cell) -> None:
    """Marks the columns from start to end; what matters more stays."""
    scale = len(row) / schedule.makespan_s
    first = min(int(start_s * scale), len(row) - 1)
    for column in range(first, min(max(first + (end_s > start_s), round(end_s * scale)), len(row))):
        row[column] = max(row[column], cell, key=lambda it: it[0])
