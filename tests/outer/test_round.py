from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from outer.cases import (
    CALM,
    LENGTH,
    Member,
    Puppet,
    acquainted,
    add_mean,
    assemble,
    ballot,
    outer_state,
    shares,
    value,
)
from simulation.network import Network
from simulation.virtual_time import run

from pier.v1.peer_pb2 import AbortNotice, Ack, Ballot, Chunk, Phase, Proposal, Ready, Vote
from pier_node.faults import Faults
from pier_node.outer.attempt import Contribution, Voted
from pier_node.outer.keeper import POLL
from pier_node.outer.round import Behind
from pier_node.outer.state import OuterState
from pier_node.outer.suspects import EXPIRY
from pier_node.wire.carrier import ABORT, BEAT, VOTE, PeerRefused

Play = Callable[[Network, dict[str, Member]], Coroutine[Any, Any, None]]


def scene(play: Play, names: str = "abc", **faults: Faults) -> None:
    async def main() -> None:
        network, begin = Network(1, CALM), outer_state(tuple(names))
        made = {node: Member(network, node, begin, faults=fault) for node, fault in faults.items()}
        members = assemble(network, names, begin, **made)
        await acquainted(members)
        await play(network, members)

    run(main())


def test_a_round_moves_all_members_to_the_same_state() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        tasks = [member.contribute(index, tokens=10) for index, member in enumerate(members.values())]
        states = [await task for task in tasks]
        assert {state.digest for state in states} == {states[0].digest}
        assert states[0].anchor.tolist() == [1.0] * LENGTH
        assert (states[0].round, states[0].members, states[0].ledger) == (1, ("a", "b", "c"), {"a": 10, "b": 10, "c": 10})
        assert all(member.rounds.state is state for member, state in zip(members.values(), states, strict=True))
        assert members["a"].diary[:2] == ["promised", "recorded"]

    scene(play)


def test_everybody_hears_of_a_commit_at_once() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        pulse = members["a"].roster.pulse_of("c")
        assert pulse
        assert pulse.round == 1

    scene(play)


def test_a_round_of_one_asks_nobody() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        rounds = members["a"].rounds
        state = await rounds.commit_alone(Contribution(np.ones(LENGTH, np.float32), 3), add_mean)
        assert (state.round, state.members, rounds.state is state) == (1, ("a",), True)
        assert not members["a"].diary

    scene(play)


def test_what_peers_may_fetch() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        rounds, shadow = members["a"].rounds, outer_state("a", round=1)
        rounds._remember(Voted(1, ballot(1), value("x", "a"), shadow))
        assert [rounds.offer(number, False) for number in (0, 1)] == [rounds.state, None]
        assert [rounds.offer(number, True) for number in (0, 1, 2)] == [None, shadow, None]

    scene(play)


# --- the survivors go on ------------------------------------------------------------------------


def crash_at(network_of: list[Network], node: str, phase: str) -> Faults:
    async def strike(round: int, reached: str) -> None:
        if reached == phase:
            asyncio.get_running_loop().call_soon(network_of[0].crash, node)
            await asyncio.Event().wait()

    return Faults(strike)


@pytest.mark.parametrize("phase", ["ready", "exchanging", "staged", "journaled"])
def test_survivors_commit_without_a_member_that_dies_before_it_has_voted(phase: str) -> None:
    found: list[Network] = []

    async def play(network: Network, members: dict[str, Member]) -> None:
        found.append(network)
        tasks = {node: member.contribute(3.0) for node, member in members.items()}
        states = [await tasks[node] for node in "ab"]
        assert states[0].digest == states[1].digest
        assert (states[0].members, states[0].anchor[0]) == (("a", "b"), 3.0)
        assert members["a"].rounds.last_error == ""

    scene(play, c=crash_at(found, "c", phase))


