from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rounds.cases import (
    CALM,
    LENGTH,
    Member,
    Puppet,
    acquainted,
    add_mean,
    assemble,
    ballot,
    link,
    outer_state,
    scene,
    value,
    with_puppet,
)
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.base.faults import Faults
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_node.rounds.commitments import Cast, as_ballot
from pier_node.rounds.leader import POLL
from pier_node.rounds.proofs import ProgressChecks
from pier_node.rounds.suspects import EXPIRY, STANDSTILL, Behind
from pier_node.wire.carrier import BEAT, VOTE
from pier_proto.v1.peer_pb2 import Ack, Phase, Proposal, Signed


def test_a_round_moves_all_members_to_the_same_state() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        tasks = [member.contribute(index, tokens=10) for index, member in enumerate(members.values())]
        states = [await task for task in tasks]
        assert {state.digest for state in states} == {states[0].digest}
        assert states[0].anchor.tolist() == [1.0] * LENGTH
        assert (states[0].round, states[0].members, states[0].ledger) == (
            1,
            ("a", "b", "c"),
            {"a": 10, "b": 10, "c": 10},
        )
        assert all(member.rounds.state is state for member, state in zip(members.values(), states, strict=True))
        assert members["a"].diary == ["promised", "recorded", "kept 1", "settled"]

    scene(play)


def test_a_member_that_wants_too_much_is_clipped_and_everybody_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        amounts = dict(zip(members, [1.0, 2.0, 30.0], strict=True))
        tasks = [member.contribute(amounts[node]) for node, member in members.items()]
        states = [await task for task in tasks]
        assert states[0].anchor.tolist() == pytest.approx([(1 + 2 + 3 * 2) / 3] * LENGTH)
        assert {state.digest for state in states} == {states[0].digest}
        assert all(member.rounds.clipped == {"c": pytest.approx(0.2)} for member in members.values())
        assert caplog.messages.count("round 1: the update of c was clipped to 0.2 of its length") == 3
        await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        assert all(member.rounds.clipped == {} for member in members.values())

    scene(play)


def test_everybody_hears_of_a_commit_at_once() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        roster = members["a"].roster
        async with asyncio.timeout(0.1):  # a beat takes ten times as long
            await roster.changed.until(lambda: all(pulse.round == 1 for pulse in roster.pulses().values()))

    scene(play)


def test_a_round_of_one_asks_nobody() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        rounds = members["a"].rounds
        state = await rounds.commit_alone(Update(np.ones(LENGTH, np.float32), 3), add_mean)
        assert (state.round, state.members, rounds.state is state) == (1, ("a",), True)
        assert members["a"].diary == ["kept 1", "settled"]

    scene(play)


def test_what_peers_may_fetch() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        rounds, shadow = members["a"].rounds, outer_state("a", round=1)
        await rounds.promises.promise(ballot(1), "a")
        await rounds.promises.cast(Cast.of(ballot(1), value("x", "a")), shadow)
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


@pytest.mark.parametrize(
    ("phase", "members", "mean"),
    [
        ("ready", "ab", 3.0),
        ("exchanging", "ab", 3.0),
        ("staged", "abc", 5.0),
        ("journaled", "abc", 5.0),
        ("voting", "abc", 5.0),
    ],
)
def test_survivors_go_on_without_a_member_that_dies(phase: str, members: str, mean: float) -> None:
    """Once they have voted for a result with its part in it, they finish that; before, they compute one without."""
    found: list[Network] = []

    async def play(network: Network, sites: dict[str, Member]) -> None:
        found.append(network)
        tasks = {node: site.contribute(amount) for (node, site), amount in zip(sites.items(), (3, 3, 9), strict=True)}
        states = [await tasks[node] for node in "ab"]
        assert states[0].digest == states[1].digest
        assert ("".join(states[0].members), states[0].anchor[0]) == (members, mean)

    scene(play, c=crash_at(found, "c", phase))


