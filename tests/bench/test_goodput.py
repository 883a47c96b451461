"""The schedule of faults, the figures, the table, and real sites that are killed for a few seconds."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import fmean

import pytest
from rich.console import Console

from bench.goodput import WAYS, Way, expectation, measure, table
from bench.goodput_figures import (
    Commit,
    Fault,
    Lives,
    Outcome,
    Setting,
    outcome,
    returns,
    schedule,
    tokens_at,
    undisturbed,
)

SETTING = Setting(3, 60.0, 15.0, 1, overlap=True)


def commits(*times: float, members: int = 3) -> list[Commit]:
    """A round a time, of 100 tokens each."""
    return [Commit(time, round, members, 100 * round) for round, time in enumerate(times, 1)]


def an_outcome(way: str = "pier", tokens: int = 6000, kills: int = 12, back: float = 4.0) -> Outcome:
    return Outcome(way, 60.0, tokens, kills, 0, 55, 2.5, back, 3.0, 1.5, 0.9)


def test_faults_are_in_order_the_same_each_time_and_as_often_as_asked_for() -> None:
    faults = schedule(7, 4, 15.0, 30_000.0)
    assert faults == schedule(7, 4, 15.0, 30_000.0) != schedule(8, 4, 15.0, 30_000.0)
    assert faults == sorted(faults, key=lambda fault: fault.at)
    for site in range(4):
        own = [fault.at for fault in faults if fault.site == site]
        assert len(own) == pytest.approx(2000, rel=0.1)
        gaps = [later - earlier for earlier, later in pairwise(own)]
        assert fmean(gap < 15 * math.log(2) for gap in gaps) == pytest.approx(0.5, abs=0.05)  # exponential


def test_a_site_more_changes_nothing_for_the_others() -> None:
    assert [it for it in schedule(1, 4, 15.0, 100.0) if it.site < 3] == schedule(1, 3, 15.0, 100.0)


def test_only_tokens_in_the_newest_committed_model_count() -> None:
    of_both = [*commits(1.0, 2.0, 3.0), *commits(1.1, 2.2)]
    assert [tokens_at(of_both, when) for when in (0.5, 1.0, 2.9, 3.0, 9.0)] == [0, 100, 200, 300, 300]


def test_back_is_the_next_commit_unless_the_next_kill_comes_first() -> None:
    own = commits(1.0, 2.0, 7.0, 8.0, 20.0)
    assert returns(own, [], 10.0) == []
    assert returns(own, [2.5], 10.0) == [4.5]
    assert returns(own, [2.5, 4.0, 8.5], 10.0) == [math.inf, 3.0, math.inf]


def test_an_outcome_is_of_the_window_alone() -> None:
    one = Lives(commits(1.0, 2.0, 3.0, 4.5, 9.0), killed=[4.0])
    other = Lives(commits(1.1, 2.1, 3.1, members=2), died=1)
    found = outcome("pier", [one, other], 1.5, 6.5, 2.0)
    assert (found.seconds, found.tokens, found.rate) == (5.0, 300, 60.0)
    assert (found.kills, found.died, found.rounds) == (1, 1, 3)
    assert found.members == 3.0
    assert (found.back, found.quickest) == (0.5, 0.5)
    assert found.longest == 2.0


def test_nothing_at_all_is_an_outcome_too() -> None:
    found = outcome("pier", [Lives([]), Lives([])], 0.0, 5.0, 2.0)
    assert (found.tokens, found.rounds, found.members, found.longest) == (0, 0, 0.0, 5.0)


def test_goodput_is_the_rate_over_that_without_faults_and_json_has_no_infinity() -> None:
    ideal, hit = an_outcome("no faults", 8000, 0, math.inf), an_outcome()
    assert hit.goodput(ideal) == 0.75
    record = json.loads(json.dumps(ideal.record(ideal), allow_nan=False))
    assert (record["back"], record["goodput"], record["way"]) == (None, 1.0, "no faults")


def test_who_needs_all_sites_at_once_is_undisturbed_more_rarely() -> None:
    assert undisturbed(1, 15.0, 5.0) == pytest.approx(0.7165, abs=1e-4)
    assert undisturbed(4, 15.0, 5.0) == pytest.approx(undisturbed(1, 15.0, 5.0) ** 4)
    assert "5.0 s to come back, a site is undisturbed 72% of the time, and all 3 at once 37%" in expectation(SETTING, 5)


def test_the_table_has_every_way() -> None:
    outcomes = [an_outcome("no faults", 8000, 0, math.inf), *(an_outcome(way.name) for way in WAYS[1:])]
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table(outcomes, SETTING))
    shown = capture.get()
    assert "3 sites for 60 s, each killed every 15 s on average" in shown
    assert "compute is paced" in shown
    assert shown.count("75.0%") == len(WAYS) - 1
    assert shown.count("4.0 (3.0)") == len(WAYS) - 1
    assert all(way.name in shown for way in WAYS)


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS[1:3], ids=lambda way: way.name)
def test_killed_sites_come_back_and_get_something_done(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Fault(1.0, 1), Fault(2.0, 2)]
    monkeypatch.setattr(Setting, "faults", lambda self, victims: faults[: victims - 1])
    found = measure(way, Setting(2, 60.0, 15.0, 1, overlap=True))
    assert (found.kills, found.died) == (1, 0)
    assert math.isfinite(found.back), "it came back"
    assert found.tokens > 0
