"""Checkpoints of a plan's experts, over the wire: who gives and gets them, and what the coordinator makes of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from coordinator.cases import ALICE, AUTHORITY, BOB, CONFIG, OWN, PATIENCE, TOKEN, Running, register_request
from coordinator.expert_cases import DONE, accepted_job, accepted_plan, said
from coordinator.experts.test_execution import numbers, ordered, two_sites

from pier_coordinator.runs.sites import LEASE_SECONDS
from pier_coordinator.service import reception
from pier_coordinator.store.sites import Refused
from pier_node.experts.resume import FILE, Kept, ResumeState
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity
from pier_node.outer.layout import Layout
from pier_node.site.coordinator.link import Link, Unreachable
from pier_node.site.coordinator.link import Refused as RefusedThere
from pier_node.wire.files import PIECE
from pier_proto.v1.coordinator_pb2 import CheckpointPart, ExpertCheckpoint, FetchCheckpointRequest

PLAN = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-1"), accepted_job(2, "lab-0", flops=3e9))


def checkpoint(folder: Path, step: int, length: int | None = None) -> bytes:
    """Of an expert of the plan after a step."""
    parameters = Layout.of(PLAN.jobs[0].job.run(CONFIG).model).length if length is None else length
    vectors = [np.full(parameters, step, dtype=np.float32) for _ in range(3)]
    ResumeState(step, step, *vectors).save(folder, "ab" * 16)
    return (folder / FILE).read_bytes()


async def given(link: Link, lease: bytes, raw: bytes, step: int, job: int, plan: str = PLAN.id) -> Kept:
    """A site gives that checkpoint."""
    kept = Kept(job=job, step=step, size=len(raw), digest=hashlib.sha256(raw).hexdigest())

    async def parts() -> AsyncIterator[CheckpointPart]:
        yield CheckpointPart(lease=lease, plan=plan, checkpoint=ExpertCheckpoint(**kept.model_dump()))
        for start in range(0, len(raw), PIECE):
            yield CheckpointPart(piece=raw[start : start + PIECE])

    await link.give_checkpoint(parts(), PATIENCE)
    return kept


async def fetched(link: Link, lease: bytes, job: int) -> tuple[int, bytes]:
    request = FetchCheckpointRequest(lease=lease, plan=PLAN.id, job=job)
    parts = [part async for part in link.fetch_checkpoint(request, PATIENCE)]
    return parts[0].checkpoint.step, b"".join(part.piece for part in parts)


def link_of(run: Running, site: Identity) -> Link:
    return Link(f"127.0.0.1:{run.port}", OWN.node, credentials(site, TOKEN))


async def test_a_lost_site_s_job_goes_on_elsewhere_from_the_checkpoint_that_it_gave(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(PLAN)
        link = link_of(run, ALICE)
        lease = (await link.register(register_request(ALICE), PATIENCE)).lease
        raw = checkpoint(tmp_path, 40)
        kept = await given(link, lease, raw, 40, job=2)
        await run.coordinator.experts.take(ALICE.node, [said(PLAN, ALICE.node, 2, step=50)])
        await link.close()
    async with two_sites(tmp_path) as run:  # the coordinator was killed
        expert_run = run.coordinator.experts
        link = link_of(run, BOB)
        lease = (await link.register(register_request(BOB), PATIENCE)).lease
        run.clock.now += LEASE_SECONDS + 1
        async with run.site(BOB) as bob:
            await bob.beat(BOB, lease)
        await run.coordinator.expire()
        for now in (1000.0, 1060.0):
            await expert_run.look(now)
        assert numbers(run, BOB.node) == [0, 1, 2]
        assert ordered(run, BOB.node).checkpoints == (kept,)
        assert [row["done"] for row in expert_run.told()["experts"]] == [0, 0, 40]
        assert await fetched(link, lease, 2) == (40, raw)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 2, **DONE)])
        with pytest.raises(RefusedThere, match="not trained by this site"):
            await fetched(link, lease, 2)
        await link.close()
        assert not any((tmp_path / "checkpoints").rglob("*.safetensors"))
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "lab-1 trains the expert of formats from its checkpoint at step 40: lab-0 is silent for 60 s" in texts
    assert "lab-1 trains the expert of topics from the start: lab-0 is silent for 60 s" in texts


async def test_a_chain_goes_on_elsewhere_behind_its_experts_that_are_done(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-0", after=0), accepted_job(2, "lab-1"))
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(plan)
        link = link_of(run, ALICE)
        lease = (await link.register(register_request(ALICE), PATIENCE)).lease
        await expert_run.take(ALICE.node, [said(plan, ALICE.node, 0, **DONE)])
        last = await given(link, lease, checkpoint(tmp_path, 100), 100, 0, plan.id)
        kept = await given(link, lease, checkpoint(tmp_path, 30), 30, 1, plan.id)
        await link.close()
    async with two_sites(tmp_path) as run:  # the coordinator was killed
        expert_run = run.coordinator.experts
        await expert_run.take(ALICE.node, [said(plan, ALICE.node, 1, problem="the disk is full")])
        await expert_run.look(1000.0)
        assert numbers(run, BOB.node)[-2:] == [0, 1]
        assert ordered(run, BOB.node).checkpoints == (last, kept)
        await expert_run.take(BOB.node, [said(plan, BOB.node, 0, **DONE)])
        assert len([*(tmp_path / "checkpoints").rglob("*.safetensors")]) == 2
        await expert_run.take(BOB.node, [said(plan, BOB.node, 1, **DONE)])
        assert not any((tmp_path / "checkpoints").rglob("*.safetensors")), "the chain is done"
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "lab-1 trains the expert of topics, network from its checkpoint at step 100" in " ".join(texts)


async def test_a_checkpoint_is_taken_and_given_only_where_its_job_is(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        link = link_of(run, ALICE)
        lease = (await link.register(register_request(ALICE), PATIENCE)).lease
        raw = checkpoint(tmp_path, 40)
        for job, plan, said_so in (
            (1, PLAN.id, "not trained by this site"),
            (9, PLAN.id, "not trained by this site"),
            (0, "ef" * 16, "does not hold any more"),
        ):
            with pytest.raises(RefusedThere, match=said_so):
                await given(link, lease, raw, 40, job, plan)
        with pytest.raises(RefusedThere, match=r"weights is F32 \[7\], not F32"):
            await given(link, lease, checkpoint(tmp_path, 40, length=7), 40, 0)
        with pytest.raises(RefusedThere, match="that expert has 100 steps"):
            await given(link, lease, checkpoint(tmp_path, 101), 101, 0)
        with pytest.raises(Unreachable, match="another start"):
            await given(link, b"x", raw, 40, 0)
        with pytest.raises(RefusedThere, match="no checkpoint of that expert is kept"):
            await fetched(link, lease, 0)
        with pytest.raises(RefusedThere, match="not trained by this site"):
            await fetched(link, lease, 1)
        await given(link, lease, raw, 40, 0)
        await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 0, **DONE)])
        assert not any((tmp_path / "checkpoints").rglob("*.safetensors")), "it is done"
        await link.close()


@pytest.mark.parametrize(
    ("first", "said_so"),
    [
        ([], "does not say which it is"),
        ([CheckpointPart(piece=b"abc")], "does not say which it is"),
        ([CheckpointPart(checkpoint=ExpertCheckpoint(digest="0" * 64))], "CheckpointPart.checkpoint: step"),
        ([CheckpointPart(checkpoint=ExpertCheckpoint(digest="../x"))], "CheckpointPart.checkpoint.digest"),
    ],
)
async def test_what_does_not_say_which_checkpoint_it_is_is_refused(
    tmp_path: Path, first: list[CheckpointPart], said_so: str
) -> None:
    async def parts() -> AsyncIterator[CheckpointPart]:
        for part in first:
            yield part

    async with two_sites(tmp_path) as run:
        link = link_of(run, ALICE)
        with pytest.raises(RefusedThere, match=said_so):
            await link.give_checkpoint(parts(), PATIENCE)
        await link.close()


async def test_nothing_is_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "FIRST", 0.05)

    async def stuck() -> AsyncIterator[CheckpointPart]:
        await asyncio.Event().wait()
        yield CheckpointPart()

    async with two_sites(tmp_path) as run:
        asked = reception.Reception(run.coordinator, credentials(OWN, TOKEN), OWN.node, AUTHORITY)
        with pytest.raises(Refused, match="nothing has come"):
            await asked.give_checkpoint(ALICE.node, stuck())
