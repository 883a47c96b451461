"""What a member of a round takes from nobody, and what binds it."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rounds.cases import (
    CALM,
    LENGTH,
    LONG,
    Member,
    Puppet,
    acquainted,
    add_mean,
    assemble,
    ballot,
    outer_state,
    scene,
    shares,
    with_puppet,
)
from simulation.network import Network
from simulation.statements import PlainStatements
from simulation.virtual_time import run

from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_node.rounds.commitments import Cast, Commitments
from pier_node.rounds.exchange_plan import Plan
from pier_node.rounds.quorum import LEAP
from pier_node.rounds.suspects import NOBODY, Behind, Suspicion
from pier_node.wire.carrier import ABORT, VOTE, BadMessage, Chunk, PeerRefused
from pier_proto.v1.peer_pb2 import AbortNotice, Ballot, Proposal, Ready, Share, Vote


def proposal(ready: Ready, **change: Any) -> Proposal:
    """A good one, for the puppet a and the member b; then what is wrong with it."""
    dealt = shares({"a": 1, "b": ready.tokens}, [(0, 6), (6, 6)])
    dealt[1].norm = ready.norm
    leader = Ready(node="a", round=ready.round, nonce=b"a", tokens=1, norm=LONG, votes=["a"], base=ready.base)
    readies = [PlainStatements(it.node).seal(it) for it in (leader, ready)]
    fields = {"round": ready.round, "ballot": ballot(1, "a"), "shares": dealt, "readies": readies, **change}
    return Proposal(verdict=Proposal.VERDICT_GO, **fields)


def stale(ready: Ready) -> Proposal:
    before = Ready.FromString(ready.SerializeToString())
    before.nonce = b"before"
    return proposal(before)


def made_up(ready: Ready) -> Proposal:
    """Somebody else's announcement, changed on its way."""
    good, more = proposal(ready), Ready.FromString(ready.SerializeToString())
    more.tokens = 1 << 40
    good.readies[1].statement = more.SerializeToString(deterministic=True)
    return good


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda ready: proposal(ready, ballot=Ballot()), "an old ballot"),
        (stale, "stale"),
        (made_up, "a Ready that b has not signed"),
    ],
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


def test_a_promise_outlives_a_restart() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM), Commitments.fresh(0, "b").promising((7, "c")))
        puppet.propose = lambda ready: proposal(ready, ballot=ballot(7, "b"))
        member.contribute(1.0)
        await puppet.changed.until(lambda: len(puppet.heard) > 1)
        assert puppet.heard[0].seen == ballot(7, "c")
        assert not member.diary
        puppet.propose = lambda ready: proposal(ready, ballot=ballot(8, "a"))
        await puppet.changed.until(lambda: len(puppet.heard) > 2)
        await asyncio.sleep(2)
        assert member.journal.now
        assert (member.journal.now.promised, member.journal.now.engaged) == ((8, "a"), True)

    run(main())


def test_an_announcement_is_good_for_one_attempt_and_a_lost_answer_does_not_void_it() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        member.contribute(1.0)
        await puppet.changed.until(lambda: len(puppet.heard) == 3)
        assert {(ready.nonce, ready.seen.number) for ready in puppet.heard} == {(b"b1", 0)}
        puppet.propose = proposal
        await puppet.changed.until(lambda: len(puppet.heard) == 4)
        assert (puppet.heard[3].nonce, puppet.heard[3].seen.number) == (b"b2", 1), "after an attempt that failed"

    run(main())


def test_new_contributions_are_announced_anew() -> None:
    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        for amount in (1, 2):
            task = member.contribute(1.0, tokens=amount)
            while not (puppet.heard and puppet.heard[-1].tokens == amount):
                await puppet.changed.wait()
            task.cancel()
            await asyncio.wait([task])
        assert puppet.heard[-1].nonce != puppet.heard[0].nonce, "a leader could answer with the old number of tokens"

    run(main())


