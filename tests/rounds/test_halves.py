"""Half of the members and a witness: they go on whatever is wrong with the other half, as with the lowest id they do
without a witness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rounds.cases import CALM, LENGTH, Member, acquainted, add_mean, assemble, outer_state, shared
from simulation.network import Network
from simulation.statements import PlainStatements
from simulation.virtual_time import elsewhere, run

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.outer.mean import Update
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.commitments import Cast, Commitments
from pier_node.rounds.witness import WITNESS_FILE, Witness
from pier_node.wire.carrier import Chunk
from pier_proto.v1.peer_pb2 import Phase, WitnessReply, WitnessRequest

W = "w"
LONG = 1200.0
"""Virtual seconds."""


class Halves:
    """Members at round 0 that can ask a witness, or have none."""

    def __init__(self, names: str, witness: bool, folder: Path, members: str = "", **bound: Commitments) -> None:
        self.network, self.begin, self._file = Network(1, CALM), outer_state(members or names), folder / WITNESS_FILE
        made = {node: Member(self.network, node, self.begin, bound.get(node)) for node in names}
        self.asked: list[str] = []
        if witness:
            first = {"round": 0, "digest": self.begin.digest.hex(), "members": [*self.begin.members], "heir": ""}
            self._file.write_bytes(durable.seal(first))
            for name, member in made.items():
                member.statements.witness, member.tools.ask_witness = W, self._asking(name)
        self.members = assemble(self.network, names, self.begin, **made)

    def _asking(self, name: str) -> Callable[[WitnessRequest], Any]:
        async def ask(request: WitnessRequest) -> WitnessReply:
            self.asked.append(name)
            with elsewhere():
                return Witness(self._file, W, PlainStatements(W, W)).answer(name, request, founder="")

        return ask

    async def commits(self, name: str, within: float = LONG) -> bool:
        """Whether a member that contributes to round 1 commits it."""
        task = self.members[name].contribute(1.0)
        await asyncio.wait([task], timeout=within)
        return task.done() and task.exception() is None


both = pytest.mark.parametrize("witness", [False, True], ids=["lowest id", "witness"])


@both
def test_one_that_trains_for_ever_is_left_behind(witness: bool, tmp_path: Path) -> None:
    async def main() -> bool:
        halves = Halves("ab", witness, tmp_path)
        await acquainted(halves.members)
        halves.members["b"].phase = Phase.PHASE_TRAINING
        return await halves.commits("a")

    assert run(main())


@both
def test_of_two_with_different_bits_one_goes_on(witness: bool, tmp_path: Path) -> None:
    def deviating(state: OuterState, mean: Any, tokens: Any) -> OuterState:
        found = add_mean(state, mean, tokens)
        tensors = {ANCHOR: shared(found.anchor + np.float32(0.25)), MOMENTUM: found.tensors[MOMENTUM]}
        return OuterState(found.round, found.members, tensors, dict(found.ledger))

    async def main() -> bool:
        halves = Halves("ab", witness, tmp_path)
        await acquainted(halves.members)
        one, two = halves.members.values()
        update = Update(np.full(LENGTH, 1.0, np.float32), 1)
        tasks = [one.contribute(1.0), two.play(two.rounds.commit(update, deviating))]
        await asyncio.wait(tasks, timeout=LONG, return_when=asyncio.FIRST_COMPLETED)
        return any(task.done() for task in tasks)

    assert run(main())


@both
def test_of_two_between_which_only_short_messages_pass_one_goes_on(witness: bool, tmp_path: Path) -> None:
    async def lost(_sender: str, _chunks: AsyncIterator[Chunk]) -> None:
        await asyncio.Event().wait()

    async def main() -> bool:
        halves = Halves("ab", witness, tmp_path)
        await acquainted(halves.members)
        for member in halves.members.values():
            member.carrier.serve_push(lost)
        tasks = [member.contribute(1.0) for member in halves.members.values()]
        await asyncio.wait(tasks, timeout=LONG, return_when=asyncio.FIRST_COMPLETED)
        return any(task.done() for task in tasks)

    assert run(main())


@both
def test_one_whose_disk_lost_its_state_is_left_behind(witness: bool, tmp_path: Path) -> None:
    async def main() -> bool:
        halves = Halves("ab", witness, tmp_path, b=Commitments.fresh(1, "b"))
        await acquainted(halves.members)
        halves.members["b"].contribute(1.0)
        return await halves.commits("a")

    assert run(main())


@both
def test_a_member_that_gave_its_vote_away_and_is_back_does_not_count(witness: bool, tmp_path: Path) -> None:
    """d gave its vote to c, and is back; then c dies."""

    async def main() -> bool:
        halves = Halves("abcd", witness, tmp_path)
        await acquainted(halves.members)
        c, d = halves.members["c"], halves.members["d"]
        await c.rounds.take_votes(0, await d.rounds.give_votes("c"), d.rounds.handovers())
        halves.network.crash("c")
        return all(await asyncio.gather(*map(halves.commits, "abd")))

    assert run(main())


@both
def test_a_newcomer_that_has_the_vote_of_one_of_two_goes_on(witness: bool, tmp_path: Path) -> None:
    async def main() -> bool:
        halves = Halves("abc", witness, tmp_path, members="ab")
        await acquainted(halves.members)
        a, c = halves.members["a"], halves.members["c"]
        await c.rounds.take_votes(0, await a.rounds.give_votes("c"), a.rounds.handovers())
        halves.network.crash("a")
        halves.network.crash("b")
        return await halves.commits("c")

    assert run(main())


def test_who_could_not_go_on_with_the_vote_does_not_take_it(tmp_path: Path) -> None:
    """a and b have voted; b was restarted and lost the result. Cut off from a, it cannot decide, and then it dies."""

    async def main() -> tuple[list[str], bool]:
        result = add_mean(outer_state("ab"), shared([1.0] * LENGTH), {"a": 1, "b": 1})
        with elsewhere():
            _ = result.digest, result.norm
        cast = Cast((1, "a"), (1, "a"), result.digest, ("a", "b"))
        bound = {node: Commitments(0, frozenset(node), (1, "a"), cast) for node in "ab"}
        halves = Halves("ab", True, tmp_path, "", **bound)
        halves.members["a"].rounds.promises.shadow = result
        halves.network.partition({"a"}, {"b"})
        assert not await halves.commits("b", within=60.0)
        asked = [*halves.asked]
        halves.network.crash("b")
        return asked, await halves.commits("a")

    assert run(main()) == ([], True)


def test_a_site_that_cannot_write_the_vote_down_says_so_and_tries_again(tmp_path: Path) -> None:
    async def main() -> tuple[str, bool]:
        halves = Halves("ab", True, tmp_path)
        b = halves.members["b"]
        keep = b.journal.keep

        def full(commitments: Commitments) -> None:
            if W in commitments.votes:
                raise PierError("no space left", "Free some.")
            keep(commitments)

        b.journal.keep = full  # type: ignore[method-assign]
        halves.network.crash("a")
        assert not await halves.commits("b", within=60.0)
        said, b.journal.keep = b.rounds.leader.witness_says, keep  # type: ignore[method-assign]
        await asyncio.sleep(60.0)
        return said, b.rounds.state.round == 1

    said, done = run(main())
    assert "no space left" in said
    assert done