def test_a_result_that_may_be_committed_is_finished_not_computed_anew() -> None:
    """c votes, tells a, and dies. a and b hold what c may have committed: they finish it, with c's part in it."""
    found: list[Network] = []

    async def play(network: Network, members: dict[str, Member]) -> None:
        found.append(network)
        members["b"].held = {}
        tasks = {node: member.contribute(amount) for (node, member), amount in zip(members.items(), (0, 0, 9), strict=True)}
        states = [await tasks[node] for node in "ab"]
        assert states[0].digest == states[1].digest
        assert (states[0].members, states[0].anchor[0]) == (("a", "b", "c"), 3.0)
        votes = members["a"].journal.votes
        assert [(vote[2].origin, vote[2].digest) for vote in votes] == [(votes[0][1], states[0].digest)] * 2
        assert votes[1][1].number > votes[0][1].number

    scene(play, c=crash_at(found, "c", "voting"))


def test_a_vote_that_never_arrived_is_made_up_for_by_a_pulse_with_the_same_digest() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        async def deaf(sender: str, vote: Vote) -> Ack:
            return Ack()

        members["b"].carrier.handlers[VOTE.name] = deaf
        states = await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        assert len({state.digest for state in states}) == 1
        assert states[1] is members["b"].rounds.state, "the very result that it had staged"

    scene(play)


def test_who_was_not_in_it_is_behind() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        members["c"].phase = Phase.PHASE_CATCHING_UP
        await asyncio.sleep(3)
        await asyncio.gather(*(members[node].contribute(1.0) for node in "ab"))
        with pytest.raises(Behind) as behind:
            await members["c"].contribute(1.0)
        assert behind.value.peers == ("a", "b")
        assert members["c"].rounds.state.round == 0

    scene(play)


def test_another_result_than_ours_is_not_confirmed() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        puppet = Puppet(network, "a", round=1)
        shadow = outer_state("ab", round=1)
        member = Member(network, "b", outer_state("ab"), Voted(1, ballot(1), value("x", "ab"), shadow))
        member.meet("a")
        with pytest.raises(Behind):
            await member.contribute(1.0)
        assert member.rounds.shadow is shadow, "the vote binds until a state of that round is here"
        puppet.digest = shadow.digest
        await asyncio.sleep(3)
        assert (await member.contribute(1.0)).digest == shadow.digest

    run(main())


def test_a_majority_that_is_not_there_is_waited_for() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        network.partition({"a"}, {"b", "c"})
        tasks = {node: member.contribute(1.0) for node, member in members.items()}
        await asyncio.wait([tasks["b"], tasks["c"]])
        assert tasks["b"].result().members == ("b", "c")
        assert not tasks["a"].done()
        assert "no majority" in members["a"].rounds.last_error
        network.partition()
        with pytest.raises(Behind):
            await tasks["a"]

    scene(play)


# --- what a member takes from nobody ---------------------------------------------------------------


def proposal(ready: Ready, **change: Any) -> Proposal:
    """A good one, for the puppet a and the member b; then what is wrong with it."""
    dealt = shares({"a": 1, "b": ready.tokens}, [(0, 6), (6, 6)])
    dealt[1].nonce = ready.nonce
    fields = {"round": ready.round, "ballot": ballot(1, "a"), "shares": dealt, **change}
    return Proposal(verdict=Proposal.VERDICT_GO, **fields)


def stale(ready: Ready) -> Proposal:
    good = proposal(ready)
    good.shares[1].nonce = b"before"
    return good


@pytest.mark.parametrize(
    ("wrong", "complaint"), [(lambda ready: proposal(ready, ballot=Ballot()), "an old ballot"), (stale, "stale")]
)
def test_a_proposal_that_could_do_harm_is_refused(
    wrong: Callable[[Ready], Proposal], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        puppet.propose = wrong
        member.contribute(1.0)
        await puppet.changed.until(lambda: len(puppet.heard) > 1)
        assert not member.diary

    run(main())
    assert complaint in caplog.text


async def with_puppet(network: Network, promised: tuple[int, Ballot] = (0, Ballot())) -> tuple[Puppet, Member]:
    puppet = Puppet(network, "a")
    member = Member(network, "b", outer_state("ab"), promised=promised)
    member.meet("a")
    await member.roster.changed.until(lambda: member.roster.alive("a"))
    return puppet, member


def test_a_promise_outlives_a_restart() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM), promised=(1, ballot(7, "c")))
        puppet.propose = lambda ready: proposal(ready, ballot=ballot(7, "b"))
        member.contribute(1.0)
        await puppet.changed.until(lambda: len(puppet.heard) > 1)
        assert puppet.heard[0].seen == ballot(7, "c")
        assert not member.diary
        puppet.propose = lambda ready: proposal(ready, ballot=ballot(8, "a"))
        await puppet.changed.until(lambda: len(puppet.heard) > 2)
        await asyncio.sleep(2)
        assert member.journal.last_promise == (1, ballot(8, "a"))
        assert member.rounds.engaged

    run(main())


