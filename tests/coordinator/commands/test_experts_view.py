"""How a plan is shown, for a plan of the paper's size."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from coordinator.experts.cases import SITES, curves, difficulty, task
from rich.console import Console, RenderableType

from pier_coordinator.commands.experts_view import WIDTH, Planning, bars, experts_table, modes_table, told, view
from pier_coordinator.experts.difficulty import Gain
from pier_coordinator.experts.plan import Plan, compared
from pier_coordinator.experts.recipe import Mode
from pier_coordinator.experts.scheduling import Limits
from pier_coordinator.experts.task import Domain, Site, Task

EXACT = Limits(10.0, 0.0)


def planning(asked: Task, chosen: Mode = "auto", sites: list[Site] = SITES, noise: float = 0.0) -> Planning:
    known = difficulty(asked, curves(len(asked.domains)), noise)
    plans = compared(asked, known, sites, EXACT)
    plan = plans[chosen]
    assert isinstance(plan, Plan)
    return Planning(asked, known, sites, plans, plan, ["ff" * 16] * len(asked.domains))


def shown(part: RenderableType, columns: int = 140) -> str:
    console = Console(width=columns)
    with console.capture() as captured:
        console.print(part)
    return captured.get()


def test_a_bar_is_as_long_as_its_site_works() -> None:
    plan = planning(task(3), "MHo-IHo").chosen
    lines = [line.plain for line in bars(plan, SITES)]
    assert lines[0].endswith("not needed")
    assert lines[0].count("·") == WIDTH
    assert lines[2].count("·") == 0, "it is the last one"
    assert lines[1].count("·") == pytest.approx(WIDTH * (1 - 6345 / 8459), abs=1)
    assert lines[2].count("│") == 2
    assert "2.35 h  4.6 GB" not in lines[2]
    assert lines[2].endswith("2.35 h  5 GB")


def test_names_that_are_too_long_are_cut_to_their_time() -> None:
    asked = task(9)
    domains = tuple(replace(domain, name=f"a-long-name-{domain.name}") for domain in asked.domains)
    plan = planning(replace(asked, domains=domains), "MHo-IHo").chosen
    for line, site in zip(bars(plan, SITES), SITES):
        assert line.plain.startswith(site.name)
        assert len(line.plain.split("  ")[1]) <= WIDTH


def test_every_expert_has_a_row_that_says_why() -> None:
    text = shown(experts_table(planning(task(3), "MHe-IHo")))
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [row[0] for row in rows] == ["d0", "d1", "d2"]
    assert sorted(row[row.index("400") - 1] for row in rows) == ["L", "M", "S"]
    assert text.count("×") == 6


def test_classes_that_another_sample_might_change_are_marked() -> None:
    asked = task(3)
    sure, unsure = planning(asked, "MHe-IHo"), planning(asked, "MHe-IHo", noise=5.0)
    assert "?" not in shown(experts_table(sure))
    assert "?" in shown(experts_table(unsure))


def test_texts_that_are_repeated_too_often_are_seen() -> None:
    asked = task(3)
    short = replace(asked, domains=(Domain("short", 1.0, 1e7), *asked.domains[1:]))
    console = Console(width=140, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(experts_table(planning(short, "MHo-IHo")))
    assert re.search(r"\x1b\[33m *27\.5", captured.get())


def test_all_modes_are_compared_and_those_that_cannot_be_say_why() -> None:
    small = [replace(site, memory=5.1e9) for site in SITES]
    lines = shown(modes_table(planning(task(3), "auto", small))).splitlines()
    assert [line.split()[0] for line in lines] == ["mode", "auto", "MHo-IHo", "MHo-IHe", "MHe-IHo"]
    assert "←" in lines[1]
    assert "no place for" in lines[4]
    assert "+0.0000" in lines[2], "beside itself"


def test_steps_that_were_scaled_to_the_budget_are_seen() -> None:
    assert "× 0.500" in shown(modes_table(planning(replace(task(3), budget=task(3).homogeneous / 2), "MHo-IHo")))
    assert "× 0" not in shown(modes_table(planning(task(3), "MHo-IHo")))


def test_the_whole_view_names_the_bound_and_what_was_abstained_from() -> None:
    asked = task(3)
    usual = planning(asked, "MHo-IHo")
    assert "Done after 2.35 h, 0.0 % above the lower bound of 2.35 h" in shown(view(usual))
    assert "treated alike" not in shown(view(usual))
    same = np.ones(3), np.ones((5, 3))
    alike = replace(usual.difficulty, size=Gain(*same), step=Gain(*same))
    plans = compared(asked, alike, SITES, EXACT)
    chosen = plans["auto"]
    assert isinstance(chosen, Plan)
    assert "treated alike" in shown(view(replace(usual, difficulty=alike, plans=plans, chosen=chosen)))


def test_scripts_get_the_same_numbers() -> None:
    shown_to_scripts = told(planning(task(3), "MHo-IHo"))
    plan = shown_to_scripts["plans"]["MHo-IHo"]
    assert round(plan["seconds"]) == 8459
    assert [len(site["experts"]) for site in plan["sites"]] == [0, 1, 2]
    first, second = plan["sites"][2]["experts"]
    assert (first["begins"], first["ends"]) == (0.0, second["begins"])
    assert shown_to_scripts["domains"][0]["size_gain"].keys() == {"value", "low", "high"}
