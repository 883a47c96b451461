"""Experts trained by real workers (HDEE, arXiv 2502.19385), their verdict, and their end."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coordinator.expert_cases import accepted_job
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.engine.messages import Progress
from pier_node.experts import trainer
from pier_node.experts.card import Card, load_card
from pier_node.experts.domains import Text
from pier_node.experts.job import ExpertJob
from pier_node.experts.resume import FILE, ResumeState, check
from pier_node.experts.trainer import WORST, Parent, Shop, Verdict, export_parent, judged, train_expert
from pier_node.trainer.model.cost import flops_per_token
from pier_node.trainer.model.export import import_weights

pytestmark = pytest.mark.processes

BATCH, CONTEXT = 4, 32
MakeJob = Callable[..., ExpertJob]


def silent(_progress: Progress) -> None:
    pass


async def trained(job: ExpertJob, parent: Parent, shop: Shop) -> Card:
    async with asyncio.timeout(120):
        return await train_expert(job, parent, shop, silent)


async def test_an_expert_is_better_than_its_parent_and_costs_what_was_planned(
    make_job: MakeJob, parent: Parent, shop: Shop
) -> None:
    job = make_job(size="L", ffn_dim=128)
    card = await trained(job, parent, shop)
    planned = flops_per_token(job.run(shop.run).model) * job.steps * BATCH * CONTEXT
    assert card.tokens == job.steps * BATCH * CONTEXT
    assert abs(card.flops / planned - 1) < 0.01
    assert 0 < card.epochs < 4
    assert card.accepted
    assert card.loss < 0.8 * card.parent_loss
    folder = shop.place(card.name)
    assert load_card(folder) == card
    model, _ = import_weights(folder)
    assert model.ffn_dim == 128
    assert not folder.with_name(f"{card.name}.work").exists()


async def test_an_expert_is_the_same_beside_another_and_at_another_site(
    make_job: MakeJob, parent: Parent, shop: Shop
) -> None:
    alone = await trained(make_job("sea"), parent, shop)
    elsewhere = dataclasses.replace(shop, folder=shop.folder.with_name("other"))
    again, other = await asyncio.gather(
        trained(make_job("sea"), parent, elsewhere), trained(make_job("sky"), parent, elsewhere)
    )
    assert again == alone
    assert other.digest != alone.digest


async def test_an_expert_that_was_interrupted_ends_with_the_same_bits(
    make_job: MakeJob, parent: Parent, shop: Shop
) -> None:
    whole = await trained(make_job(), parent, shop)
    broken = dataclasses.replace(shop, folder=shop.folder.with_name("broken"), checkpoint_seconds=0.0)
    seen: list[int] = []
    reached = asyncio.Event()

    def told(progress: Progress) -> None:
        seen.append(progress.step)
        if progress.step >= 12:
            reached.set()

    work = asyncio.create_task(train_expert(make_job(), parent, broken, told))
    await asyncio.wait_for(reached.wait(), 120)
    work.cancel()
    await asyncio.wait([work])
    assert broken.place(f"{whole.name}.work").exists()
    first = len(seen)
    card = await asyncio.wait_for(train_expert(make_job(), parent, broken, told), 120)
    assert card == whole
    assert seen[first] >= 10  # the steps before the checkpoint were not done again


class Handed:
    """Takes an expert's checkpoints, and has one for whoever goes on."""

    def __init__(self, reached: int) -> None:
        self._until, self.reached = reached, asyncio.Event()
        self.content, self.step = b"", 0

    async def fetched(self, folder: Path, name: str, length: int, own: int) -> bool:
        if self.step <= own:
            return False
        path = folder / "came"
        path.write_bytes(self.content)
        check(path, length, self.step, name)
        path.replace(folder / FILE)
        return True

    def saved(self, path: Path, step: int) -> None:
        if not self.reached.is_set():
            self.content, self.step = path.read_bytes(), step
        if step >= self._until:
            self.reached.set()


async def test_an_expert_that_goes_on_at_another_site_ends_with_the_same_bits(
    make_job: MakeJob, parent: Parent, shop: Shop
) -> None:
    whole = await trained(make_job(), parent, shop)
    here, there = (
        dataclasses.replace(shop, folder=shop.folder.with_name(name), checkpoint_seconds=0.0)
        for name in ("lost", "other")
    )
    handed, seen = Handed(12), list[int]()
    work = asyncio.create_task(train_expert(make_job(), parent, here, silent, handed))
    await asyncio.wait_for(handed.reached.wait(), 120)
    work.cancel()
    await asyncio.wait([work])
    assert not here.place(whole.name).exists()
    assert handed.step == 12
    rest = train_expert(make_job(), parent, there, lambda progress: seen.append(progress.step), handed)
    assert await asyncio.wait_for(rest, 120) == whole, "its digest is that of the weights"
    assert min(seen) >= 12


async def test_of_its_last_checkpoint_another_site_makes_the_same_expert(
    make_job: MakeJob, parent: Parent, shop: Shop
) -> None:
    handed, seen, other = Handed(1 << 30), list[int](), shop.folder.with_name("behind it")
    whole = await train_expert(make_job(), parent, shop, silent, handed)
    assert handed.step == make_job().steps
    there = dataclasses.replace(shop, folder=other)
    again = await train_expert(make_job(), parent, there, lambda step: seen.append(step.step), handed)
    assert again == whole, "judged again, and by the same weights"
    assert seen == [], "nothing is trained"


