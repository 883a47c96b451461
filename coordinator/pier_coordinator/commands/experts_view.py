"""Shows a plan for experts: to people in a terminal of 80 columns or more (`view`), and to scripts (`told`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pier_coordinator.experts.allocation import BudgetError
from pier_coordinator.experts.difficulty import ESTIMATED, Classes, Difficulty, Gain, steadiness
from pier_coordinator.experts.plan import Plan, UnplacedError
from pier_coordinator.experts.recipe import Mode, judging_flops
from pier_coordinator.experts.task import Site, Task
from pier_node.base.units import UNKNOWN, amount, count, number, percent, several, span
from pier_node.experts.config import Difficulty as Class
from pier_node.experts.mixture import Array

WIDTH = 46
"""Length of the longest bar, in terminal cells."""
CLASSES: tuple[Class, ...] = get_args(Class)
"""Names of EASY, MEDIUM and HARD."""
LONGEST_NAME = 14
"""Cells of a site's name beside its bar."""
LONGEST_REASON = 26
"""Cells of the reason why a mode has no plan."""
STEADY = 0.95
"""A domain that stays in its class in a smaller fraction of the bootstrap draws is marked."""
WHY = {
    "area": "all sites at work all the time",
    "longest": "the longest expert where it is fastest",
    "prefix": "the largest experts at the fastest sites",
    "nested": "what only some sites can train",
    "relaxed": "the linear relaxation",
    "solver": "the solver",
}
"""Lower bounds in words."""


NAMES, WORDS, OPTIONAL = ("domain", "site"), ("expert", "mode", "sizes", "size"), ("idle", "by\nhand")
"""Columns that are cut, columns that stand to the left, and columns that are left out if nothing is in them."""
ROUNDING = 0.001
LEGEND = """\
size pays, steps pay: times the mean, ? where another sample of the text might tell another class. They are those of \
n-grams, which stand in for models, and sort the domains into classes for the paper's modes; auto treats all alike.
idle: additional steps that the site could do until the last one is done."""


@dataclass(frozen=True)
class Planning:
    """The result of planning: the plan of each mode or why it has none, and the plan of the requested mode."""

    task: Task
    difficulty: Difficulty
    sites: Sequence[Site]
    plans: dict[Mode, Plan | BudgetError | UnplacedError]
    chosen: Plan
    digests: Sequence[str]


def view(planning: Planning) -> RenderableType:
    """The chosen plan: its experts, its schedule and what the other modes would give."""
    return Group(
        _head(planning),
        "",
        experts_table(planning),
        "",
        *bars(planning.chosen, planning.sites),
        *_chains(planning),
        _end(planning.chosen),
        "",
        modes_table(planning),
        "",
        Text(LEGEND, "dim"),
    )


def _head(planning: Planning) -> Text:
    task, chosen = planning.task, planning.chosen
    things = [(task.domains, "domain"), (chosen.jobs, "expert"), (planning.sites, "site")]
    counts = ", ".join(several(len(some), name) for some, name in things)
    sizes = ", ".join(f"{size.name} {size.parameters / 1e6:,.3g} M" for size in task.sizes)
    return Text.assemble((chosen.mode, "bold"), f"  {counts}; {chosen.flops:.3g} FLOPs; parameters: {sizes}")


def _chains(planning: Planning) -> list[Text]:
    """Each chain in full: in its bar it may be cut."""
    named = [job.name for job in planning.chosen.jobs] if planning.task.chain else []
    return [Text("Chains: " + "; ".join(named))] if named else []


def _end(plan: Plan) -> Text:
    where = plan.schedule
    bound = f"{100 * where.gap:.1f} % above the lower bound of {span(where.bound)} ({WHY[where.why]})"
    return Text(f"Done after {span(where.makespan)}, {bound}; sites idle {percent(plan.idle)} of that time.")


