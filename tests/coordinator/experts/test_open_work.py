"""What is left of a plan, as planning anew sees it."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.expert_cases import DONE, accepted_job, accepted_plan

from pier_coordinator.experts.replan import OpenWork
from pier_coordinator.experts.task import Site
from pier_coordinator.store.experts import Expert

NAMES = {"a": "lab-0", "b": "lab-1"}
SITES = [Site("lab-0", 1e8), Site("lab-1", 1e8), Site("lab-2", 1e8)]
PLAN = accepted_plan(
    accepted_job(0, "lab-0", flops=3e9),
    accepted_job(1, "lab-0"),
    accepted_job(2, "lab-1"),
    accepted_job(3, "lab-1", after=2),
)


def job(number: int, node: str, result: dict[str, Any] | None = None, declined: tuple[str, ...] = ()) -> Expert:
    return PLAN.jobs[number].model_copy(update={"node": node, "result": result, "declined": declined})


def work(*jobs: Expert, kept: dict[int, int] | None = None, **steps: int) -> OpenWork:
    plan = PLAN.updated(job(number, "a" if number < 2 else "b") for number in range(4)).updated(jobs)
    in_training = [plan.jobs[int(key[1:])].progressed(step, None) for key, step in steps.items()]
    return OpenWork(plan.updated(in_training), kept or {}, NAMES)


def test_what_is_done_is_not_open_and_the_shortest_come_first() -> None:
    assert work().chains() == [[1], [2, 3], [0]]
    assert work(job(1, "a", DONE), job(2, "b", DONE)).chains() == [[2, 3], [0]]
    assert work(job(2, "b", DONE), job(3, "b", DONE)).chains() == [[1], [0]]


def test_what_a_site_does_next_is_begun_and_so_is_what_has_steps() -> None:
    assert [work().is_begun(chain) for chain in ([0], [1], [2, 3])] == [False, True, True]
    assert work(_0=5).is_begun([0])
    assert not work(_0=5, kept={0: 5}).is_begun([0]), "another site has trained these"


def test_of_a_chain_what_is_done_stays_done_where_it_is() -> None:
    rest = work(job(2, "b", DONE), _3=40).remainder([2, 3], False, SITES)
    assert [rest.left, rest.replay] == pytest.approx([0.6e9, 1.4e9]), "how it is set up elsewhere the job says"
    assert (rest.site, rest.begun, rest.kept) == ("lab-1", True, False)
    again = work(job(2, "b", DONE), _3=40).remainder([2, 3], True, SITES)
    assert (again.left, again.replay, again.site, again.begun, again.kept) == (2e9, 0.0, "", False, False)
    kept = work(job(2, "b", DONE), _3=40, kept={2: 100, 3: 30}).remainder([2, 3], True, SITES)
    assert kept.left == pytest.approx(0.7e9)
    assert kept.kept


def test_elsewhere_only_what_came_after_the_checkpoint_is_done_again() -> None:
    found = work(kept={0: 30}, _0=40)
    rest = found.remainder([0], False, SITES)
    assert [rest.left, rest.replay] == pytest.approx([1.8e9, 0.3e9])
    lost = found.remainder([0], True, SITES)
    assert [lost.left, lost.replay] == pytest.approx([2.1e9, 0.0])
    assert (rest.kept, lost.kept) == (True, True)
    ahead = work(kept={0: 30}, _0=10).remainder([0], False, SITES)
    assert [ahead.left, ahead.replay] == pytest.approx([2.7e9, 0.0]), "its site could not use it"


def test_a_site_that_has_declined_is_not_asked_again() -> None:
    rest = work(job(1, "", None, ("a",))).remainder([1], True, SITES)
    assert [rest.job.fits(site) for site in SITES] == [False, True, True]
    nobody = work(job(1, "", None, ("a", "b"))).remainder([1], True, SITES[:2])
    assert not any(nobody.job.fits(site) for site in SITES)