def test_an_announcement_is_good_for_one_attempt_and_a_lost_answer_does_not_void_it() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        member.contribute(1.0)
        await puppet.changed.until(lambda: len(puppet.heard) > 2)
        assert len({ready.nonce for ready in puppet.heard}) == 1
        puppet.propose = proposal
        await puppet.changed.until(lambda: len(puppet.heard) > 4)
        assert puppet.heard[3].nonce == puppet.heard[0].nonce
        assert puppet.heard[4].nonce != puppet.heard[0].nonce, "it took part in the attempt, which failed"
        assert puppet.heard[4].seen == ballot(1, "a")

    run(main())


def test_new_contributions_are_announced_anew() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        for amount in (1, 2):
            task = member.contribute(1.0, tokens=amount)
            await puppet.changed.until(lambda amount=amount: puppet.heard[-1:] and puppet.heard[-1].tokens == amount)
            task.cancel()
            await asyncio.wait([task])
        assert puppet.heard[-1].nonce != puppet.heard[0].nonce, "a keeper could answer with the old number of tokens"

    run(main())


@pytest.mark.parametrize(("journal", "members", "kept"), [(12, ("b",), True), (11, ("b",), False), (10, ("b",), False)])
def test_a_vote_for_a_later_round_than_what_was_fetched_still_binds(
    journal: int, members: tuple[str, ...], kept: bool
) -> None:
    """The site crashed after its vote, with an old checkpoint: catching up must not make it forget."""

    async def main() -> None:
        network = Network(1, CALM)
        vote = Voted(journal, ballot(3), value("x", "ab"), None)
        member = Member(network, "b", outer_state("ab", round=9), vote, promised=(journal, ballot(4)))
        member.rounds.adopt(outer_state("ab", round=11))
        ready = member.rounds._ready(Contribution(np.ones(LENGTH, np.float32), 1))
        assert (ready.HasField("voted"), ready.seen) == (kept, ballot(4) if kept else Ballot())
        assert (ready.voted_round, ready.holds) == (12 if kept else 0, False)

    run(main())


def test_a_vote_in_anothers_name_is_refused() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        vote = Vote(node="c", round=1, ballot=ballot(1), value=value("x", "abc"))
        with pytest.raises(PeerRefused, match="in the name of c"):
            await members["b"].carrier.call("a", VOTE, vote, 5.0)
        assert members["a"].tools.votes.of(ballot(1)) == {}

    scene(play)


@pytest.mark.parametrize(("round", "counted"), [(0, False), (1, True), (2, False)])
def test_votes_of_other_rounds_are_not_counted(round: int, counted: bool) -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        vote = Vote(node="b", round=round, ballot=ballot(1), value=value("x", "abc"))
        await members["b"].carrier.call("a", VOTE, vote, 5.0)
        assert bool(members["a"].tools.votes.of(ballot(1))) == counted

    scene(play)


def test_only_members_of_an_attempt_can_abort_it() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        stranger = Puppet(puppet.carrier.network, "z")
        puppet.propose = proposal
        member.contribute(1.0)
        await member.tools.news.until(lambda: member.rounds.exchanging)
        for sender, number in ((stranger, 1), (puppet, 2)):
            notice = AbortNotice(node=sender.node, round=1, ballot=ballot(number, "a"), reason="because")
            await sender.carrier.call("b", ABORT, notice, 5.0)
            await asyncio.sleep(0)
            assert "because" not in member.rounds.last_error
        await puppet.carrier.call("b", ABORT, AbortNotice(node="a", round=1, ballot=ballot(1, "a"), reason="because"), 5.0)
        await asyncio.sleep(0.1)
        assert member.rounds.last_error == ": a gave up: itself: because"

    run(main())


