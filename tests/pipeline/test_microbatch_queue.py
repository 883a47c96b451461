"""The order of a site's tasks: arrival first, own new microbatches last, memory and waves respected."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from pipeline.cases import iteration_plan

from pier_node.pipeline.attempt import MicrobatchQueue
from pier_node.pipeline.iteration_plan import Plan

TWO = Plan.read(iteration_plan([0, 1], [[0, 1]] * 4, [2, 2]), 2)
"""Four microbatches of a in two waves, through b. Hops: 0 at a, 1 at b, 2 loss at a, 3 at b, 4 at a."""


def test_own_new_microbatches_come_last() -> None:
    desk = MicrobatchQueue(TWO, "a", memory=3)
    assert desk.next() == (0, 0)
    desk.done((0, 0))
    desk.arrive((0, 2))
    assert desk.next() == (0, 2)
    desk.done((0, 2))
    assert [desk.next(), desk.next(), desk.next()] == [(1, 0), (2, 0), None]
    desk.arrive((0, 4))
    assert desk.next() == (0, 4)
    desk.done((0, 4))
    assert desk.next() == (3, 0)


def test_paths_that_swap_stages_keep_waves_apart() -> None:
    swapped = Plan.read(iteration_plan([0, 1, 2], [[0, 2, 1], [0, 1, 2], [0, 1, 2]], [2, 1]), 3)
    desk = MicrobatchQueue(swapped, "a", memory=3)
    assert [desk.next(), desk.next(), desk.next()] == [(0, 0), (1, 0), None]
    desk.done((0, 0))
    desk.arrive((0, 6))
    assert desk.next() == (0, 6)
    desk.done((0, 6))
    assert desk.next() == (2, 0), "the one in its place of the wave before is over"


def test_earlier_waves_go_first() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=3)
    for task in ((2, 1), (1, 1), (0, 1)):
        desk.arrive(task)
    assert [desk.next(), desk.next(), desk.next()] == [(1, 1), (0, 1), (2, 1)]


def test_what_came_first_goes_first() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=3)
    for task in ((1, 1), (0, 1), (1, 3)):
        desk.arrive(task)
    assert [desk.next(), desk.next(), desk.next()] == [(1, 1), (0, 1), (1, 3)]


def test_a_forward_waits_for_a_free_place_and_a_backward_does_not() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=1)
    desk.arrive((0, 1))
    assert desk.next() == (0, 1)
    desk.done((0, 1))
    desk.arrive((1, 1))
    assert desk.next() is None
    desk.arrive((0, 3))
    assert desk.next() == (0, 3)
    desk.done((0, 3))
    assert desk.next() == (1, 1)


def test_what_is_awaited_is_what_has_not_come() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=2)
    desk.arrive((0, 1))
    assert (0, 1) not in desk.awaited
    assert (1, 1) in desk.awaited


@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_task_is_done_once_whatever_the_order_of_arrival(memory: int, dice: random.Random) -> None:
    desks = {node: MicrobatchQueue(TWO, node, memory) for node in "ab"}
    under_way, held, seen = list[tuple[int, int]](), {"a": 0, "b": 0}, list[tuple[int, int]]()
    while not all(desk.finished for desk in desks.values()):
        for node, desk in desks.items():
            while (task := desk.next()) is not None:
                seen.append(task)
                held[node] += (task[1] < 2) - (task[1] > 2)
                assert held[node] <= memory
                desk.done(task)
                if task[1] < 4:
                    under_way.append((task[0], task[1] + 1))
        if under_way:
            task = under_way.pop(dice.randrange(len(under_way)))
            desks[TWO.ways[task[0]][task[1]]].arrive(task)
    assert sorted(seen) == sorted({*TWO.tasks("a"), *TWO.tasks("b")})
