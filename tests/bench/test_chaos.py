"""What must not be in the sites' histories, and real sites under faults of all kinds, at random times."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from processes.run import NO_NAMESPACES
from rich.console import Console

from bench import chaos_torchft
from bench.chaos import Outcome, Setting, flaws, measure, table
from bench.chaos_faults import KINDS
from bench.slow_links import has_latency, refuse_without_tools
from pier_node.base.errors import PierError

SEED = int(os.environ.get("PIER_CHAOS_SEED", "1"))


def event(round: int, digest: str = "", tokens: int = 0) -> dict[str, Any]:
    return {"round": round, "digest": digest or f"of {round}", "tokens_in_anchor": tokens or 100 * round}


def test_equal_histories_have_no_flaw_and_a_round_may_be_told_twice() -> None:
    a, b = [event(1), event(2), event(2), event(4)], [event(1), event(3), event(4)]
    assert flaws({"a": a, "b": b}, apart=False) == []


@pytest.mark.parametrize("other", [event(2, digest="another"), event(2, tokens=201)])
def test_a_fork_is_found_whether_bits_or_tokens_differ(other: dict[str, Any]) -> None:
    histories = {"a": [event(1), event(2)], "b": [event(1), other]}
    assert flaws(histories, apart=False)[0].startswith("FORKED in round 2: ")
    assert flaws(histories, apart=True) == [], "pairs differ"
    assert flaws({"a": [*histories["a"], other]}, apart=True)[0].startswith("FORKED in round 2: ")


def test_tokens_never_go_down() -> None:
    assert flaws({"a": [event(1), event(2, tokens=50)]}, apart=False) == ["a has lost tokens from round 1 to 2"]


def test_the_table_has_what_happened() -> None:
    found = Outcome(longest=8.94, back=4.5, rounds=22, problems=["a forked"])
    found.faults[KINDS[0].name] = 3
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(found, Setting(4, 60.0, 15.0, 1, overlap=True, run="diloco")))
    shown = [line.strip("│ ").split("│") for line in capture.get().splitlines() if line.startswith("│")]
    told = {left.strip(): right.strip() for left, right in shown}
    assert told["kill all"] == "3"
    assert told["longest time without a round"] == "8.9 s"
    assert told["problems"] == "1"


def test_faults_of_some_kinds_are_drawn() -> None:
    setting = Setting(4, 60.0, 15.0, 1, overlap=False, run="diloco", only=chaos_torchft.BOTH)
    assert [kind.name for kind in setting.kinds] == ["kill all", "freeze", "leave", "cut off", "slow line"]
    assert Setting(4, 60.0, 15.0, 1, overlap=False, run="diloco").kinds == [*KINDS]


def test_the_table_of_two_systems_has_what_did_not_come_back() -> None:
    row = chaos_torchft.Row("theirs", 30, 5, 640, 61.5, math.inf, forks=2, ended=3, other=["a"], load=4.5)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(chaos_torchft.table([row], Setting(4, 60.0, 15.0, 1, overlap=False, run="diloco")))
    shown = [part.strip() for part in capture.get().splitlines()[-2].strip("│ ").split("│")]
    assert shown == ["theirs", "30", "5", "61.5 s", "not in 180 s", "2", "3", "1", "4.5"]


@pytest.mark.netns
@pytest.mark.alone
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("run", "overlap"),
    [("diloco", True), ("pier", False), ("sync", False), ("noloco", False), ("codec", True), ("witness", False)],
)
def test_nothing_breaks_under_faults_at_random(run: str, overlap: bool) -> None:
    try:
        refuse_without_tools()
    except PierError:
        pytest.skip(NO_NAMESPACES)
    if not has_latency():
        pytest.skip(NO_NAMESPACES)
    found = measure(Setting(4, 45.0, 6.0, SEED, overlap, run))
    assert found.problems == []
    assert found.faults.total() >= 20
    assert found.rounds > 0
