from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import numpy as np
import pytest
from rounds.cases import CALM, LENGTH, Member, Puppet, add_mean, outer_state
from rounds.parts import BALLOT, Part, adopting, fresh, scene, signed, stop_at, vote
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.base.faults import Faults
from pier_node.base.shared import SharedVector
from pier_node.outer.mean import Update
from pier_node.outer.state import MOMENTUM, OuterState
from pier_node.rounds.attempt import TELLS, Attempt, check_finite
from pier_node.rounds.commitments import Cast
from pier_node.rounds.proofs import Trusted, follow
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.wire.bounds import FIELDS
from pier_node.wire.carrier import VOTE, Chunk, PeerLost, PeerRefused
from pier_proto.v1.peer_pb2 import AbortNotice, Ack, Ready, Signed, Value, Vote


def announced(member: Member) -> Ready:
    return Ready(node=member.node, round=1, base=member.rounds.base, votes=[member.node])


async def decided(attempt: Attempt, update: Update) -> OuterState:
    state, _ = await attempt.run(update, add_mean)
    return state


def test_all_decide_the_same() -> None:
    async def play(members: dict[str, Member]) -> None:
        parts = [Part(member, fresh(*"abc")) for member in members.values()]
        decided = [await part.task for part in parts]
        assert {state.digest for state in decided} == {decided[0].digest}
        assert decided[0].anchor.tolist() == [1.0] * LENGTH
        assert decided[0].ledger == {"a": 1, "b": 1, "c": 1}
        for part in parts:
            expected = Value(origin=BALLOT, digest=decided[0].digest, members=["a", "b", "c"])
            assert part.member.journal.votes == [Cast.of(BALLOT, expected)]
            assert part.member.rounds.state.round == 0, "an attempt changes nothing by itself"

    scene(play)


def test_the_vote_is_on_the_disk_before_anybody_hears_of_it() -> None:
    async def play(members: dict[str, Member]) -> None:
        for member in members.values():
            ask = member.carrier.call

            async def tell(
                peer: str, method: Any, request: Any, timeout: float, member: Member = member, ask: Any = ask
            ) -> Any:
                if method is VOTE:
                    member.diary.append(f"told {peer}")
                return await ask(peer, method, request, timeout)

            member.carrier.call = tell  # type: ignore[method-assign]
        parts = [Part(member, fresh(*"abc")) for member in members.values()]
        await asyncio.gather(*(part.task for part in parts))
        assert members["a"].diary == ["recorded", "told b", "told c"]

    scene(play)


@pytest.mark.parametrize(("phase", "recorded", "heard"), [("staged", 0, 0), ("journaled", 1, 0), ("voting", 1, 1)])
def test_who_stops_has_told_no_more_than_it_has_written_down(phase: str, recorded: int, heard: int) -> None:
    async def play(members: dict[str, Member]) -> None:
        parts = {node: Part(member, fresh(*"abc")) for node, member in members.items()}
        await asyncio.sleep(20)
        assert len(members["c"].journal.votes) == recorded
        told = ["c" in members[node].tools.votes.of(BALLOT) for node in "ab"]
        assert told == [heard == 1, False], "the first vote goes out alone, so that a test can stop after it"
        members["c"].carrier.network.crash("c")
        suspicion = await parts["b"].suspicion()
        assert (suspicion.node, suspicion.reason) == ("c", "lost before it voted")
        assert members["b"].rounds.promises.now.vote, "b stays bound by its vote"

    scene(play, c=stop_at(phase))


def test_a_member_that_is_cut_off_before_it_votes_does_not_hold_up_who_tells_it_first() -> None:
    async def play(members: dict[str, Member]) -> None:
        parts = {node: Part(member, fresh(*"abc")) for node, member in members.items()}
        await asyncio.sleep(2)
        members["b"].carrier.network.partition({"a"}, {"b", "c"})
        began = asyncio.get_running_loop().time()
        suspicion = await parts["b"].suspicion()
        assert (suspicion.node, suspicion.reason) == ("a", "lost before it voted")
        assert asyncio.get_running_loop().time() - began < 15

    async def late(_round: int, phase: str) -> None:
        await asyncio.sleep(3.0 if phase == "staged" else 0.0)

    scene(play, a=stop_at("staged"), b=Faults(late), c=Faults(late))


