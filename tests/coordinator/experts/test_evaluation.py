"""Scoring by order of the coordinator: from the operator's wish over the wire to sheets in its folder."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from coordinator.cases import ALICE, BOB, OWN, TOKEN, Running, register_request, running
from coordinator.expert_cases import DONE, accepted_job, accepted_plan, said, sheet
from coordinator.experts.test_run import ordered, two_sites

from pier_coordinator.experts.checkpoints import PIECE
from pier_coordinator.runs.registry import LEASE_SECONDS
from pier_coordinator.service import reception
from pier_coordinator.store.refusals import Refused
from pier_node.experts.config import DomainSection
from pier_node.experts.sheet import ScoredDomain, Sheet, load_sheet
from pier_node.identity.certificates import credentials
from pier_node.site.coordinator.link import Link, Unreachable
from pier_node.site.coordinator.link import Refused as RefusedThere
from pier_proto.v1.coordinator_pb2 import DeliverRequest, ScoreSheet

PLAN = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-1"))
NUMBERS = ScoredDomain(section=DomainSection(name="numbers"))
ONE, OTHER = "ab" * 16, "ef" * 16
ANSWER = 10.0


def link_to(run: Running) -> Link:
    return Link(f"127.0.0.1:{run.port}", OWN.node, credentials(ALICE, TOKEN))


def delivery(lease: bytes, scoring: str, content: bytes, **changed: Any) -> list[DeliverRequest]:
    parts = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    told = {"lease": lease, "sheet": ScoreSheet(scoring=scoring, expert=ONE), "size": len(content)}
    first = DeliverRequest(**{**told, "digest": hashlib.sha256(content).digest(), "piece": parts[0], **changed})
    return [first, *(DeliverRequest(piece=part) for part in parts[1:])]


async def stream(pieces: Sequence[DeliverRequest]) -> AsyncIterator[DeliverRequest]:
    for piece in pieces:
        yield piece


async def evaluating(run: Running, folder: Path) -> str:
    """Alice is done, bob is not; the id."""
    expert_run = run.coordinator.experts
    await expert_run.accept(PLAN)
    await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 0, **DONE)])
    await expert_run.evaluate([NUMBERS], 0, 60.0, folder)
    return str(expert_run.scoring_told()["id"])


async def test_a_site_is_asked_for_what_it_has_and_another_when_it_is_done(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        id = await evaluating(run, tmp_path / "scores")
        asked = ordered(run, ALICE.node).scoring
        assert asked is not None
        assert (asked.id, asked.experts) == (id, (ONE,))
        assert [(each.section.name, each.digest) for each in asked.domains] == [
            ("topics", "0" * 32),
            ("network", "0" * 32),
            ("numbers", ""),
        ]
        assert ordered(run, BOB.node).scoring is None
        await run.coordinator.experts.take(BOB.node, [said(PLAN, BOB.node, 1, **{**DONE, "name": OTHER})])
        found = ordered(run, BOB.node)
        assert found.complete
        assert found.scoring is not None
        assert found.scoring.experts == (OTHER,)


async def test_sheets_come_over_the_wire_and_the_sites_may_go(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        id = await evaluating(run, tmp_path / "scores")
        expert_run = run.coordinator.experts
        link = link_to(run)
        lease = (await link.register(register_request(ALICE), ANSWER)).lease
        for domain in ("topics", "network", "numbers"):
            for split in ("prior", "test"):
                large = sheet("topics", domain, split, rows=6000)
                await link.deliver(stream(delivery(lease, id, large.packed())), ANSWER)
        await link.close()
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, **{**DONE, "name": OTHER})])
        await expert_run.delivered(BOB.node, ScoreSheet(scoring=id, expert=OTHER, problem="torn"), b"")
        told = expert_run.scoring_told()
        assert told["finished"]
        assert [(row["domain"], row["sheets"], row["problem"]) for row in told["experts"]] == [
            ("topics", 6, ""),
            ("network", 0, "torn"),
        ]
        found: list[Sheet] = [load_sheet(path) for path in (tmp_path / "scores" / id).iterdir()]
        assert {each.log_probs.shape for each in found} == {(6000, 8)}
        for node in (ALICE.node, BOB.node):
            assert ordered(run, node).scoring is None
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "the experts are scored; missing: network" in texts


@pytest.mark.parametrize(
    ("changed", "said_so"),
    [
        ({"digest": bytes(32)}, "digest is not that of"),
        ({"size": 10}, "more than the 10 bytes"),
        ({"size": 7 << 20}, "digest is not that of"),
        ({"sheet": None}, "does not say what it is"),
        ({"sheet": ScoreSheet(scoring="00" * 16, expert=ONE)}, "no such evaluation"),
        ({"sheet": ScoreSheet(scoring="00" * 16, expert="../x")}, "DeliverRequest.sheet.expert"),
        ({"size": 9 << 20}, "DeliverRequest.size"),
    ],
)
async def test_a_delivery_that_is_not_as_it_says_is_refused(
    tmp_path: Path, changed: dict[str, Any], said_so: str
) -> None:
    async with two_sites(tmp_path) as run:
        id = await evaluating(run, tmp_path / "scores")
        link = link_to(run)
        lease = (await link.register(register_request(ALICE), ANSWER)).lease
        with pytest.raises(RefusedThere, match=said_so):
            await link.deliver(stream(delivery(lease, id, sheet("topics", "topics").packed(), **changed)), ANSWER)
        with pytest.raises(Unreachable, match="another start"):
            await link.deliver(stream(delivery(b"x", id, sheet("topics", "topics").packed())), ANSWER)
        await link.close()
    assert not any((tmp_path / "scores").rglob("*.safetensors"))


async def test_a_delivery_does_not_take_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "DELIVERY", 0.05)
    async with two_sites(tmp_path) as run:
        id = await evaluating(run, tmp_path / "scores")
        link = link_to(run)
        lease = (await link.register(register_request(ALICE), ANSWER)).lease

        async def stuck() -> AsyncIterator[DeliverRequest]:
            yield delivery(lease, id, sheet("topics", "topics").packed(), size=7 << 20)[0]
            await asyncio.Event().wait()

        with pytest.raises(RefusedThere, match="longer than"):
            await link.deliver(stuck(), ANSWER)
        await link.close()


async def test_a_site_that_does_not_come_back_is_given_up(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await evaluating(run, tmp_path / "scores")
        expert_run = run.coordinator.experts
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, **{**DONE, "name": OTHER})])
        run.clock.now += LEASE_SECONDS + 1
        await run.coordinator.expire()
        await expert_run.look(0.0)
        assert not expert_run.scoring_told()["finished"]
        run.clock.now += 60.0
        await expert_run.look(0.0)
        told = expert_run.scoring_told()
        assert told["finished"]
        assert [row["problem"] for row in told["experts"]] == [
            "lab-0: is not there for 60 s",
            "lab-1: is not there for 60 s",
        ]


async def test_without_a_plan_nothing_is_evaluated(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        with pytest.raises(Refused, match="no plan of experts was accepted"):
            await run.coordinator.experts.evaluate([], 0, 60.0, tmp_path)
        assert run.coordinator.experts.scoring_told() == {}
