"""Scoring of an ensemble: what sites are asked, what they deliver, over the wire and as the coordinator keeps it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator.cases import ALICE, BOB, OWN, TOKEN, Running, register_request, running
from coordinator.expert_cases import DONE, WEIGHTS, accepted_job, accepted_plan, said, sheet
from coordinator.experts.test_execution import ordered, two_sites

from pier_coordinator.experts.scoring import ScoredExpert, Scoring, scoring_id
from pier_coordinator.runs.sites import LEASE_SECONDS
from pier_coordinator.service import reception
from pier_coordinator.store.sites import Refused
from pier_node.experts.config import DomainSection
from pier_node.experts.sheet import ScoredDomain, Sheet, load_sheet
from pier_node.identity.certificates import credentials
from pier_node.site.coordinator.link import Link, Unreachable
from pier_node.site.coordinator.link import Refused as RefusedThere
from pier_node.wire.files import PIECE
from pier_proto.v1.coordinator_pb2 import DeliverRequest, ScoreSheet

ID, A, B = "ab" * 16, "alice", "bob"
ONE, OTHER = "01" * 16, "02" * 16
DOMAINS = [ScoredDomain(section=DomainSection(name=name)) for name in ("topics", "network")]


def scoring(folder: Path, rows: int = 0) -> Scoring:
    """Alice has the expert of topics, bob trains that of network."""
    made = Scoring(ID, [ScoredExpert("topics", ""), ScoredExpert("network", "")], DOMAINS, rows, 60.0, folder)
    made.done("topics", A, ONE, WEIGHTS, 0.0)
    made.done("network", B, "", "", 0.0)
    made.begin(0.0)
    return made


def give(to: Scoring, node: str, name: str, expert: str, **more: Any) -> None:
    for domain in ("topics", "network"):
        for split in ("prior", "test"):
            to.take(node, name, sheet(expert, domain, split, **more).packed(), 1.0)


def test_a_site_is_asked_for_what_is_done_there(tmp_path: Path) -> None:
    made = scoring(tmp_path, rows=20)
    order = made.order(A)
    assert order is not None
    assert (order.id, order.experts, order.rows) == (ID, (ONE,), 20)
    assert [each.section.name for each in order.domains] == ["topics", "network"]
    assert made.order(B) is None
    made.done("network", B, OTHER, "", 0.0)
    assert made.order(B) is not None


def test_it_is_finished_when_all_sheets_are_there(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    give(made, A, ONE, "topics")
    assert not made.finished
    assert made.order(A) is None, "it has scored"
    made.done("network", B, OTHER, "", 0.0)
    give(made, B, OTHER, "network", weights="ef" * 32)
    assert made.finished
    assert len([load_sheet(path) for path in tmp_path.iterdir()]) == 8
    told = made.told(lambda _: True, str.upper)
    assert told["experts"][1] == {
        "domain": "network",
        "site": "BOB",
        "there": True,
        "trained": True,
        "sheets": 4,
        "of": 4,
        "problem": "",
    }


@pytest.mark.parametrize(
    ("node", "name", "content", "said"),
    [
        (B, ONE, sheet("topics", "topics"), "was not asked to score that expert"),
        (A, OTHER, sheet("topics", "topics"), "was not asked to score that expert"),
        (A, ONE, sheet("network", "topics"), "a sheet of network on the test split of topics was not asked for"),
        (A, ONE, sheet("topics", "numbers"), "was not asked for"),
        (A, ONE, sheet("topics", "topics", "dev"), "dev split of topics was not asked for"),
        (A, ONE, sheet("topics", "topics", weights="00" * 32), "of other weights"),
        (A, ONE, sheet("topics", "topics", rows=9), "9 rows: 5 were asked for"),
        (A, ONE, b"\x80\x04pickle", "not a score sheet"),
    ],
)
def test_what_was_not_asked_for_or_is_not_what_it_says_is_refused(
    tmp_path: Path, node: str, name: str, content: Any, said: str
) -> None:
    made = scoring(tmp_path, rows=5)
    with pytest.raises(Refused, match=said):
        made.take(node, name, content if isinstance(content, bytes) else content.packed(), 1.0)
    assert not list(tmp_path.iterdir())


def test_a_sheet_that_comes_again_is_taken_as_it_is(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    for _ in range(2):  # the answer to the first one got lost
        made.take(A, ONE, sheet("topics", "topics").packed(), 1.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_no_probability_is_refused(tmp_path: Path) -> None:
    bad = sheet("topics", "topics")
    bad.log_probs[1, 1] = np.nan
    with pytest.raises(Refused, match="above 0 or no number"):
        scoring(tmp_path).take(A, ONE, bad.packed(), 1.0)


def test_a_second_evaluation_takes_what_the_first_has_left(tmp_path: Path) -> None:
    give(scoring(tmp_path), A, ONE, "topics")
    (tmp_path / "broken.scores.safetensors").write_bytes(b"torn")
    again = scoring(tmp_path)
    assert again.order(A) is None
    assert [row["sheets"] for row in again.told(lambda _: True, str)["experts"]] == [4, 0]
    other = Scoring(ID, [ScoredExpert("topics", A, ONE, "77" * 32)], DOMAINS, 0, 60.0, tmp_path)
    other.begin(0.0)
    assert other.order(A) is not None, "those sheets are of other weights"


def test_an_expert_of_which_nothing_comes_is_given_up_one_in_training_is_not(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    assert not made.look(59.0, lambda _: True, str)
    made.take(A, ONE, sheet("topics", "topics").packed(), 50.0)
    assert not made.look(109.0, lambda _: True, str)
    assert made.look(110.0, lambda node: node == B, str)
    assert [expert.problem for expert in made.experts] == ["alice: is not there for 60 s", ""]
    assert not made.finished, "bob trains"
    made.look(170.0, lambda _: False, str)
    assert made.experts[1].problem == "bob: is not there for 60 s", "nor trains a site that is lost"
    assert made.finished
    assert made.order(A) is None


def test_what_a_site_has_that_was_put_out_is_not_waited_for(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    assert made.look(1.0, lambda _: True, str, [A])
    assert made.experts[0].problem == "alice is not of the run any more"


def test_what_no_site_can_train_is_not_waited_for(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    made.done("network", "", "", "", 0.0)
    assert made.look(1.0, lambda _: True, str)
    assert made.experts[1].problem == "no site can train it"


def test_a_domain_that_a_site_has_no_text_of_is_left_out_and_an_expert_it_cannot_read_is_missing(
    tmp_path: Path,
) -> None:
    made = scoring(tmp_path)
    made.cannot(A, ONE, "network", "no such file", 1.0)
    assert made.left_out == {"network": "the expert of topics is not scored on it: no such file"}
    assert made.experts[0].wanted == {("topics", "prior"), ("topics", "test")}
    made.cannot(A, ONE, "", "not its weights", 1.0)
    assert made.experts[0].problem == "not its weights"
    with pytest.raises(Refused):
        made.cannot(B, ONE, "", "nor this", 1.0)


def test_what_a_site_cannot_score_is_a_domain_that_it_was_asked_for(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    with pytest.raises(Refused, match="was not asked to score an expert on tools"):
        made.cannot(A, ONE, "tools", "no such file", 1.0)
    assert made.left_out == {}


def test_the_same_question_has_the_same_name() -> None:
    assert scoring_id("plan", 1.0, ["a"], 0) == scoring_id("plan", 1.0, ["a"], 0)
    assert scoring_id("plan", 1.0, ["a"], 0) != scoring_id("plan", 1.0, ["a"], 5)


PLAN = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-1"))
NUMBERS = ScoredDomain(section=DomainSection(name="numbers"))
FIRST, SECOND = "ab" * 16, "ef" * 16
ANSWER = 10.0


def link_to(run: Running) -> Link:
    return Link(f"127.0.0.1:{run.port}", OWN.node, credentials(ALICE, TOKEN))


def delivery(lease: bytes, scoring: str, content: bytes, **changed: Any) -> list[DeliverRequest]:
    parts = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    told = {"lease": lease, "sheet": ScoreSheet(scoring=scoring, expert=FIRST), "size": len(content)}
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
    await expert_run.current().evaluate([NUMBERS], 0, 60.0, folder)
    return str(expert_run.scoring_told()["id"])


async def test_a_site_is_asked_for_what_it_has_and_another_when_it_is_done(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        id = await evaluating(run, tmp_path / "scores")
        asked = ordered(run, ALICE.node).scoring
        assert asked is not None
        assert (asked.id, asked.experts) == (id, (FIRST,))
        assert [(each.section.name, each.digest) for each in asked.domains] == [
            ("topics", "0" * 32),
            ("network", "0" * 32),
            ("numbers", ""),
        ]
        assert ordered(run, BOB.node).scoring is None
        await run.coordinator.experts.take(BOB.node, [said(PLAN, BOB.node, 1, **{**DONE, "name": SECOND})])
        found = ordered(run, BOB.node)
        assert found.complete
        assert found.scoring is not None
        assert found.scoring.experts == (SECOND,)


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
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, **{**DONE, "name": SECOND})])
        await expert_run.current().delivered(BOB.node, ScoreSheet(scoring=id, expert=SECOND, problem="torn"), b"")
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
        ({"digest": bytes(32)}, "hash is not that of"),
        ({"size": 10}, "more than the 10 bytes"),
        ({"size": 7 << 20}, "hash is not that of"),
        ({"sheet": None}, "does not say what it is"),
        ({"sheet": ScoreSheet(scoring="00" * 16, expert=FIRST)}, "no such evaluation"),
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
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, **{**DONE, "name": SECOND})])
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
            await run.coordinator.experts.current().evaluate([], 0, 60.0, tmp_path)
        assert run.coordinator.experts.scoring_told() == {}