def test_a_member_that_acknowledges_no_vote_holds_up_nobody() -> None:
    async def play(members: dict[str, Member]) -> None:
        take, began = members["a"].rounds._take_vote, asyncio.get_running_loop().time()

        async def take_and_say_nothing(sender: str, vote: Signed) -> Ack:
            await take(sender, vote)
            return await asyncio.Event().wait() and Ack()

        members["a"].carrier.serve(VOTE, take_and_say_nothing)
        parts = [Part(members[node], fresh(*"abc")) for node in "abc"]
        await asyncio.gather(*(part.task for part in parts))
        assert asyncio.get_running_loop().time() - began < 4

    scene(play)


def end_streams_to_c(member: Member, end: Callable[[], Coroutine[Any, Any, Any]]) -> list[str]:
    """Let a member's streams to c end only with this; returns whom streams go to, as long as they are under way."""
    push, under_way = member.carrier.push, list[str]()

    async def slower(peer: str, chunks: AsyncIterator[Chunk]) -> None:
        under_way.append(peer)
        try:
            await push(peer, chunks)
            await (end() if peer == "c" else asyncio.sleep(0))
        finally:
            under_way.remove(peer)

    member.carrier.push = slower  # type: ignore[method-assign]
    return under_way


def test_who_votes_has_acknowledged_all_that_was_sent_to_it() -> None:
    async def play(members: dict[str, Member]) -> None:
        under_way, began = end_streams_to_c(members["b"], asyncio.Event().wait), asyncio.get_running_loop().time()
        parts = [Part(members[node], fresh(*"abc")) for node in "abc"]
        await asyncio.gather(*(part.task for part in parts))
        assert asyncio.get_running_loop().time() - began < 4
        assert not under_way, "nothing is left behind"

    scene(play)


@pytest.mark.parametrize(
    ("problem", "suspect"), [(PeerLost("c", "it was cut off"), "c"), (PeerRefused("c", "it was cut off"), NOBODY)]
)
def test_a_stream_that_fails_while_votes_are_missing_ends_the_attempt(problem: PeerLost, suspect: str) -> None:
    async def fail() -> None:
        await asyncio.sleep(3)
        raise problem

    async def play(members: dict[str, Member]) -> None:
        under_way, began = end_streams_to_c(members["b"], fail), asyncio.get_running_loop().time()
        parts = {node: Part(members[node], fresh(*"abc")) for node in "abc"}
        suspicion = await parts["b"].suspicion()
        assert suspicion.node == suspect
        assert "it was cut off" in suspicion.reason
        assert asyncio.get_running_loop().time() - began < 4
        assert members["b"].journal.votes, "it had voted"
        assert not under_way

    scene(play, c=stop_at("staged"))


def test_a_member_that_was_started_again_is_not_waited_for() -> None:
    async def play(members: dict[str, Member]) -> None:
        parts = {node: Part(member, fresh(*"abc")) for node, member in members.items()}
        await asyncio.sleep(5)
        contact = members["b"].roster.contacts["c"]
        contact.started_at = asyncio.get_running_loop().time()
        suspicion = await parts["b"].suspicion()
        assert (suspicion.node, suspicion.reason) == ("c", "lost before it voted")
        assert asyncio.get_running_loop().time() - contact.started_at < 5

    scene(play, c=stop_at("journaled"))


def test_a_member_that_does_not_vote_is_named_after_the_deadline() -> None:
    async def play(members: dict[str, Member]) -> None:
        parts = {node: Part(member, fresh(*"abc")) for node, member in members.items()}
        suspicion = await parts["a"].suspicion()
        assert (suspicion.node, suspicion.reason) == ("c", "did not vote for 30 s")

    scene(play, c=stop_at("journaled"))