@pytest.mark.parametrize(
    ("chunks", "complaint"),
    [
        ([], "an empty stream"),
        ([Chunk(round=1, ballot=ballot(1), stage=Chunk.STAGE_SCATTER)], "no such attempt"),
        ([Chunk(round=0, ballot=ballot(1), stage=Chunk.STAGE_SCATTER)], "that attempt is over"),
    ],
)
def test_streams_of_no_attempt_are_refused(chunks: list[Chunk], complaint: str) -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        async def stream() -> Any:
            for chunk in chunks:
                yield chunk

        with pytest.raises(PeerRefused, match=complaint):
            await members["b"].carrier.push("a", stream())

    scene(play)


# --- whom it asks, and how often --------------------------------------------------------------------


def test_a_lost_keeper_is_gone_around_and_given_another_chance_later() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        deaf, second = Puppet(network, "a"), Puppet(network, "b")
        member = Member(network, "c", outer_state("abc"))
        member.meet("a", "b")
        await member.roster.changed.until(lambda: member.roster.alive("a") and member.roster.alive("b"))
        del deaf.carrier.handlers["Gather"]
        member.contribute(1.0)
        await second.changed.until(lambda: bool(second.heard))
        assert asyncio.get_running_loop().time() > 2 * POLL
        assert second.heard[0].suspects == ["a"]
        lost_at = asyncio.get_running_loop().time()
        deaf.carrier.serve(BEAT, deaf._beat)
        deaf.carrier.handlers["Gather"] = deaf._gather
        await deaf.changed.until(lambda: bool(deaf.heard))
        assert asyncio.get_running_loop().time() - lost_at == pytest.approx(EXPIRY, abs=5)
        assert deaf.heard[0].suspects == []

    run(main())


def test_a_keeper_that_still_trains_for_an_earlier_round_is_gone_around() -> None:
    """Or the fast sites would wait, round for round, until the slow one with the lowest id has finished its steps."""

    async def main() -> None:
        network, begin = Network(1, CALM), outer_state("abc", round=4)
        members = assemble(network, "bc", begin, a=Member(network, "a", outer_state("abc", round=3)))
        slow = Member(network, "a", outer_state("abc", round=3))
        slow.phase = Phase.PHASE_TRAINING
        slow.meet(*"abc")
        for member in members.values():
            member.meet("a")
        await acquainted({**members, "a": slow})
        states = await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        assert states[0].members == ("b", "c")
        assert asyncio.get_running_loop().time() < 10

    run(main())


def test_who_is_told_to_wait_asks_again_without_a_pause() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        member.contribute(1.0)
        began = asyncio.get_running_loop().time()
        await puppet.changed.until(lambda: len(puppet.heard) >= 20)
        assert asyncio.get_running_loop().time() - began < 20 * 1.1, "whoever is away may be left out"

    run(main())


def test_a_failing_disk_stops_the_site_before_it_votes() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        def broken(*vote: Any) -> None:
            raise OSError("no space left")

        members["c"].journal.record = broken  # type: ignore[method-assign]
        tasks = {node: member.contribute(1.0) for node, member in members.items()}
        with pytest.raises(OSError, match="no space left"):
            await tasks["c"]
        assert not members["a"].tools.votes.of(members["c"].journal.last_promise[1]).get("c")

    scene(play)


def test_nothing_of_a_cancelled_round_goes_on_behind_our_back() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        task = members["a"].contribute(1.0)
        members["b"].contribute(1.0)
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert not members["a"].rounds.exchanging
        state: OuterState = members["a"].rounds.state
        assert (state.round, members["a"].diary) == (0, [])

    scene(play)


