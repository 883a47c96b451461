"""What a cache of models may hold, and that what is served is the mixture of docs/serving.md."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from experts.serving.ensembles import opened

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.experts.comparison import chosen, even
from pier_node.experts.mixture import Array, Kind, follow, mixed, rule, score
from pier_node.experts.serving.decoding import Heard, Lost, MixtureDecoder, NoExperts, Pool, Reader, likeliest
from pier_node.experts.serving.generation import Asking
from pier_node.experts.serving.models import OwnReader
from pier_node.trainer.model.decoder import Decoder

MODEL = OwnReader(Decoder(ModelSection(preset="llama-tiny")))


@dataclass
class Book:
    """An expert that counts how often it is read."""

    name: str
    size: int = 10
    broken: Exception | None = None
    read: list[str] = field(default_factory=list)

    def load(self) -> OwnReader:
        if self.broken:
            raise self.broken
        self.read.append(self.name)
        return MODEL


def books(*sizes: int) -> list[Any]:
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
    await asyncio.wait_for(waiting, 60)
    assert order == ["first", "later"]
    assert pool.resident == [1, 2]


async def test_one_that_is_in_use_makes_room_for_nobody() -> None:
    pool = Pool(books(10, 10, 10), memory=20)
    async with pool.reserved([0]):
        pool.model(0)
        await ask(pool, 1, 2)
        assert pool.resident == [0, 2]


@pytest.mark.parametrize(
    ("error", "said"), [(OSError("the disk has gone\nand more"), "the disk has gone"), (MemoryError(), "MemoryError")]
)
async def test_one_that_cannot_be_read_is_lost_and_not_tried_again(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    shelf: list[Any] = [Book("good"), Book("bad", broken=error)]
    pool = Pool(shelf)
    for _ in range(2):
        with pytest.raises(Lost):
            await ask(pool, 1)
    assert pool.alive == [0]
    assert [record.message for record in caplog.records] == [f"the expert of bad drops out: {said}"]


def test_too_little_memory_is_said_before_anybody_asks() -> None:
    pool = Pool(books(10, 30, 20), memory=45)
    pool.check_room(1)
    with pytest.raises(PierError, match=r"--memory 45 B is too little: 2 experts take 50 B"):
        pool.check_room(2)
    with pytest.raises(PierError, match="3 experts take 60 B"):
        pool.check_room(0)


def test_what_is_plugged_counts_in_place_of_what_it_replaces() -> None:
    shelf = books(10, 30)
    pool = Pool(shelf, memory=45)
    pool.check_room(0, shelf[1], 1)
    pool.check_room(0, books(35)[0], 1)
    with pytest.raises(PierError, match="2 experts take 46 B"):
        pool.check_room(0, books(36)[0], 1)
    with pytest.raises(PierError, match="3 experts take 50 B"):
        pool.check_room(0, books(10)[0])


KINDS: list[Kind] = ["decay", "fixed-share", "bayes", "uniform"]
PROMPT = list(b"The quick brown fox")  # with what is said, shorter than the context
SAID = list(b" jumps")


@torch.no_grad()
def dense(asking: Asking, tokens: list[int]) -> Array:
    """What every expert predicts after each token, in one forward pass: log p [experts, tokens, vocabulary]."""
    models = [cast(OwnReader, expert.load()).model for expert in asking.experts]
    return np.stack([torch.log_softmax(model(torch.tensor([tokens]))[0].double(), -1).numpy() for model in models])


def heard(asking: Asking, tokens: list[int], experts: list[int]) -> dict[int, Heard]:
    made = {expert: Heard(asking.pool, expert) for expert in experts}
    for each in made.values():
        each.read(tokens)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_it_is_the_dense_mixture(folder: Path, kind: Kind) -> None:
    asking, text = opened(folder), PROMPT + SAID
    speakers = MixtureDecoder(rule(kind), even(3), heard(asking, PROMPT, [0, 1, 2]))
    logs = dense(asking, text)
    given = np.zeros((3, len(text)))  # nothing predicts the first token
    given[:, 1:] = np.take_along_axis(logs[:, :-1], np.array(text[1:])[None, :, None], axis=2)[:, :, 0]
    weights = follow(rule(kind), even(3), np.concatenate([given, np.zeros((3, 1))], axis=1))
    for place, token in enumerate(SAID, len(PROMPT)):
        want = mixed(weights[:, place, None], logs[:, place - 1])
        np.testing.assert_allclose(speakers.predict(), want, atol=1e-5)
        assert np.exp(speakers.predict()).sum() == pytest.approx(1, abs=1e-5)
        assert sum(speakers.say(token).values()) == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(speakers.posterior, np.exp(weights[:, len(text)]), atol=1e-5)
    np.testing.assert_allclose(
        [scored.log_prob for scored in speakers.prompt], score(rule(kind), even(3), given)[: len(PROMPT)], atol=1e-5
    )


def test_one_expert_of_top_k_is_the_likeliest_one_alone(folder: Path) -> None:
    asking = opened(folder)
    all_heard = heard(asking, PROMPT, [0, 1, 2])
    speakers = MixtureDecoder(rule("decay"), even(3), all_heard)
    best = likeliest(even(3), all_heard, rule("decay"), 1)
    assert best == [int(speakers.posterior.argmax())]
    assert best == chosen(speakers.posterior, 1)[0].tolist()
    alone = Reader()
    alone.read(asking.experts[best[0]].load(), PROMPT)
    one = MixtureDecoder(rule("decay"), even(3), heard(asking, PROMPT, best))
    np.testing.assert_allclose(one.predict(), cast(torch.Tensor, alone.next).numpy(), atol=1e-6)
    assert one.posterior.tolist() == [1.0]


def test_all_of_top_k_is_the_dense_mixture(folder: Path) -> None:
    asking = opened(folder)
    all_heard = heard(asking, PROMPT, [0, 1, 2])
    best = likeliest(even(3), all_heard, rule("decay"), 3)
    whole = MixtureDecoder(rule("decay"), even(3), all_heard)
    parts = MixtureDecoder(rule("decay"), even(3), {expert: all_heard[expert] for expert in best})
    np.testing.assert_allclose(parts.predict(), whole.predict(), atol=1e-6)


def test_a_lost_expert_leaves_its_weight_to_the_others(folder: Path) -> None:
    asking = opened(folder)
    speakers = MixtureDecoder(rule("decay"), even(3), heard(asking, PROMPT, [0, 1, 2]))
    asking.pool.lose(1, "its disk has gone")
    before = speakers.posterior
    said = speakers.say(SAID[0])
    assert set(said) == {0, 1, 2}  # it had predicted this one
    assert speakers.experts == [0, 2]
    assert speakers.posterior.sum() == pytest.approx(1)
    assert np.isfinite(speakers.predict()).all()
    assert before[1] > 0
    asking.pool.lose(0, "gone")
    asking.pool.lose(2, "gone")
    with pytest.raises(NoExperts):
        speakers.say(SAID[1])


@pytest.mark.parametrize("kind", ["decay", "bayes", "uniform"])
def test_an_answer_goes_on_as_if_an_unplugged_expert_had_never_been_there(folder: Path, kind: Kind) -> None:
    asking, prior = opened(folder), np.array([0.5, 0.3, 0.2])
    whole = MixtureDecoder(rule(kind), prior, heard(asking, PROMPT, [0, 1, 2]))
    never = MixtureDecoder(rule(kind), prior, heard(opened(folder), PROMPT, [0, 2]))
    asking.pool.unplug(1)
    for token in SAID:
        whole.say(token)
        never.say(token)
        np.testing.assert_allclose(whole.posterior, never.posterior, atol=1e-9)
        np.testing.assert_allclose(whole.predict(), never.predict(), atol=1e-6)


def test_what_is_no_number_is_never_mixed_in(folder: Path) -> None:
    asking = opened(folder)
    model = cast(OwnReader, asking.pool.model(2)).model
    speakers = MixtureDecoder(rule("decay"), even(3), heard(asking, PROMPT, [0, 1, 2]))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    speakers.say(SAID[0])
    assert speakers.experts == [0, 1]
    assert np.isfinite(speakers.predict()).all()
    assert 2 in asking.pool.lost


def test_nobody_is_no_mixture() -> None:
    with pytest.raises(NoExperts):
        MixtureDecoder(rule("decay"), even(3), {})
