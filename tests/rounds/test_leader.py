from __future__ import annotations

import asyncio
import string
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from rounds.cases import ballot, ready, value, voter
from simulation.statements import PlainStatements
from simulation.virtual_time import run

from pier_node.base.patience import LearnedWait
from pier_node.base.tasks import Signal
from pier_node.outer.mean import Weighing
from pier_node.outer.state import OuterState
from pier_node.pipeline.vote_state import ONE_RESULT
from pier_node.rounds.deadline import COMING
from pier_node.rounds.exchange_plan import rows
from pier_node.rounds.leader import BUSY, POLL, Leader, LeaderView
from pier_node.wire.bounds import RULES
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Handover, Phase, Proposal, Ready, Signed, Value

PATIENCE = 60.0
LENGTH = 12
STATE = b""
"""Digest of the last round's state, in announcements that name none."""


class Roll:
    """A roster that a test writes."""

    def __init__(self, node: str, names: str) -> None:
        self.node = node
        self.names = list(names)
        self.phases = dict.fromkeys(names, Phase.PHASE_TRAINING)
        self.hidden: set[str] = set()
        self.changed, self.crowd = Signal(), 1.0

    def abreast(self, round: int, committed: float) -> list[str]:
        return self.names

    def participants(self) -> dict[str, None]:
        return dict.fromkeys(self.names)

    @property
    def contacts(self) -> set[str]:
        return {*self.names, *"abcdefgh"} - self.hidden

    def waits(self, node: str) -> bool:
        return self.phases.get(node) == Phase.PHASE_WAITING


ANY = Weighing()


def _state(round: int, members: str = "abc") -> OuterState:
    """After this round; if it is that of a pipeline, b and c took the last step."""
    return OuterState(round, tuple(members), {}, dict.fromkeys("bc", 4))


class Desk:
    """A leader at work, at round 4, in a run that has had these members."""

    def __init__(
        self,
        node: str = "a",
        present: str = "abc",
        base: str = "abc",
        sites: int = 1,
        bounds: Weighing = ANY,
        witness: str = "",
    ) -> None:
        self.roll = Roll(node, present)
        roster: Any = self.roll
        self.view = LeaderView(_state(4, base), STATE, 0.0, bounds, 0, LENGTH, sites)
        self.patience = LearnedWait(PATIENCE, 1.0)
        self.leader = Leader(roster, PlainStatements(node, witness), lambda: self.view, self.patience)

    def ask(self, announced: Ready, sender: str = "") -> asyncio.Task[Proposal]:
        return asyncio.create_task(self.leader.gather(sender or announced.node, sealed(announced)))

    async def ask_until_told(self, announced: Ready) -> Proposal:
        """As a member does: again whenever it shall wait."""
        while (answer := await self.ask(announced)).verdict == Proposal.VERDICT_WAIT:
            pass
        return answer


def at_desk(scene: Callable[[Desk], Awaitable[None]], **desk: Any) -> None:
    async def main() -> None:
        made = Desk(**desk)
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(made.leader.run())
            await scene(made)
            working.cancel()

    run(main())


def sealed(announced: Ready) -> Signed:
    return PlainStatements(announced.node).seal(announced)


def now() -> float:
    return asyncio.get_running_loop().time()


def group(proposal: Proposal) -> str:
    assert proposal.verdict == Proposal.VERDICT_GO, proposal
    return "".join(share.node for share in proposal.shares)


def test_a_member_that_commits_before_its_leader_is_not_sent_away() -> None:
    """Its question would come again a round trip later."""

    async def scene(desk: Desk) -> None:
        asked = [desk.ask(ready(node, round=6)) for node in "bc"]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in asked)
        desk.view = replace(desk.view, state=_state(5))
        desk.roll.changed.notify()
        assert group(await desk.ask(ready("a", round=6))) == "abc"
        assert [group(await task) for task in asked] == ["abc"] * 2
        assert now() < 1

    at_desk(scene)


def test_of_many_members_the_slowest_own_no_shard_so_that_the_others_fill_a_grid() -> None:
    names = string.ascii_letters[:37]

    async def scene(desk: Desk) -> None:
        desk.view = replace(desk.view, length=3700)
        slow = {"d": 1e6, "C": 2e6}  # of 37 sites, 35 make 7 rows of 5
        asked = [desk.ask(ready(node, tokens=1, bandwidth=slow.get(node, 4e6))) for node in names]
        shares = (await asyncio.gather(*asked))[0].shares
        assert [share.node for share in shares if not share.length] == ["C", "d"]
        assert len(rows(shares)) == 7
        assert sum(share.length for share in shares) == 3700

    at_desk(scene, node="A", present=names, base=names)


