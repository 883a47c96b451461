"""The coordinator as the witness: what it notes of its votes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from coordinator.cases import ALICE, Running, running
from rounds.cases import outer_state
from simulation.statements import PlainStatements

from pier_coordinator.store import sites as stored
from pier_coordinator.store.facts import Fact
from pier_node.rounds.proofs import alone
from pier_node.rounds.witness import WITNESS_FILE, Witness
from pier_proto.v1.peer_pb2 import WitnessRequest

FIRST = outer_state([ALICE.node])
REQUEST = WitnessRequest(base=FIRST.digest, proof=[alone(FIRST, b"", PlainStatements(ALICE.node))])


async def with_witness(run: Running, folder: Path) -> None:
    await run.let_in(ALICE)
    await run.coordinator.store.do(stored.put_meta, stored.FOUNDER, ALICE.node)
    run.coordinator.witness = Witness(folder / WITNESS_FILE, "w", PlainStatements("w", "w"))


async def test_a_vote_that_is_asked_for_again_is_one_event(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await with_witness(run, tmp_path)
        for _ in range(5):
            assert (await run.coordinator.vote(ALICE.node, REQUEST)).HasField("handover")
        texts = [it.body["text"] for it in run.coordinator.store.facts() if "its vote" in it.body.get("text", "")]
        assert len(texts) == 1
        assert run.coordinator.store.meta(stored.WITNESS)


async def test_a_vote_is_given_although_it_cannot_be_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(facts: list[Fact]) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with running(tmp_path) as run:
        await with_witness(run, tmp_path)
        monkeypatch.setattr(run.coordinator.store, "add_facts", full)
        assert (await run.coordinator.vote(ALICE.node, REQUEST)).HasField("handover")


async def test_before_the_run_has_a_founder_nobody_gets_a_vote(tmp_path: Path) -> None:
    """Who asks too early must not make the witness remember that nobody founded the run."""
    async with running(tmp_path) as run:
        run.coordinator.witness = Witness(tmp_path / WITNESS_FILE, "w", PlainStatements("w", "w"))
        with pytest.raises(stored.Refused, match="no founder yet"):
            await run.coordinator.vote(ALICE.node, REQUEST)
        assert not (tmp_path / WITNESS_FILE).exists()


async def test_a_run_without_a_witness_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        with pytest.raises(stored.Refused, match="this run has no witness"):
            await run.coordinator.vote(ALICE.node, REQUEST)