@pytest.mark.parametrize("alone", [False, True])
def test_a_site_that_lost_a_round_waits_until_it_has_it_again(alone: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its newest checkpoint is damaged: what it would decide now may have been decided, and followed, before."""

    async def main() -> None:
        network = Network(1, CALM)
        member = Member(network, "b", outer_state("b", round=9), Commitments.fresh(11, "b"))
        member.carrier.spawn(member.rounds.run())
        update, rounds = Update(np.ones(LENGTH, np.float32), 3), member.rounds
        task = member.play((rounds.commit_alone if alone else rounds.commit)(update, add_mean))
        await asyncio.sleep(60)
        assert not task.done()
        assert "has lost round 11, or what it voted for in it" in member.rounds.last_error
        assert caplog.text.count("has lost round 11") == 1
        task.cancel()
        await member.rounds.adopt(outer_state("b", round=10), [])
        assert member.rounds.promises.lost
        await member.rounds.adopt(outer_state("b", round=11), [])
        assert (await member.contribute(1.0)).round == 12

    run(main())


def test_a_state_is_on_the_disk_before_this_site_says_that_it_has_it() -> None:
    async def main() -> None:
        member = Member(Network(1, CALM), "b", outer_state("ab"))
        seen = list[int]()

        async def keep(state: OuterState) -> None:
            seen.append(member.rounds.state.round)
            assert member.rounds.offer(state.round, False) is None
            assert member.pulse().round == 0

        member.tools.keep = keep
        await member.rounds.adopt(outer_state("ab", round=3), [])
        assert (seen, member.pulse().round) == ([0], 3)
        offered = member.rounds.offer(3, False)
        assert offered
        assert offered.round == 3

    run(main())


def test_a_vote_in_anothers_name_is_refused() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        vote = PlainStatements("c").seal(Vote(node="c", round=1, ballot=ballot(1), digest=b"x" * 32))
        with pytest.raises(PeerRefused, match="in the name of c"):
            await members["b"].carrier.call("a", VOTE, vote, 5.0)
        assert members["a"].tools.votes.of(ballot(1)) == {}

    scene(play)


def test_a_vote_that_was_changed_on_its_way_is_refused() -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        vote = Vote(node="b", round=1, ballot=ballot(1), digest=b"x" * 32)
        signed = PlainStatements("b").seal(vote)
        vote.digest = b"y" * 32
        signed.statement = vote.SerializeToString()
        with pytest.raises(PeerRefused, match="a Vote that b has not signed"):
            await members["b"].carrier.call("a", VOTE, signed, 5.0)
        assert members["a"].tools.votes.of(ballot(1)) == {}

    scene(play)


@pytest.mark.parametrize(("round", "counted"), [(0, False), (1, True), (2, False)])
def test_votes_of_other_rounds_are_not_counted(round: int, counted: bool) -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        vote = PlainStatements("b").seal(Vote(node="b", round=round, ballot=ballot(1), digest=b"x" * 32))
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
        notice = AbortNotice(node="a", round=1, ballot=ballot(1, "a"), reason="because")
        await puppet.carrier.call("b", ABORT, notice, 5.0)
        await asyncio.sleep(0.1)
        assert member.rounds.last_error == "a gave up: itself: because"

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


# --- strangers: sites that were no members of the last round -------------------------------------------


def stranger(network: Network, found: Commitments, result: OuterState | None = None) -> dict[str, Member]:
    """Three members, and a fourth site that comes with what it says that binds it."""
    begin = outer_state("abc")
    members = {node: Member(network, node, begin) for node in "abc"}
    members["s"] = Member(network, "s", begin, found)
    members["s"].rounds.promises.shadow = result
    for member in members.values():
        member.meet(*"abcs")
        member.carrier.spawn(member.rounds.run())
        if result:
            member.held["s"] = result
    return members


def test_a_state_that_a_stranger_says_it_voted_for_is_not_adopted() -> None:
    async def main() -> None:
        network, made_up = Network(1, CALM), outer_state("s", round=1, anchor=[7.0] * LENGTH, a=10**9, s=1)
        vote = Cast((2, "a"), (2, "a"), made_up.digest, ("s",))
        members = stranger(network, Commitments(0, frozenset("s"), (2, "a"), vote), made_up)
        await acquainted(members)
        tasks = [member.contribute(1.0) for member in members.values()]
        states = [await task for task in tasks[:3]]
        assert {state.digest for state in states} == {states[0].digest}
        assert set(states[0].members) >= set("abc")
        assert states[0].ledger["a"] == 1

    run(main())


def test_a_stranger_that_says_it_saw_an_absurd_ballot_stops_nobody() -> None:
    async def main() -> None:
        members = stranger(Network(1, CALM), Commitments(0, frozenset("s"), (LEAP, "s")))
        await acquainted(members)
        tasks = [member.contribute(1.0) for member in members.values()]
        states = [await task for task in tasks[:3]]
        assert states[0].members == ("a", "b", "c")
        assert asyncio.get_running_loop().time() < 60

    run(main())


@pytest.mark.parametrize(
    ("made_by", "took_part"),
    [("z", "abc"), ("z", "abcz"), ("cz", "abcz"), ("acz", "abcz")],
)
def test_a_result_of_others_than_those_who_took_part_is_not_adopted(made_by: str, took_part: str) -> None:
    """A member that lies may hand over what it likes, but not make others the base of the next round."""

    async def main() -> None:
        network, made_up = Network(1, CALM), outer_state(made_by, round=1, anchor=[0.1] * LENGTH)
        vote = Cast((2, "c"), (2, "c"), made_up.digest, tuple(took_part))
        members = stranger(network, Commitments.fresh(0, "s"))
        liar = members["c"] = Member(network, "c", outer_state("abc"), Commitments(0, frozenset("c"), (2, "c"), vote))
        liar.rounds.promises.shadow = made_up
        liar.meet(*"abs")
        liar.carrier.spawn(liar.rounds.run())
        for member in members.values():
            member.held["c"] = made_up
        await acquainted(members)
        liar.contribute(1.0)
        states = await asyncio.gather(*(members[node].contribute(1.0) for node in "ab"))
        assert states[0].members == states[1].members == ("a", "b")

    run(main())


# --- sites that make one attempt after another fail ----------------------------------------------------


async def quit_all(member: Member, accused: str) -> None:
    """Give up every attempt at once, because of each of these in turn."""
    for blamed in itertools.cycle(accused or [NOBODY]):
        await member.tools.news.until(lambda: member.rounds._attempt is not None)
        attempt = member.rounds._attempt
        assert attempt
        await attempt.give_up(Suspicion(blamed, "it does not like it"))
        attempt.abort(member.node, AbortNotice())
        await member.tools.news.until(lambda attempt=attempt: member.rounds._attempt is not attempt)  # type: ignore[misc]


@pytest.mark.parametrize("accused", ["", "c", "abc"])
@pytest.mark.parametrize("base", ["abcd", "abcde"])
def test_who_gives_up_again_and_again_is_left_out(base: str, accused: str) -> None:
    """Be it a member of the last round, d, or a stranger to it, s: whoever it blames."""

    async def main() -> None:
        network, begin = Network(1, CALM), outer_state(tuple(base))
        quitter = "d" if base == "abcd" else "s"
        members = {node: Member(network, node, begin) for node in sorted({*base, quitter})}
        for member in members.values():
            member.meet(*members)
            member.carrier.spawn(member.rounds.run())
        await acquainted(members)
        members[quitter].carrier.spawn(quit_all(members[quitter], accused))
        tasks = {node: member.contribute(1.0) for node, member in members.items()}
        del tasks[quitter]
        ends = await asyncio.gather(*tasks.values(), return_exceptions=True)
        states = [end for end in ends if isinstance(end, OuterState)]
        assert len(states) >= 3 or (accused == "c" and len(states) == 2), "c may have to wait for the next round, too"
        assert all(isinstance(end, Behind) for end in ends if end not in states)
        assert {state.digest for state in states} == {states[0].digest}
        assert quitter not in states[0].members
        assert asyncio.get_running_loop().time() < 60

    run(main())


def test_who_refuses_all_streams_is_left_out() -> None:
    async def refuse(sender: str, _chunks: object) -> None:
        raise BadMessage("no")

    async def main() -> None:
        members = assemble(Network(1, CALM), "abcd")
        members["b"].carrier.serve_push(refuse)
        await acquainted(members)
        tasks = {node: member.contribute(1.0) for node, member in members.items()}
        states = [await tasks[node] for node in "acd"]
        assert states[0].members == ("a", "c", "d")
        assert asyncio.get_running_loop().time() < 60

    run(main())


def test_an_absurd_bandwidth_and_norm_stop_nobody() -> None:
    async def main() -> None:
        members = assemble(Network(1, CALM), "abcd")
        for member in members.values():
            member.tools.bandwidth = sys.float_info.max
        await acquainted(members)
        states = await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        assert states[0].members == tuple("abcd")
        plan = Plan(1, ballot(1), [Share(node=node, tokens=1, norm=sys.float_info.max) for node in "abc"], 50.0, 1.0)
        assert plan.one_level(lossy=True).longest_mean ** 2 < math.inf

    run(main())