def test_all_are_here() -> None:
    async def scene(desk: Desk) -> None:
        asked = [desk.ask(ready(node, tokens=10, bandwidth=5.0, seen=ballot(3))) for node in "cab"]
        answers = await asyncio.gather(*asked)
        assert now() < 1
        assert answers[0] == answers[1] == answers[2]
        proposal = answers[0]
        assert group(proposal) == "abc"
        assert proposal.ballot == ballot(4, "a")
        assert [(share.offset, share.length, share.tokens) for share in proposal.shares] == [
            (0, 4, 10),
            (4, 4, 10),
            (8, 4, 10),
        ]
        announced = [ready(node, tokens=10, bandwidth=5.0, seen=ballot(3)) for node in "abc"]
        assert list(proposal.readies) == [*map(sealed, announced)], "what the proposal rests on, as they signed it"
        assert not proposal.HasField("adopt")

    at_desk(scene)


@pytest.mark.parametrize(
    ("base", "lengths"), [("bc", [0, 6, 6, 0]), ("a", [3, 3, 3, 3]), ("abcd", [3, 3, 3, 3]), ("ad", [6, 0, 0, 6])]
)
def test_strangers_own_no_part_of_the_mean_unless_they_are_the_most(base: str, lengths: list[int]) -> None:
    async def scene(desk: Desk) -> None:
        answers = await asyncio.gather(*(desk.ask_until_told(ready(node, tokens=10)) for node in "abcd"))
        shares = answers[0].shares
        assert [share.length for share in shares] == lengths
        assert [share.offset for share in shares] == [sum(lengths[:at]) for at in range(4)]

    at_desk(scene, node=base[0], present="abcd", base=base)


def test_in_a_pipeline_an_elector_leads_and_electors_own_the_mean() -> None:
    async def scene(desk: Desk) -> None:
        answers = await asyncio.gather(*(desk.ask_until_told(ready(node, tokens=10)) for node in "abcd"))
        assert [share.length for share in answers[0].shares] == [0, 6, 6, 0]

    async def elsewhere(desk: Desk) -> None:
        answer = await desk.ask(ready("d"))
        assert (answer.verdict, answer.other) == (Proposal.VERDICT_NOT_LEADER, "b")

    at_desk(scene, node="b", present="abcd", base="abcd", bounds=ONE_RESULT)
    at_desk(elsewhere, node="a", present="abcd", base="abcd", bounds=ONE_RESULT)


def test_an_honest_stranger_gets_in_beside_one_that_makes_each_attempt_fail() -> None:
    async def scene(desk: Desk) -> None:
        chosen = list[str]()
        for round in range(5, 9):
            desk.view = replace(desk.view, state=_state(round - 1, chosen[-1] if chosen else "a"))
            while True:  # with r, the attempt fails
                nonce = bytes([len(chosen)])
                asked = [ready(node, round=round, nonce=nonce + node.encode()) for node in "abcr"]
                answers = await asyncio.gather(*map(desk.ask_until_told, asked))
                chosen.append(group(answers[0]))
                if "r" not in chosen[-1]:
                    break
        assert chosen == ["abcr", "a", "ab", "abc", "abcr", "abc"]

    at_desk(scene, present="abcr", base="a")


def test_a_live_participant_is_waited_for_until_the_deadline() -> None:
    async def scene(desk: Desk) -> None:
        answers = await asyncio.gather(*(desk.ask_until_told(ready(node)) for node in "ab"))
        assert now() == pytest.approx(PATIENCE, abs=1)
        assert {group(answer) for answer in answers} == {"ab"}

    at_desk(scene)


def test_who_says_that_it_waits_but_does_not_come_is_waited_for_once() -> None:
    async def scene(desk: Desk) -> None:
        spent = []
        for number, phase in enumerate(("WAITING", "WAITING", "TRAINING", "WAITING", "WAITING"), start=5):
            desk.view = replace(desk.view, state=_state(number - 1))
            desk.roll.phases["c"] = Phase.Value(f"PHASE_{phase}")
            began = now()
            answers = await asyncio.gather(*(desk.ask_until_told(ready(node, number)) for node in "ab"))
            assert {group(answer) for answer in answers} == {"ab"}
            spent.append(round(now() - began))
        assert spent == [COMING, 0, PATIENCE, COMING, 0]

    at_desk(scene)