async def test_a_bad_expert_is_refused_and_its_parent_stands_in(make_job: MakeJob, parent: Parent, shop: Shop) -> None:
    good = await trained(make_job(), parent, shop)
    model, weights = import_weights(shop.place(good.name))
    better = Parent(good.name, model, weights.numpy())
    card = await trained(make_job(lr=0.3 * 10, min_lr=0.3, seed=8), better, shop)  # x 1000 and x 100
    assert not card.accepted
    assert card.parent_loss == pytest.approx(good.loss, rel=1e-6)
    assert export_parent(better, shop) == shop.place(good.name)


def test_a_parent_that_was_being_written_when_the_site_died_is_written_anew(parent: Parent, shop: Shop) -> None:
    place = shop.place(parent.name[:32])
    for left in (place, place.with_name(f"{place.name}.work")):
        left.mkdir(parents=True)
        (left / "model.safetensors").write_text("half")
    assert export_parent(parent, shop) == place
    assert import_weights(place)[1].numpy().tobytes() == parent.weights.tobytes()
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_the_seed_stands_in_as_it_is(parent: Parent, shop: Shop) -> None:
    folder = export_parent(parent, shop)
    assert torch.equal(import_weights(folder)[1], torch.from_numpy(parent.weights))
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


async def test_the_checkpoint_holds_optimizer_and_cursor(make_job: MakeJob, parent: Parent, shop: Shop) -> None:
    reached = asyncio.Event()

    def told(progress: Progress) -> None:
        if progress.step >= 10:  # the first checkpoint is written before the tenth step after it begins
            reached.set()

    work = asyncio.create_task(train_expert(make_job(steps=300), parent, shop, told))
    await asyncio.wait_for(reached.wait(), 120)
    work.cancel()
    await asyncio.wait([work])
    (found,) = shop.folder.glob("experts/*.work/checkpoint.safetensors")
    tensors = load_file(found)
    assert {name: each.shape for name, each in tensors.items()} == dict.fromkeys(
        ("weights", "adam_m", "adam_v"), parent.weights.shape
    )
    assert np.abs(tensors["adam_m"]).max() > 0


async def test_another_text_than_the_planned_one_is_refused(make_job: MakeJob, parent: Parent, shop: Shop) -> None:
    with pytest.raises(PierError, match="not the one that was planned"):
        await trained(make_job(domain_hash="0" * 32), parent, shop)


async def test_more_epochs_than_allowed_are_refused(make_job: MakeJob, parent: Parent, shop: Shop) -> None:
    with pytest.raises(PierError, match="epochs; allowed: 4"):
        await trained(make_job(steps=100_000), parent, shop)


PARENT = np.array([1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0]) * math.log(2)


def test_losses_are_bits_per_byte_and_the_gain_is_paired() -> None:
    verdict = judged(PARENT - 0.1 * math.log(2), PARENT)
    assert (verdict.loss, verdict.parent_loss) == pytest.approx((1.9, 2.0))
    assert verdict.standard_error == pytest.approx(0.0, abs=1e-12)  # each row gains as much, however hard it is
    assert verdict.accepted


def test_the_standard_error_is_that_of_a_mean() -> None:
    gains = np.array([0.0, 0.2] * 50) * math.log(2)
    verdict = judged(2.0 - gains, np.full(100, 2.0))
    assert verdict.standard_error == pytest.approx(0.1 / math.sqrt(100), rel=0.1)
    assert verdict.accepted


@pytest.mark.parametrize("losses", [PARENT, PARENT + 0.01, np.where(PARENT > 2, PARENT - 0.9, PARENT + 0.28)])
def test_an_expert_that_is_not_better_by_more_than_chance_is_refused(losses: np.ndarray) -> None:
    assert not judged(losses, PARENT).accepted


def test_a_model_that_ran_away_is_refused_and_its_loss_is_a_number() -> None:
    verdict = judged(np.full(8, np.nan), PARENT)
    assert (verdict.loss, verdict.accepted) == (WORST, False)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20), st.integers(0, 2**31))
def test_nobody_is_better_than_itself(losses: list[float], seed: int) -> None:
    assert not judged(np.array(losses), np.array(losses), seed).accepted


JOB, RUN = accepted_job(0, "lab-0").job, RunConfig()
NOTHING = np.zeros(4, dtype=np.float32)


async def read(_job: Any, _context: int, folder: Path) -> Text:
    return Text(1000, folder / "dev.npy")


async def trained_at_once(_self: Any) -> tuple[ResumeState, Verdict]:
    return ResumeState(100, 100, NOTHING, NOTHING, NOTHING), Verdict(1.0, 2.0, 0.1)


class Export:
    """Writes a model, and takes its time."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, _model: Any, _weights: Any, folder: Path, shard_bytes: int) -> Path:
        folder.mkdir()
        self.begun.set()
        assert self.may_end.wait(30.0)
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder


async def test_a_model_that_is_being_written_is_there_before_anything_else_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = Export()
    for name, played in {"read_text": read, "export": export}.items():
        monkeypatch.setattr(trainer, name, played)
    monkeypatch.setattr(trainer._Training, "run", trained_at_once)
    shop, parent = Shop(RUN, tmp_path), Parent("cd" * 32, RUN.model, NOTHING)
    training = asyncio.create_task(train_expert(JOB, parent, shop, lambda _: None))
    assert await asyncio.to_thread(export.begun.wait, 30.0)
    training.cancel()
    ended, _ = await asyncio.wait([training], timeout=0.05)
    assert not ended
    export.may_end.set()
    await asyncio.wait([training])
    card = await train_expert(JOB, parent, shop, lambda _: None)
    assert shop.place(card.name).exists()
