"""A suspicion counts for one attempt, and not for ever."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.virtual_time import run

from pier_node.config.run import SITES
from pier_node.rounds.suspects import EXPIRY, LONGEST, NOBODY, STANDSTILL, Involved, Standstill, Suspects, Suspicion


def test_a_suspicion_ends_by_itself() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.add("a")
        await asyncio.sleep(EXPIRY / 2)
        suspects.add("b")
        assert suspects.now() == {"a", "b"}
        await asyncio.sleep(EXPIRY / 2 + 1)
        assert suspects.now() == {"b"}

    run(main())


def test_a_site_that_was_started_again_is_let_in_earlier_but_later_each_time() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        started = {"a": -math.inf}
        suspects, left_out = Suspects(started.__getitem__), list[float]()
        for _ in range(7):
            suspects.clear()
            suspects.add("a")
            began = clock()
            await asyncio.sleep(0.1)
            started["a"] = clock()
            while suspects.now():  # noqa: ASYNC110 (nobody tells: time passes)
                await asyncio.sleep(0.1)
            left_out.append(clock() - began)
        assert left_out == pytest.approx([1, 2, 4, 8, 16, EXPIRY, EXPIRY], abs=0.11)
        suspects.forgive("a")
        suspects.add("a")
        started["a"] = clock() + 0.1
        await asyncio.sleep(1.0)
        assert not suspects.now(), "it took part to the end: it starts again"
        suspects.add("a")
        await asyncio.sleep(EXPIRY - 1)
        assert suspects.now() == {"a"}, "it has not been started again since"
        suspects.add("a", refused=True)
        await asyncio.sleep(4.1)
        assert not suspects.now(), "the third time: it is asked again, whatever it has done since"

    run(main())


def test_an_attempt_clears_all() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.add("a")
        suspects.clear()
        assert not suspects.now()

    run(main())


def test_a_member_that_is_mute_in_round_after_round_is_left_out_for_longer_each_time() -> None:
    async def main() -> None:
        suspects, left_out = Suspects(), list[float]()
        for number in range(1, 12):
            for _ in range(3):  # attempts at one round count once
                suspects.add("a", mute_in=number)
            suspects.clear()
            began = asyncio.get_running_loop().time()
            while suspects.now():  # noqa: ASYNC110 (nobody tells: time passes)
                await asyncio.sleep(EXPIRY / 2)
            left_out.append(asyncio.get_running_loop().time() - began)
        assert left_out[:4] == pytest.approx([0.0, 2 * EXPIRY, 4 * EXPIRY, 8 * EXPIRY])
        assert left_out[-1] == pytest.approx(LONGEST)
        suspects.forgive("ab")
        suspects.add("a", mute_in=12)
        suspects.clear()
        assert not suspects.now(), "it took part to the end: it starts again"

    run(main())


def test_a_member_that_was_lost_is_not_mute() -> None:
    async def main() -> None:
        suspects = Suspects()
        for _ in range(5):
            suspects.add("a")
            suspects.clear()
            assert not suspects.now()

    run(main())


@pytest.mark.thorough
def test_fresh_names_take_no_more_memory_and_push_out_nobody_who_was_mute_before() -> None:
    """A stranger can come under a new key in each round."""

    async def main() -> None:
        suspects = Suspects()
        for number in (1, 2, 3):
            suspects.add("a", mute_in=number)
        for number in range(3 * SITES):
            suspects.add(f"lost {number}")
            suspects.add(f"mute {number}", mute_in=4)
        assert len(suspects._doubts) + len(suspects._past) <= 2 * SITES
        assert "a" in suspects.left_out()
        await asyncio.sleep(EXPIRY + 1)
        suspects.add("b")
        assert suspects._doubts.keys() == {"b"}, "what is over is forgotten"

    run(main())


def test_a_leader_may_let_all_wait_for_a_while_only() -> None:
    async def main() -> None:
        standstill = Standstill()
        told = []
        for leader, all_wait in (("a", True), ("a", True), ("a", False), ("a", True), ("b", True), ("b", True)):
            told.append(standstill.too_long(leader, all_wait))
            await asyncio.sleep(STANDSTILL + 1)
        assert told == [False, True, False, False, False, True], "somebody still trained, and then another kept"

    run(main())


def test_who_is_lost_is_suspected_at_once_and_who_gives_up_only_the_second_time() -> None:
    involved = Involved()
    assert involved.add(Suspicion("b", "lost"), "bcd") == {"b"}
    assert involved.add(Suspicion(NOBODY, "c gave up", told=("c", "d")), "bcd") == set()
    assert involved.add(Suspicion(NOBODY, "d gave up", told=("d", NOBODY)), "bcd") == {"d"}
    assert involved.add(Suspicion(NOBODY, "the result is not finite"), "bc") == set(), "d was not in it"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), min_size=12, max_size=12))
def test_who_has_a_part_in_every_failure_is_found_however_its_victims_change(failures: list[tuple[str, bool]]) -> None:
    involved = Involved()
    for other, told_by_it in failures:
        told = ("z", other) if told_by_it else (other, "z")
        found = involved.add(Suspicion(NOBODY, "gave up", told=told), "abcdefz")
    assert "z" in found
    assert found <= {"z"} or len({other for other, _ in failures}) == 1