def test_who_comes_after_all_is_waited_for_again() -> None:
    async def scene(desk: Desk) -> None:
        desk.roll.phases["c"] = Phase.PHASE_WAITING
        await asyncio.gather(*(desk.ask_until_told(ready(node)) for node in "ab"))
        desk.view = replace(desk.view, state=_state(5))
        late = await desk.ask(ready("c"))
        assert late.verdict == Proposal.VERDICT_BEHIND
        began = now()
        await asyncio.gather(*(desk.ask_until_told(ready(node, 6)) for node in "ab"))
        assert round(now() - began) == COMING

    at_desk(scene)


@pytest.mark.parametrize("says_after", [2.0, 1000.0])
def test_who_has_not_said_where_it_is_reached_gets_a_moment_to_say_so(says_after: float) -> None:
    async def scene(desk: Desk) -> None:
        desk.roll.hidden = {"c"}
        asked = [asyncio.create_task(desk.ask_until_told(ready(node))) for node in "abc"]
        await asyncio.wait(asked, timeout=says_after)
        if not asked[0].done():
            desk.roll.hidden = set()
            desk.roll.changed.notify()
        assert group(await asked[0]) == "abc"
        assert now() == pytest.approx(min(says_after, COMING))

    at_desk(scene)


def test_who_is_not_there_any_more_is_not_waited_for() -> None:
    async def scene(desk: Desk) -> None:
        asked = [desk.ask(ready(node)) for node in "ab"]
        await asyncio.sleep(5)
        assert not any(task.done() for task in asked)
        desk.roll.names.remove("c")
        desk.roll.changed.notify()
        assert group(await asked[0]) == "ab"
        assert now() == pytest.approx(5, abs=0.1)

    at_desk(scene)


def test_the_deadline_follows_what_was_seen() -> None:
    async def scene(desk: Desk) -> None:
        for _ in range(8):
            desk.patience.saw(3.0)
        await asyncio.gather(*(desk.ask_until_told(ready(node)) for node in "ab"))
        assert now() == pytest.approx(3, abs=0.1)

    at_desk(scene)


def test_a_member_that_comes_long_before_the_others_makes_nobody_late() -> None:
    async def scene(desk: Desk) -> None:
        for _ in range(8):
            desk.patience.saw(3.0)
        asked = []
        for node, later in [("a", 30.0), ("b", 1.0), ("c", 0.0)]:
            asked.append(asyncio.create_task(desk.ask_until_told(ready(node))))
            await asyncio.sleep(later)
        async with asyncio.timeout(60):
            assert [group(await task) for task in asked] == ["abc"] * 3

    at_desk(scene)


def test_attempts_after_the_first_teach_no_impatience() -> None:
    """All come back together then, however far apart they end their inner steps."""

    def again(node: str, number: int, attempt: int) -> Ready:
        announced = ready(node, round=number, seen=ballot(attempt - 1))
        announced.nonce = bytes([number, attempt])
        return announced

    async def scene(desk: Desk) -> None:
        for number in range(5, 15):
            desk.view = replace(desk.view, state=_state(number - 1))
            for attempt in range(1, 8):
                asked = []
                for node in "abc":
                    await asyncio.sleep(10 if attempt == 1 else 0)
                    asked.append(asyncio.create_task(desk.ask_until_told(again(node, number, attempt))))
                async with asyncio.timeout(60):
                    await asyncio.gather(*asked)
        assert desk.patience.seconds() > 20

    at_desk(scene)


def test_a_leader_that_misses_many_sites_says_so_in_few_words() -> None:
    """For one whose reason is longer than a message holds would seem lost to its members."""
    names = [f"{number:016x}" for number in range(1000)]
    result = Value(origin=ballot(1, names[0]), digest=b"x" * 32, members=names)

    async def few(desk: Desk) -> None:
        answer = await desk.ask(ready(names[0]))
        assert answer.reason.startswith(f"no majority of the last round's members is here; absent: {names[1]}, ")
        RULES.check(answer)

    async def blocked(desk: Desk) -> None:
        answer = await desk.ask(ready(names[0], voted=result, voted_in=result.origin))
        assert answer.reason.startswith(f"a result may have been committed by sites that are not here: {names[1]}, ")
        RULES.check(answer)

    at_desk(few, node=names[0], present=names[:1], base=names)
    at_desk(blocked, node=names[0], present=names[:1], base=names[:1])