def test_other_bits_decide_nothing() -> None:
    async def play(members: dict[str, Member]) -> None:
        parts = {node: Part(members[node], fresh(*"abc")) for node in "ab"}
        update = Update(np.full(LENGTH, 2, np.float32), 1)
        promises = members["c"].rounds.promises
        await promises.promise(BALLOT, "c")
        other = outer_state("abc", anchor=[1e-3] * LENGTH)
        odd = Attempt(members["c"].tools, other, promises, fresh(*"abc"), announced(members["c"]))
        members["c"].rounds._attempt = odd
        task = members["c"].play(decided(odd, update))
        suspicion = await parts["a"].suspicion()
        assert (suspicion.node, suspicion.reason) == ("c", "voted for a different result than ours")
        with pytest.raises(Suspicion):
            await task

    scene(play)


def test_the_memory_of_what_is_staged_is_given_to_no_other_attempt() -> None:
    async def play(members: dict[str, Member]) -> None:
        staged: list[SharedVector] = []

        def keep(state: OuterState, mean: SharedVector, tokens: Mapping[str, int]) -> OuterState:
            staged.append(mean)
            return add_mean(state, mean, tokens)

        rounds, tools = members["a"].rounds, members["a"].tools
        await rounds.promises.promise(BALLOT, "a")
        waiting = tools.room(LENGTH)
        await Attempt(tools, rounds.state, rounds.promises, fresh("a"), announced(members["a"])).run(
            Update(np.ones(LENGTH, np.float32), 1), keep
        )
        assert staged == [waiting]
        assert tools.room(LENGTH) is not waiting

    scene(play, "a")


def test_a_result_that_is_not_finite_is_not_voted_for() -> None:
    async def play(members: dict[str, Member]) -> None:
        def explode(state: OuterState, mean: Any, tokens: Any) -> OuterState:
            mean.array[:] = np.inf
            return add_mean(state, mean, tokens)

        rounds = members["a"].rounds
        part = Attempt(members["a"].tools, rounds.state, rounds.promises, fresh("a"), announced(members["a"]))
        with pytest.raises(Suspicion, match="not finite"):
            await part.run(Update(np.ones(LENGTH, np.float32), 1), explode)
        assert not members["a"].diary

    scene(play, "a")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_check_finite(bad: float) -> None:
    async def main() -> None:
        await check_finite(outer_state("a"))
        with pytest.raises(Suspicion) as caught:
            await check_finite(outer_state("a", anchor=[1.0, bad]))
        assert caught.value.node == NOBODY

    run(main())


# --- finishing somebody's result ----------------------------------------------------------------


def test_a_result_is_adopted_from_its_holder() -> None:
    async def play(members: dict[str, Member]) -> None:
        result = outer_state("ab", round=1, anchor=[5.0] * LENGTH)
        members["c"].held["b"] = result
        proposal = adopting(result, "abd", "b", "b", "c")
        parts = {node: Part(members[node], proposal, result if node == "b" else None) for node in "bc"}
        assert [(await part.task).digest for part in parts.values()] == [result.digest] * 2
        assert parts["b"].attempt.reduction
        assert parts["b"].attempt.reduction.meter.rate() == 0, "nothing is exchanged"
        vote = members["c"].journal.votes[0]
        assert (vote.origin, vote.members) == ((1, "a"), ("a", "b", "c", "d")), "all that may have committed it"

    scene(play)


def test_nobody_votes_for_a_result_before_all_take_part() -> None:
    """Or a later attempt would take the votes of one that never came about for the newest."""

    async def play(members: dict[str, Member]) -> None:
        result = outer_state("ab", round=1)
        part = Part(members["b"], adopting(result, "ab", "b", "b", "c"), result)
        await asyncio.sleep(25)
        assert not members["b"].diary
        vote = part.member.rounds.promises.now.vote
        assert vote
        assert vote.ballot == (1, "a"), "the earlier one"
        assert (await part.suspicion()).reason

    scene(play)


def test_a_holder_that_cannot_hand_it_over_is_suspected() -> None:
    async def play(members: dict[str, Member]) -> None:
        result = outer_state("ab", round=1)
        proposal = adopting(result, "ab", "b", "b", "c")
        Part(members["b"], proposal, result)
        suspicion = await Part(members["c"], proposal).suspicion()
        assert (suspicion.node, suspicion.reason) == ("b", "could not hand over its result: has nothing")

    scene(play)


