"""Matrices dealt among processes that have each all of them, parts of them, or the same part as another, over gloo."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pier_node.engine.parameters import Part
from pier_node.outer.inner_optimizer import Named, Orthogonal, cost
from pier_node.trainer.replica import Dealt

SHAPES = {"wide": (8, 24), "tall": (24, 8), **{f"square {number}": (12, 12) for number in range(7)}}
RANKS = 3
WAYS = ("whole", "rows", "columns that two have")
Told = tuple[str, list[str], list[str]]
"""How matrices are spread, which of them a process has orthogonalised, and of which it got the right part."""


def _updates() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _parts(how: str, rank: int) -> list[Part]:
    if how == "whole":
        return [Part(name, (0, 0), shape, rank == 0) for name, shape in SHAPES.items()]
    if how == "rows":  # 5, 5 and 2 of 12; 8, 8 and 8 of 24; 3, 3 and 2 of 8
        each = {rows: -(-rows // RANKS) for rows in (8, 12, 24)}
        starts = {rows: min(rows, each[rows] * rank) for rows in each}
        sizes = {rows: min(rows - starts[rows], each[rows]) for rows in each}
        return [Part(name, (starts[r], 0), (sizes[r], columns), True) for name, (r, columns) in SHAPES.items()]
    half = {0: 0, 1: 1, 2: 0}[rank]  # of the columns; two processes have the first
    return [Part(it, (0, half * c // 2), (r, c // 2), rank < 2) for it, (r, c) in SHAPES.items()]


def _part_of(whole: torch.Tensor, part: Part) -> torch.Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(part.starts, part.sizes))]


def _work(rank: int, store: Path, told: SimpleQueue[Told]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    alone, done, updates = Orthogonal.__call__, list[str](), _updates()

    def counted(self: Orthogonal, updates: Named) -> Named:
        done.extend(updates)
        return alone(self, updates)

    Orthogonal.__call__ = counted  # type: ignore[method-assign]
    expected = alone(Orthogonal(), updates)
    for how in WAYS:
        own = _parts(how, rank)
        deal = Dealt(own, {name: update.shape for name, update in updates.items()})
        made = deal({part.name: _part_of(updates[part.name], part) for part in own})
        near = [it.name for it in own if torch.allclose(made[it.name], _part_of(expected[it.name], it), atol=1e-5)]
        told.put((how, [*done], near))
        done.clear()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    context, store = get_context("spawn"), tmp_path_factory.mktemp("group") / "store"
    queue: SimpleQueue[Told] = context.SimpleQueue()
    team = [context.Process(target=_work, args=(rank, store, queue)) for rank in range(RANKS)]
    for process in team:
        process.start()
    heard = [queue.get() for _ in team for _ in WAYS]
    for process in team:
        process.join()
    return heard


@pytest.mark.parametrize("how", WAYS)
def test_each_process_does_its_share_and_gets_its_part_of_all_results(how: str, told: list[Told]) -> None:
    heard = [(done, near) for way, done, near in told if way == how]
    assert sorted(name for done, _ in heard for name in done) == sorted(SHAPES), "none is done twice"
    costs = [sum(cost(SHAPES[name]) for name in done) for done, _ in heard]
    assert max(costs) - min(costs) <= max(cost(shape) for shape in SHAPES.values())
    assert [near for _, near in heard] == [[*SHAPES]] * RANKS
