"""Experts on the board, from facts as the coordinator and its sites leave them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from coordinator.played import START, Replayed, node
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.runs.experts import MOST
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

ALPHA, BETA = node("alpha"), node("beta")
PLAN = "ab" * 16
DONE: dict[str, Any] = {"done": True, "loss": 2.0, "parent_loss": 2.5, "standard_error": 0.01, "accepted": True}


def planned(*nodes: str, accepted: float = START, done: int = 0) -> Fact:
    """Experts of 10 s each, at these sites."""
    each = {"size": "M", "steps": 100, "planned_seconds": 10.0, "done": done}
    experts = [{"number": number, "domain": f"d{number}", "node": it, **each} for number, it in enumerate(nodes)]
    body = {"plan": PLAN, "accepted": accepted, "mode": "auto", "seconds": 20.0, "experts": experts}
    return Fact(START, "plan", "", body)


def said(node: str, job: int, plan: str = PLAN, **body: Any) -> Fact:
    return Fact(START, "expert", node, {"plan": plan, "job": job, "done": False, "problem": "", **body})


def board(*facts: Fact) -> ReadModel:
    made = Replayed()
    for name in ("alpha", "beta"):
        made.apply(Fact(START, "site", node(name), {"name": name}))
    for fact in facts:
        made.apply(fact)
    return made


def rows(made: ReadModel) -> list[dict[str, Any]]:
    return list(made.snapshot()["experts"]["rows"])


def test_without_a_plan_there_are_none() -> None:
    assert board(said(ALPHA, 0, step=5)).snapshot()["experts"] is None


def test_a_plan_says_who_trains_what() -> None:
    told = board(planned(ALPHA, BETA, "")).snapshot()["experts"]
    assert (told["plan"], told["mode"], told["seconds"]) == (PLAN, "auto", 20.0)
    assert [(row["domain"], row["site"], row["state"]) for row in told["rows"]] == [
        ("d0", "alpha", "waiting"),
        ("d1", "beta", "waiting"),
        ("d2", "", "nobody"),
    ]
    assert told["rows"][0]["seconds"] == 10.0


def test_an_expert_is_trained_and_judged() -> None:
    made = board(planned(ALPHA, BETA), said(ALPHA, 0, step=40, training_loss=math.log(2) * 3))
    assert rows(made)[0] | {"loss": 0} == rows(made)[0] | {"state": "training", "done": 40, "loss": 0}
    assert rows(made)[0]["loss"] == pytest.approx(3.0)
    made.apply(said(ALPHA, 0, **DONE))
    made.apply(said(BETA, 1, **{**DONE, "loss": 2.6, "accepted": False}))
    one, other = rows(made)
    assert (one["state"], one["done"], one["loss"], one["parent_loss"], one["error"]) == ("accepted", 100, 2, 2.5, 0.01)
    assert other["state"] == "refused"


def test_only_what_its_own_site_says_of_the_plan_that_holds_counts() -> None:
    made = board(planned(ALPHA, BETA), said(BETA, 0, **DONE), said(ALPHA, 0, plan="cd" * 16, **DONE))
    assert {row["state"] for row in rows(made)} == {"waiting"}


def test_one_that_goes_to_another_site_begins_again_and_the_others_go_on() -> None:
    made = board(planned(ALPHA, BETA), said(ALPHA, 0, step=40), said(BETA, 1, step=50), planned(BETA, BETA))
    assert [(row["site"], row["state"], row["done"]) for row in rows(made)] == [
        ("beta", "waiting", 0),
        ("beta", "training", 50),
    ]


def test_one_that_goes_on_elsewhere_from_its_checkpoint_keeps_its_steps() -> None:
    made = board(planned(ALPHA), said(ALPHA, 0, step=40), planned(BETA, done=30))
    assert [(row["site"], row["done"]) for row in rows(made)] == [("beta", 30)]
    made.apply(said(BETA, 0, step=35))
    assert rows(made)[0]["done"] == 35


def test_a_plan_that_is_accepted_again_begins_again() -> None:
    made = board(planned(ALPHA), said(ALPHA, 0, **DONE), planned(ALPHA, accepted=START + 1))
    assert rows(made)[0]["state"] == "waiting"


def test_only_what_changed_is_told_again() -> None:
    made = board(planned(ALPHA))
    seen = made.snapshot()["stamp"]
    made.apply(Fact(START, "note", ALPHA, {"level": 20, "text": "hello"}))
    assert made.changes(seen)["experts"] is None
    made.apply(said(ALPHA, 0, step=1))
    assert made.changes(seen)["experts"]["rows"][0]["done"] == 1


def test_there_are_not_more_than_a_plan_has() -> None:
    assert len(rows(board(planned(*[ALPHA] * (MOST + 9))))) == MOST


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 3, 2**70, math.nan, math.inf, "", "a", PLAN, [], [1], [{}], {}]
)
KEYS = ["plan", "accepted", "mode", "seconds", "number", "domain", "size", "steps", "node", "job", "step", "done"]
ENTRIES = st.dictionaries(st.sampled_from([*KEYS, "loss", "parent_loss", "training_loss", "planned_seconds"]), ODD)
PLANS = st.builds(lambda body, experts: {**body, "experts": experts}, ENTRIES, st.lists(ENTRIES, max_size=3))


@given(st.lists(st.tuples(st.sampled_from(["plan", "expert"]), st.sampled_from([ALPHA, "a", ""]), PLANS), max_size=9))
@settings(max_examples=100, deadline=None)
def test_no_fact_is_an_error(told: list[Any]) -> None:
    made = board(planned(ALPHA), *(Fact(START, kind, who, body) for kind, who, body in told))
    json.dumps(made.snapshot(), allow_nan=False)