def test_a_result_that_is_not_finite_is_not_taken_over() -> None:
    async def play(members: dict[str, Member]) -> None:
        result = outer_state("ab", round=1)
        result.tensors[MOMENTUM].array[0] = np.nan
        members["c"].held["b"] = result
        proposal = adopting(result, "ab", "b", "b", "c")
        Part(members["b"], proposal, result)
        suspicion = await Part(members["c"], proposal).suspicion()
        assert suspicion.node == "b"
        assert "a step of nan" in suspicion.reason
        assert not members["c"].journal.votes

    scene(play)


# --- giving up ------------------------------------------------------------------------------


def test_an_abort_ends_the_attempt_and_is_held_against_nobody() -> None:
    async def play(members: dict[str, Member]) -> None:
        part = Part(members["a"], fresh(*"abc"))
        await asyncio.sleep(1)
        part.attempt.abort("b", AbortNotice(node="b", suspect="c", reason="unreachable"))
        suspicion = await part.suspicion()
        assert (suspicion.node, suspicion.reason) == (NOBODY, "b gave up: c: unreachable")
        await part.attempt.give_up(suspicion)
        assert members["b"].rounds._attempt is None, "an abort is not answered by another one"

    scene(play)


@pytest.mark.parametrize("suspicion", [Suspicion("c", "cut"), Suspicion(NOBODY, "cut", told=["c"])])
def test_all_are_told_why_and_of_whom_who_may_be_waiting(suspicion: Suspicion) -> None:
    async def main() -> None:
        network = Network(1, CALM)
        member = Member(network, "a", outer_state("abc"))
        puppets = [Puppet(network, node) for node in "bc"]
        parts = member.tools, member.rounds.state, member.rounds.promises
        await Attempt(*parts, fresh(*"abc"), announced(member)).give_up(suspicion)
        notice = AbortNotice(node="a", round=1, ballot=BALLOT, suspect="c", reason="cut")
        assert [puppet.aborts for puppet in puppets] == [[notice], [notice]]

    run(main())


def test_a_long_reason_is_cut_to_what_a_message_holds() -> None:
    """Such as that of each of many holders that could not hand over a result."""

    async def main() -> None:
        network = Network(1, CALM)
        member, puppet = Member(network, "a", outer_state("ab")), Puppet(network, "b")
        parts = member.tools, member.rounds.state, member.rounds.promises
        await Attempt(*parts, fresh(*"ab"), announced(member)).give_up(Suspicion("b", "nobody is left; " * 1000))
        (notice,) = puppet.aborts
        assert FIELDS[AbortNotice]["reason"].holds(notice.reason)  # type: ignore[union-attr]
        assert notice.reason.startswith("nobody is left; nobody")

    run(main())


def test_a_message_that_gets_lost_is_told_again_but_not_for_ever() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        member = Member(network, "a", outer_state("a"))
        tries = 0

        async def deaf(sender: str, vote: Signed) -> Any:
            nonlocal tries
            tries += 1
            await asyncio.Event().wait()

        network.join("b").serve(VOTE, deaf)
        await member.tools.tell("b", VOTE, signed(vote("a")))
        assert tries == TELLS

    run(main())


# --- votes --------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["digest", "plan"])
def test_a_vote_for_something_else_decides_nothing(changed: str) -> None:
    """For another result, or for the same one by another group or of other members: its link would prove nothing."""

    async def play(members: dict[str, Member]) -> None:
        part = Part(members["a"], fresh(*"ab"))
        Part(members["b"], fresh(*"ab"))
        seal = members["b"].statements.seal

        def forged(message: Any) -> Signed:
            if isinstance(message, Vote):
                setattr(message, changed, b"?" * 32)
            return seal(message)

        members["b"].statements.seal = forged  # type: ignore[method-assign]
        suspicion = await part.suspicion()
        assert (suspicion.node, suspicion.reason) == ("b", "voted for a different result than ours")

    scene(play, "ab")


def test_a_commit_proves_itself() -> None:
    """Every member's own link leads whoever trusts the state before to the decided one."""

    async def play(members: dict[str, Member]) -> None:
        trusted = Trusted(0, members["a"].rounds.base, tuple("abc"))
        for part in [Part(member, fresh(*"abc")) for member in members.values()]:
            await part.task
            state, link = part.decided
            assert follow(trusted, link, members["a"].statements) == Trusted(1, state.digest, state.members)

    scene(play)