def test_a_result_that_may_be_committed_is_finished_not_computed_anew() -> None:
    found: list[Network] = []

    async def play(network: Network, members: dict[str, Member]) -> None:
        found.append(network)
        tasks = {node: member.contribute(1.0) for node, member in members.items()}
        state = await tasks["a"]
        votes = members["a"].journal.votes
        assert [(vote.origin, vote.digest) for vote in votes] == [(votes[0].ballot, state.digest)] * 2
        assert votes[1].ballot[0] == votes[0].ballot[0] + 1

    scene(play, c=crash_at(found, "c", "journaled"))


def test_a_vote_that_never_arrived_is_made_up_for_by_a_pulse_with_the_same_digest() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        async def deaf(sender: str, vote: Signed) -> Ack:
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


def test_who_says_that_it_is_ahead_is_not_followed_unless_it_proves_it() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        member.carrier.spawn(member.rounds.run())
        member.rounds.state = outer_state("abc", round=3)
        puppet.round = 9
        await asyncio.sleep(30)
        assert puppet.asked
        assert member.rounds.sources() == []
        assert await member.rounds.give_votes("c") == {"b"}
        puppet.proof = [link(9, b"o" * 32, puppet.digest, "ab", "ac")]
        await member.roster.changed.until(lambda: member.rounds.sources() == ["a"])

    run(main())


def test_another_result_than_ours_is_not_confirmed() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        puppet = Puppet(network, "a", round=1)
        shadow = outer_state("ab", round=1)
        member = Member(network, "b", outer_state("ab"))
        await member.rounds.promises.promise(ballot(1), "b")
        await member.rounds.promises.cast(Cast.of(ballot(1), value("x", "ab")), shadow)
        member.carrier.spawn(member.rounds.run())
        member.meet("a")
        puppet.proof = [link(1, member.rounds.base, puppet.digest, "ab")]
        with pytest.raises(Behind):
            await member.contribute(1.0)
        assert member.rounds.promises.shadow is shadow, "the vote binds until a state of that round is here"
        puppet.digest = shadow.digest
        puppet.proof = [link(1, member.rounds.base, shadow.digest, "ab")]
        member.rounds.claims = ProgressChecks(member.carrier, member.roster, member.statements, member.rounds._trusted)
        member.carrier.spawn(member.rounds.claims.run())
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


def test_a_newcomer_with_the_lowest_id_asks_a_member() -> None:
    """Its own vote counts for nothing yet: both would keep for themselves, and wait for the other for ever."""

    async def main() -> None:
        members = assemble(Network(1, CALM), "ab", outer_state("b"))
        await acquainted(members)
        for member in members.values():
            member.needs = 2
        async with asyncio.timeout(30):
            states = await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        assert {state.members for state in states} == {("a", "b")}

    run(main())


# --- whom it asks, and how often --------------------------------------------------------------------


def test_a_lost_leader_is_gone_around_and_given_another_chance_later() -> None:
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


def test_a_lost_leader_that_is_started_again_leads_again_at_once() -> None:
    """Without it there is no majority: nobody may go around it for long."""

    async def main() -> None:
        network = Network(1, CALM)
        members = assemble(network, "ab", outer_state("abc"))
        await acquainted(members)
        network.crash("a")
        waiting = members["b"].contribute(1.0)
        await members["b"].roster.changed.until(lambda: not members["b"].roster.alive("a"))
        await asyncio.sleep(3.0)
        began = asyncio.get_running_loop().time()
        back = Member(network, "a", outer_state("abc"))
        back.meet("b")
        back.carrier.spawn(back.rounds.run())
        states = await asyncio.gather(waiting, back.contribute(1.0))
        assert {state.members for state in states} == {("a", "b")}
        assert asyncio.get_running_loop().time() - began < 5, "and not only when the suspicion expires"

    run(main())


