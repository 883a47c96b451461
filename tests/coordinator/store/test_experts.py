"""An expert of a plan: how its state changes, and what is stored of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from coordinator.cases import NOW, open_store
from coordinator.expert_cases import DONE, accepted_job, accepted_plan
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.store.experts import accept_experts, put_experts

ONE = accepted_job(0, "lab-0").accepted_at("a")


def test_its_state_follows_what_its_site_reports() -> None:
    in_training = ONE.progressed(40, 1.5)
    assert (ONE.state, ONE.steps_done(0), ONE.steps_done(30)) == ("waiting", 0, 30)
    assert (in_training.state, in_training.steps_done(30), in_training.training_loss) == ("training", 40, 1.5)
    assert in_training.progressed(1000, None).steps_done(0) == 100
    assert (in_training.done(DONE).state, in_training.done(DONE).steps_done(0)) == ("accepted", 100)
    assert in_training.done({**DONE, "accepted": False}).state == "refused"


def test_it_begins_again_where_it_goes() -> None:
    moved = ONE.progressed(40, 1.5).declined_by("a").declined_by("a").moved_to("b")
    assert (moved.node, moved.declined, moved.step, moved.training_loss) == ("b", ("a",), None, None)
    assert moved.moved_to("").state == "nobody"
    assert moved.done(DONE).moved_to("c").result is None
    assert moved.accepted_at("a").declined == ()


def test_progress_does_not_make_it_another() -> None:
    assert ONE.progressed(40, 1.5).is_as(ONE)
    for other in (ONE.moved_to("b"), ONE.declined_by("a"), ONE.done(DONE)):
        assert not other.is_as(ONE)


def test_its_plan_is_the_same_whatever_its_state() -> None:
    plan, again = accepted_plan(accepted_job(0, "lab-0")), accepted_plan(ONE.progressed(40, 1.5).declined_by("b"))
    assert again.model_dump_json() == plan.model_dump_json()
    assert again.id == plan.updated([ONE.done(DONE)]).id == plan.id


async def test_the_store_keeps_node_result_and_who_has_declined(tmp_path: Path) -> None:
    plan = accepted_plan(ONE, accepted_job(1, "lab-1").accepted_at("b")).of_sites({"lab-0": "a", "lab-1": "b"})
    assert [site.node for site in plan.sites] == ["a", "b"]
    store = open_store(tmp_path)
    assert store.experts() is None
    await store.do(accept_experts, plan, NOW)
    changed = [ONE.done(DONE), plan.jobs[1].progressed(7, 1.0).declined_by("b").moved_to("")]
    await store.do(put_experts, plan.id, changed)
    await store.close()
    store = open_store(tmp_path)
    assert store.experts() == (NOW, plan.updated(changed))
    await store.do(accept_experts, plan, NOW + 1)
    assert store.experts() == (NOW + 1, plan)
    await store.close()


async def test_the_plan_that_was_accepted_last_counts_also_when_the_clock_was_set_back(tmp_path: Path) -> None:
    first, second = accepted_plan(ONE), accepted_plan(accepted_job(0, "lab-1"))
    store = open_store(tmp_path)
    for plan, now in ((first, NOW), (second, NOW - 3600), (first, NOW - 7200)):
        await store.do(accept_experts, plan, now)
        assert store.experts() == (now, plan)
    await store.close()


ODD: st.SearchStrategy[Any] = st.sampled_from([None, True, -1, 0, 3, 2**70, math.nan, math.inf, "", "a", [], [1], {}])


@given(st.dictionaries(st.sampled_from([*DONE, "epochs", "flops", "seconds"]), ODD))
def test_no_result_is_an_error(body: dict[str, Any]) -> None:
    json.dumps(ONE.done(body).result, allow_nan=False)