def test_no_majority_no_proposal() -> None:
    async def scene(desk: Desk) -> None:
        answer = await desk.ask(ready("a"))
        assert now() == pytest.approx(POLL, abs=0.1)
        assert answer.verdict == Proposal.VERDICT_WAIT
        assert answer.reason == "no majority of the last round's members is here; absent: b, c"

    at_desk(scene, present="a")


def test_a_result_that_is_missing_is_said_where_the_witness_would_give_the_majority() -> None:
    async def scene(desk: Desk) -> None:
        answer = await desk.ask(voter("a", value("x", "ab"), holds=False))
        assert answer.reason == "a result may have been committed by sites that are not here: b"

    at_desk(scene, present="a", base="ab", witness="w")


def test_members_that_still_train_are_not_called_absent(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(desk: Desk) -> None:
        assert (await desk.ask(ready("a"))).reason == BUSY
        desk.roll.names.remove("c")
        desk.roll.changed.notify()
        assert (await desk.ask(ready("a"))).reason.endswith("absent: c")

    at_desk(scene)
    assert BUSY not in caplog.text


def test_votes_that_were_handed_over_count() -> None:
    async def scene(desk: Desk) -> None:
        heir = ready("a", handovers=[handover("c", "a")])
        heir.votes[:] = ["a", "c"]
        assert group(await desk.ask(heir)) == "a"

    at_desk(scene, present="a")


def handover(giver: str, heir: str, round: int = 4, base: bytes = STATE) -> Signed:
    given = Handover(node=giver, heir=heir, round=round, base=base, votes=[giver])
    return PlainStatements(giver).seal(given)


@pytest.mark.parametrize(
    "shown",
    [[], [handover("c", "b")], [handover("c", "a", round=3)], [handover("c", "a", base=b"?" * 32)]],
    ids=["nothing", "to another", "of another round", "of another state"],
)
def test_votes_that_nobody_handed_over_do_not_count(shown: list[Signed]) -> None:
    async def scene(desk: Desk) -> None:
        thief = ready("a", handovers=shown)
        thief.votes[:] = ["a", "b", "c"]
        assert (await desk.ask(thief)).reason == "no majority of the last round's members is here; absent: b, c"

    at_desk(scene, present="a")


def test_what_nobody_signed_is_refused() -> None:
    async def scene(desk: Desk) -> None:
        forged = sealed(ready("b"))
        forged.statement = ready("b", tokens=7).SerializeToString()
        with pytest.raises(BadMessage, match="has not signed"):
            await desk.leader.gather("b", forged)
        stolen = handover("c", "b")
        stolen.statement = Handover(node="c", heir="b", round=4, votes=["a", "c"]).SerializeToString()
        with pytest.raises(BadMessage, match="has not signed"):
            await desk.ask(ready("b", handovers=[stolen]))

    at_desk(scene)


def test_who_holds_another_state_of_that_round_is_refused() -> None:
    async def scene(desk: Desk) -> None:
        with pytest.raises(BadMessage, match="after round 4 it holds different bits than this site"):
            await desk.ask(ready("b", base=b"?" * 32))

    at_desk(scene)


def test_a_site_that_was_no_member_keeps_nothing_while_a_member_is_alive() -> None:
    async def scene(desk: Desk) -> None:
        answer = await desk.ask(ready("b"))
        assert (answer.verdict, answer.other) == (Proposal.VERDICT_NOT_LEADER, "b")

    at_desk(scene, present="abc", base="bc")


def test_suspects_are_left_out_and_told_so() -> None:
    async def scene(desk: Desk) -> None:
        asked = [desk.ask(ready("a", suspects=["c"])), desk.ask(ready("c")), desk.ask(ready("b"))]
        answers = await asyncio.gather(*asked)
        assert [answer.verdict for answer in answers] == [
            Proposal.VERDICT_GO,
            Proposal.VERDICT_EXCLUDED,
            Proposal.VERDICT_GO,
        ]
        assert group(answers[0]) == "ab"
        assert "could not reach or trust" in answers[1].reason

    at_desk(scene)


def test_suspicions_do_not_cost_the_majority() -> None:
    async def scene(desk: Desk) -> None:
        answer, _ = await asyncio.gather(desk.ask(ready("a", suspects=["b"])), desk.ask(ready("b")))
        assert group(answer) == "ab"

    at_desk(scene, present="ab")


@pytest.mark.parametrize("round", [1, 4])
def test_who_comes_too_late_is_told_where_the_others_are(round: int) -> None:
    async def scene(desk: Desk) -> None:
        answer = await desk.ask(ready("b", round))
        assert (answer.verdict, answer.round, answer.other) == (Proposal.VERDICT_BEHIND, 4, "a")

    at_desk(scene)


def test_a_leader_that_is_behind_keeps_nothing() -> None:
    async def scene(desk: Desk) -> None:
        answer = await desk.ask(ready("b", 6))
        assert (answer.verdict, answer.reason) == (Proposal.VERDICT_NOT_LEADER, BUSY)

    at_desk(scene)


def test_the_lowest_live_id_keeps_unless_the_member_suspects_it() -> None:
    async def scene(desk: Desk) -> None:
        answer = await desk.ask(ready("c"))
        assert (answer.verdict, answer.other) == (Proposal.VERDICT_NOT_LEADER, "a")
        asked = [desk.ask(ready(node, suspects=["a"])) for node in "bc"]
        assert group(await asked[0]) == "bc"

    at_desk(scene, node="b")


def test_members_are_sent_on_as_soon_as_a_better_leader_is_there() -> None:
    async def scene(desk: Desk) -> None:
        asked = desk.ask(ready("c"))
        await asyncio.sleep(3)
        desk.roll.names.insert(0, "a")
        desk.roll.changed.notify()
        assert (await asked).other == "a"
        assert now() < 4

    at_desk(scene, node="b", present="bc")


def test_an_announcement_in_anothers_name_is_refused() -> None:
    async def scene(desk: Desk) -> None:
        with pytest.raises(BadMessage, match="in the name of b"):
            await desk.ask(ready("b"), sender="c")

    at_desk(scene)


def test_a_member_that_lost_the_answer_gets_the_same_one() -> None:
    async def scene(desk: Desk) -> None:
        first = await asyncio.gather(*(desk.ask(ready(node)) for node in "abc"))
        assert await desk.ask(ready("b")) == first[0]
        assert now() < 1, "it is not waited for a new group"
        later = desk.ask(ready("b", nonce=b"new"))
        await asyncio.sleep(1)
        assert not later.done(), "another announcement asks for another attempt"

    at_desk(scene)


def test_asking_again_replaces_the_question() -> None:
    async def scene(desk: Desk) -> None:
        old = desk.ask(ready("b"))
        await asyncio.sleep(1)
        asked = [desk.ask(ready("b", tokens=7)), desk.ask(ready("a")), desk.ask(ready("c"))]
        proposal = await asked[0]
        assert [share.tokens for share in proposal.shares] == [0, 7, 0]
        assert (await old).verdict == Proposal.VERDICT_WAIT

    at_desk(scene)


def test_the_first_exchange_waits_for_all_sites_of_the_run() -> None:
    async def scene(desk: Desk) -> None:
        asked = [desk.ask(ready(node)) for node in "ab"]
        answers = await asyncio.gather(*asked)
        assert {answer.reason for answer in answers} == {"waiting for 1 more of the run's 3 sites"}
        answers = await asyncio.gather(*(desk.ask(ready(node)) for node in "abc"))
        assert group(answers[0]) == "abc"

    at_desk(scene, present="ab", base="a", sites=3)


def test_a_result_that_may_be_committed_is_finished_by_fewer() -> None:
    async def scene(desk: Desk) -> None:
        result = value("x", "abc")
        answers = await asyncio.gather(desk.ask(voter("a", result)), desk.ask(ready("b")))
        assert group(answers[0]) == "ab"
        assert answers[0].adopt == result
        assert list(answers[0].holders) == ["a"]
        assert answers[0].ballot == ballot(2)

    at_desk(scene, present="ab", sites=3)


def test_a_result_that_is_held_elsewhere_blocks() -> None:
    async def scene(desk: Desk) -> None:
        result = value("x", "abc")
        asked = [desk.ask(voter(node, result, holds=False)) for node in "ab"]
        answer = await asked[0]
        assert answer.verdict == Proposal.VERDICT_WAIT
        assert answer.reason == "a result may have been committed by sites that are not here: c"
        again = [desk.ask(voter(node, result, holds=node == "c")) for node in "abc"]
        assert (await again[0]).adopt == result

    at_desk(scene, present="ab")


def test_a_new_round_starts_from_nothing() -> None:
    async def scene(desk: Desk) -> None:
        old = desk.ask(ready("b"))
        await asyncio.sleep(1)
        desk.view = replace(desk.view, state=_state(5))
        desk.roll.changed.notify()
        assert (await old).verdict == Proposal.VERDICT_BEHIND
        answers = await asyncio.gather(*(desk.ask(ready(node, 6)) for node in "abc"))
        assert (group(answers[0]), answers[0].round) == ("abc", 6)

    at_desk(scene)