@pytest.mark.parametrize("phase", ["staged", "journaled"])
def test_a_member_that_is_started_again_in_an_attempt_is_in_the_next_one_at_once(phase: str) -> None:
    async def main() -> None:
        network, clock, killed = Network(1, CALM), asyncio.get_running_loop().time, asyncio.Event()

        async def strike(_round: int, reached: str) -> None:
            if reached == phase and not killed.is_set():
                killed.set()
                await asyncio.Event().wait()

        doomed = Member(network, "a", outer_state("ab"), faults=Faults(strike))
        members = assemble(network, "ab", outer_state("ab"), a=doomed)
        await acquainted(members)
        for member in members.values():
            member.needs = 2
        waiting = members["b"].contribute(1.0)
        doomed.contribute(1.0)
        await killed.wait()
        network.crash("a")
        await asyncio.sleep(0.5)
        back = Member(network, "a", outer_state("ab"), found=doomed.journal.now)
        back.meet("b")
        back.needs = 2
        back.carrier.spawn(back.rounds.run())
        members["b"].held["b"] = back.held["b"] = members["b"].rounds.promises.shadow or outer_state("ab")
        members["b"].roster.contacts["a"].started_at = began = clock()  # as its newer entry says
        states = await asyncio.gather(waiting, back.contribute(1.0))
        assert {state.members for state in states} == {("a", "b")}
        assert clock() - began < 5

    run(main())


def test_a_leader_that_still_trains_for_an_earlier_round_is_gone_around() -> None:
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


@pytest.mark.parametrize("verdict", ["WAIT", "NOT_LEADER", "GO"])
def test_a_leader_that_lets_all_wait_for_ever_is_gone_around(verdict: str) -> None:
    async def main() -> None:
        network = Network(1, CALM)
        puppet = Puppet(network, "a")
        puppet.propose = lambda ready: Proposal(verdict=Proposal.Verdict.Value(f"VERDICT_{verdict}"), round=ready.round)
        members = assemble(network, "bc", outer_state("abc"))
        for member in members.values():
            member.meet("a")
        await acquainted(members)
        began = asyncio.get_running_loop().time()
        states = await asyncio.gather(*(members[node].contribute(1.0) for node in "bc"))
        assert {state.members for state in states} == {("b", "c")}
        assert asyncio.get_running_loop().time() - began < 2 * STANDSTILL

    run(main())


def test_a_leader_that_waits_for_a_site_that_has_not_come_yet_is_in_the_right() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        members = assemble(network, "abc", outer_state("abc"))
        await acquainted(members)
        for member in members.values():
            member.needs = 4
        tasks = [member.contribute(1.0) for member in members.values()]
        await asyncio.wait(tasks, timeout=3 * STANDSTILL)
        assert not any(task.done() for task in tasks)
        for member in members.values():
            assert member.rounds.last_error == "waiting for 1 more of the run's 4 sites"
            assert not member.rounds._suspects.now()

    run(main())


def test_a_failing_disk_stops_the_site_before_it_votes() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        members["c"].journal.full = True
        tasks = {node: member.contribute(1.0) for node, member in members.items()}
        with pytest.raises(OSError, match="no space left"):
            await tasks["c"]
        assert members["c"].journal.now
        assert not members["a"].tools.votes.of(as_ballot(members["c"].journal.now.promised)).get("c")

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


def test_a_member_that_is_mute_in_every_round_costs_less_and_less() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        async def hang(peer: str, chunks: Any) -> None:
            await asyncio.Event().wait()

        mute = members["c"]
        mute.carrier.push = hang  # type: ignore[method-assign]
        costs, loop = list[float](), asyncio.get_running_loop()
        for _ in range(6):
            began = loop.time()
            mute.contribute(1.0)
            await asyncio.gather(*(members[node].contribute(1.0) for node in "ab"))
            costs.append(loop.time() - began)
        assert max(costs[:2]) > 25, "patience is not learned yet"
        assert costs[2] < 15, "it is left out"
        assert all(members[node].rounds.state.members == ("a", "b") for node in "ab")

    scene(play)