def columns(*headings: str) -> Table:
    """An empty table that fits into 80 columns: names are cut if they must be, and numbers never are."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        if heading in NAMES:
            table.add_column(heading, overflow="ellipsis")
        else:
            table.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True)
    return table


def experts_table(planning: Planning) -> Table:
    """A table with a row per domain: its expert, the site, and why. What no domain has, has no column."""
    gains = planning.difficulty.size, planning.difficulty.step
    pays = [_pays(gain, planning.difficulty.loss, planning.task.given) for gain in gains]
    rows = [
        _expert(planning, index, *(column[index] for column in pays)) for index in range(len(planning.task.domains))
    ]
    shown = [heading for heading in rows[0] if heading not in OPTIONAL or any(row[heading] != UNKNOWN for row in rows)]
    table = columns(*shown)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def _expert(planning: Planning, index: int, size_pays: str, steps_pay: str) -> dict[str, str | Text]:
    task, chosen, domain = planning.task, planning.chosen, planning.task.domains[index]
    job = next(number for number, job in enumerate(chosen.jobs) if index in job.domains)
    site = planning.sites[chosen.schedule.places[job]]
    epochs, extra = float(chosen.epochs[index]), int(chosen.extra[index])
    return {
        "domain": Text(domain.name, "bold"),
        "text": amount(domain.tokens),
        "bits/\nbyte": number(float(planning.difficulty.loss[index]), 2),
        "size\npays": size_pays,
        "steps\npay": steps_pay,
        "by\nhand": UNKNOWN if domain.difficulty == ESTIMATED else CLASSES[domain.difficulty],
        "expert": task.sizes[chosen.recipe.sizes[index]].name,
        "steps": count(int(chosen.recipe.steps[index])),
        "idle": f"+{count(extra)}" if extra else UNKNOWN,
        "epochs": Text(number(epochs, 1), "yellow" if epochs > task.max_epochs * (1 + ROUNDING) else ""),
        "site": site.name,
        "takes": span(_takes(planning, index, site)),
    }


def _takes(planning: Planning, index: int, site: Site) -> float:
    """Seconds that a domain takes, without transfers, which belong to a whole chain."""
    task, made = planning.task, planning.chosen.recipe
    judging = judging_flops(task.sizes[made.sizes[index]], [task.domains[index]])
    return (float(made.flops(task)[index]) + judging) / site.speed + task.setup


def _pays(gain: Gain, loss: Array, given: Classes) -> list[str]:
    mean, steady = float(gain.value.mean()) or 1.0, steadiness(gain, loss, given)
    return [f"{value / mean:.2f}{' ' if sure >= STEADY else '?'}" for value, sure in zip(gain.value, steady)]


def bars(plan: Plan, sites: Sequence[Site]) -> list[Text]:
    """A line per site: its experts in order, each as long as it takes, and dots where the site idles."""
    widest = min(LONGEST_NAME, max(len(site.name) for site in sites))
    lines = []
    for index, site in enumerate(sites):
        own = plan.held(index)
        ends = accumulate(job.seconds(site) for job in own)
        cells = [0, *(round(WIDTH * end / plan.schedule.makespan) for end in ends)]
        line = Text(f"{_cut(site.name, widest)}  ")
        for turn, (job, first, last) in enumerate(zip(own, cells, cells[1:])):
            line.append(_block(job.name, last - first), "reverse" if turn % 2 else "bold reverse")
        line.append("·" * (WIDTH - cells[-1]), "dim")
        used = f"{span(float(plan.loads[index]))}  {amount(plan.memory(index))}"
        line.append(f"  {used}" if own else "  not needed")
        lines.append(line)
    return lines


def _cut(name: str, cells: int) -> str:
    """A name, padded or cut."""
    return name.ljust(cells) if len(name) <= cells else f"{name[: cells - 1]}…"


def _block(name: str, cells: int) -> str:
    """A name padded or cut to a number of cells, with an edge to the next one."""
    return f"{name[: cells - 1]:─<{cells - 1}}│" if cells > 1 else "│" * cells


def modes_table(planning: Planning) -> Table:
    """What each mode would give: its sizes, time, bound, budget and greatest memory."""
    table = columns("mode", "sizes", "steps", "done\nafter", "lower\nbound", "gap", "FLOPs", "memory")
    for mode, plan in planning.plans.items():
        called = Text(f"{mode} ←" if plan is planning.chosen else mode, "bold" if plan is planning.chosen else "")
        if not isinstance(plan, Plan):
            table.add_row(called, Text(_cut(str(plan), LONGEST_REASON).rstrip(), "yellow"))
            continue
        table.add_row(
            called,
            _sizes(planning.task, plan),
            f"× {plan.recipe.scale:.3f}" if abs(plan.recipe.scale - 1) > ROUNDING else "",
            span(plan.schedule.makespan),
            span(plan.schedule.bound),
            f"{100 * plan.schedule.gap:.1f} %",
            Text(f"{100 * (plan.flops / plan.budget - 1):+.2f} %", "" if plan.is_equal else "yellow"),
            amount(max(job.size.memory for job in plan.jobs)),
        )
    return table


def _sizes(task: Task, plan: Plan) -> str:
    counts = [int((plan.recipe.sizes == index).sum()) for index in range(len(task.sizes))]
    return " ".join(f"{many} {size.name}" for many, size in zip(counts, task.sizes) if many)


def told(planning: Planning) -> dict[str, Any]:
    """The domains, and the plan of each mode or why it has none, for JSON; times in seconds, sizes in bytes."""
    difficulty = planning.difficulty
    domains = [
        {
            "name": domain.name,
            "digest": digest,
            "tokens": domain.tokens,
            "bits_per_byte": float(difficulty.loss[index]),
            "difficulty": None if domain.difficulty == ESTIMATED else CLASSES[domain.difficulty],
            "size_gain": _gain(difficulty.size.value[index], difficulty.size.interval[:, index]),
            "step_gain": _gain(difficulty.step.value[index], difficulty.step.interval[:, index]),
        }
        for index, (domain, digest) in enumerate(zip(planning.task.domains, planning.digests))
    ]
    plans = {
        mode: _plan(planning, plan) if isinstance(plan, Plan) else {"error": str(plan)}
        for mode, plan in planning.plans.items()
    }
    return {"chosen": planning.chosen.mode, "domains": domains, "plans": plans}


def _gain(value: float, interval: Any) -> dict[str, float]:
    """A gain in bits per byte per FLOP, with its interval."""
    return {"value": float(value), "low": float(interval[0]), "high": float(interval[1])}


def _plan(planning: Planning, plan: Plan) -> dict[str, Any]:
    return {
        "scale": plan.recipe.scale,
        "flops": plan.flops,
        "budget": plan.budget,
        "seconds": plan.schedule.makespan,
        "bound": plan.schedule.bound,
        "bound_is": plan.schedule.why,
        "gap": plan.schedule.gap,
        "idle": plan.idle,
        "sites": [_site(planning, plan, index) for index in range(len(planning.sites))],
    }


def _site(planning: Planning, plan: Plan, index: int) -> dict[str, Any]:
    site, own = planning.sites[index], plan.held(index)
    ends = [*accumulate(job.seconds(site) for job in own)]
    return {
        "name": site.name,
        "seconds": float(plan.loads[index]),
        "memory": plan.memory(index),
        "experts": [
            {
                "begins": begins,
                "ends": end,
                "size": job.size.name,
                "flops": job.flops,
                "domains": [_domain(planning, plan, domain) for domain in job.domains],
            }
            for job, begins, end in zip(own, [0.0, *ends], ends)
        ],
    }


def _domain(planning: Planning, plan: Plan, domain: int) -> dict[str, Any]:
    return {
        "name": planning.task.domains[domain].name,
        "steps": int(plan.recipe.steps[domain]),
        "extra_steps": int(plan.extra[domain]),
        "epochs": float(plan.epochs[domain]),
    }
