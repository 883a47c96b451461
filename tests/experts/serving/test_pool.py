from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.experts.serving.models import Lost, Pool
from pier_node.trainer.model.decoder import Decoder

MODEL = Decoder(ModelSection(preset="llama-tiny"))


@dataclass
class Book:
    """An expert that counts how often it is read."""

    name: str
    size: int = 10
    broken: bool = False
    read: list[str] = field(default_factory=list)

    def load(self) -> Decoder:
        if self.broken:
            raise OSError("the disk has gone\nand more")
        self.read.append(self.name)
        return MODEL


def books(*sizes: int) -> list[Book]:
    return [Book(f"b{number}", size) for number, size in enumerate(sizes)]


async def ask(pool: Pool, *indices: int) -> None:
    for index in indices:
        async with pool.reserved([index]):
            pool.model(index)


async def test_an_expert_is_read_when_it_is_first_asked_and_only_then() -> None:
    shelf = books(10, 10)
    pool = Pool(shelf)
    await ask(pool, 1, 1)
    assert [book.read for book in shelf] == [[], ["b1"]]


async def test_the_least_recently_asked_makes_room() -> None:
    shelf = books(10, 10, 10)
    pool = Pool(shelf, memory=20)
    await ask(pool, 0, 1, 0, 2)
    assert pool.resident == [0, 2]
    await ask(pool, 1)
    assert pool.resident == [2, 1]
    assert [len(book.read) for book in shelf] == [1, 2, 1]


async def test_a_big_one_puts_out_several_and_memory_is_never_exceeded() -> None:
    pool = Pool(books(10, 10, 20, 5), memory=25)
    for index in (0, 1, 3, 2, 0, 3, 1, 2):
        await ask(pool, index)
        assert sum((10, 10, 20, 5)[at] for at in pool.resident) <= 25
    assert pool.resident == [2]


async def test_who_wants_more_than_is_free_waits_until_it_is() -> None:
    pool, order = Pool(books(10, 10, 10), memory=20), list[str]()

    async def later() -> None:
        async with pool.reserved([1, 2]):
            order.append("later")
            pool.model(1), pool.model(2)

    async with pool.reserved([0]):
        pool.model(0)
        waiting = asyncio.create_task(later())
        async with pool.reserved([0, 1]):  # it shares what is in use already
            pool.model(1)
            assert pool.resident == [0, 1]
        order.append("first")
    await asyncio.wait_for(waiting, 5)
    assert order == ["first", "later"]
    assert pool.resident == [1, 2]


async def test_one_that_is_in_use_makes_room_for_nobody() -> None:
    pool = Pool(books(10, 10, 10), memory=20)
    async with pool.reserved([0]):
        pool.model(0)
        await ask(pool, 1, 2)
        assert pool.resident == [0, 2]


async def test_one_that_cannot_be_read_is_lost_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    shelf = [Book("good"), Book("bad", broken=True)]
    pool = Pool(shelf)
    for _ in range(2):
        with pytest.raises(Lost):
            await ask(pool, 1)
    assert pool.alive == [0]
    assert [record.message for record in caplog.records] == ["the expert of bad drops out: the disk has gone"]


def test_too_little_memory_is_said_before_anybody_asks() -> None:
    pool = Pool(books(10, 30, 20), memory=45)
    pool.check_room(1)
    with pytest.raises(PierError, match=r"--memory 45 B is too little: 2 experts take 50 B"):
        pool.check_room(2)
    with pytest.raises(PierError, match="3 experts take 60 B"):
        pool.check_room(0)
