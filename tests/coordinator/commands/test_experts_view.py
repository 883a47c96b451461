"""How a plan is shown, for a plan of the paper's size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from coordinator.experts.cases import SITES, curves, difficulty, task
from rich.console import Console, RenderableType

from pier_coordinator.commands.experts_view import WIDTH, Planning, bars, experts_table, modes_table, told, view
from pier_coordinator.experts.difficulty import EASY, ESTIMATED, HARD, MEDIUM
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


def by_hand(asked: Task, *classes: int) -> Task:
    return replace(asked, domains=tuple(replace(it, difficulty=to) for it, to in zip(asked.domains, classes)))


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
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == ["d0", "d1", "d2"]
    assert sorted(row[row.index("400") - 1] for row in rows) == ["L", "M", "S"]
    assert "hand" not in text


def test_difficulty_by_hand_is_shown_beside_the_estimate() -> None:
    made = planning(by_hand(task(3), EASY, HARD, ESTIMATED), "MHe-IHo")
    rows = [line.split() for line in shown(experts_table(made)).splitlines()[2:]]
    assert [row[6:9] for row in rows[:2]] == [["easy", "S", "400"], ["hard", "L", "400"]]
    assert [domain["difficulty"] for domain in told(made)["domains"]] == ["easy", "hard", None]


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
    lines = shown(modes_table(planning(task(3), "auto", small))).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["mode", "auto", "MHo-IHo", "MHo-IHe", "MHe-IHo"]
    assert "←" in lines[1]
    assert "no place for" in lines[4]


def test_steps_that_were_scaled_to_the_budget_are_seen() -> None:
    assert "× 0.500" in shown(modes_table(planning(replace(task(3), budget=task(3).homogeneous / 2), "MHo-IHo")))
    assert "× 0" not in shown(modes_table(planning(task(3), "MHo-IHo")))


def test_the_whole_view_names_the_bound() -> None:
    assert "Done after 2.35 h, 0.0 % above the lower bound of 2.35 h" in shown(view(planning(task(3), "MHo-IHo")))


def numbers(text: str) -> list[list[str]]:
    """The words of each line that are not cut, names left out."""
    return [[word for word in line.split() if "…" not in word and "xx" not in word] for line in text.splitlines()]


@pytest.mark.parametrize("mode", ["MHo-IHe", "MHe-IHo", "auto"])
def test_in_eighty_columns_names_are_cut_and_no_number_is(mode: Mode) -> None:
    sites = [replace(site, name=f"{site.name}{'x' * 30}", memory=2e13, speed=site.speed / 3) for site in SITES]
    asked = by_hand(task(9), EASY, MEDIUM, HARD, *[ESTIMATED] * 6)
    texts = tuple(replace(each, name=f"{each.name}{'x' * 60}", tokens=2e9) for each in asked.domains)
    made = planning(replace(asked, domains=texts), mode, sites, noise=5.0)
    for part in (experts_table(made), modes_table(made)):
        narrow, wide = shown(part, 80), shown(part, 250)
        assert numbers(narrow) == numbers(wide)
    assert "xx" in shown(experts_table(made), 80)
    assert max(len(line.plain) for line in bars(made.chosen, sites)) <= 80


def test_scripts_get_the_same_numbers() -> None:
    shown_to_scripts = told(planning(task(3), "MHo-IHo"))
    plan = shown_to_scripts["plans"]["MHo-IHo"]
    assert round(plan["seconds"]) == 8459
    assert [len(site["experts"]) for site in plan["sites"]] == [0, 1, 2]
    first, second = plan["sites"][2]["experts"]
    assert (first["begins"], first["ends"]) == (0.0, second["begins"])
    assert shown_to_scripts["domains"][0]["size_gain"].keys() == {"value", "low", "high"}
