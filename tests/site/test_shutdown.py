"""A vote is in one hand at a time: whatever is lost or refused on the way, nobody can vote twice with it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from simulation.network import Network, SimCarrier, Weather
from simulation.statements import MemoryProofs, PlainStatements
from simulation.virtual_time import run

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.attempt import Tools
from pier_node.rounds.commitments import Given
from pier_node.rounds.member import Rounds
from pier_node.rounds.quorum import carried
from pier_node.rounds.roster import Roster
from pier_node.site.journal import Journal
from pier_node.site.shutdown import TIMEOUT, Leave
from pier_node.wire.carrier import LEAVE, PeerRefused
from pier_proto.v1.peer_pb2 import Ballot, Handover, LeaveRequest, Phase, Pulse, Site

NAMES = ("a", "b", "c")


class Member:
    """A site at rest after round 0, with everything but training."""

    def __init__(self, network: Network, name: str, folder: Path, committed: int = 0, pairs: bool = False) -> None:
        self.carrier: SimCarrier = network.join(name)
        tensors = {ANCHOR: SharedVector(4), MOMENTUM: SharedVector(4)}
        state = OuterState(committed, NAMES, tensors, {})

        def pulse() -> Pulse:
            site = Site(node=name, address="sim")
            return Pulse(site=site, phase=Phase.PHASE_WAITING, round=committed, digest=state.digest)

        self.roster = Roster(self.carrier, pulse)
        journal = Journal(folder / f"{name}.json")
        statements = PlainStatements(name)
        tools = Tools(self.carrier, self.roster, statements, journal, MemoryProofs(), _nowhere, _nobody)
        self.rounds = Rounds(tools, state, lambda _: len(state.anchor))
        self.leave = Leave(self.carrier, self.roster, None if pairs else self.rounds)

    @property
    def votes(self) -> set[str]:
        return set(self.rounds.promises.votes)

    async def meet(self) -> None:
        for name in NAMES:
            self.roster.add(Site(node=name, address="sim"))
        await self.roster.settled()


async def _nowhere(state: OuterState) -> None:
    raise AssertionError("nothing is committed here")


async def _nobody(*_: Any) -> OuterState:
    raise AssertionError("nothing is adopted here")


def in_virtual_time(test: Callable[[Network, Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def wrapped(tmp_path: Path) -> None:
        async def main() -> None:
            await test(Network(1, Weather()), tmp_path)

        run(main())

    return wrapped


async def members(network: Network, folder: Path) -> dict[str, Member]:
    found = {name: Member(network, name, folder) for name in NAMES}
    await asyncio.gather(*(member.meet() for member in found.values()))
    return found


@in_virtual_time
async def test_the_first_live_peer_inherits(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    await sites["a"].leave.leave()
    assert [sites[name].votes for name in NAMES] == [set(), {"a", "b"}, {"c"}]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def refusing(*_: Any) -> None:
    raise PierError("No space left on device", "")


@in_virtual_time
async def test_votes_that_cannot_be_written_down_are_not_given(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pier_node.site.journal.replace", full_disk)
        await sites["a"].leave.leave()
    assert [sites[name].votes for name in NAMES] == [{"a"}, {"b"}, {"c"}]


@in_virtual_time
async def test_votes_for_an_heir_with_a_full_disk_go_to_nobody_else(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sites["b"].rounds, "take_votes", refusing)
        await sites["a"].leave.leave()
    assert [sites[name].votes for name in NAMES] == [set(), {"b"}, {"c"}]
    assert sites["a"].rounds.promises.now.given == (Given("b", frozenset("a")),), "what was signed cannot be taken back"


@in_virtual_time
async def test_the_others_do_not_wait_for_one_that_left(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    await sites["a"].leave.leave()
    assert not sites["b"].roster.alive("a")
    assert not sites["c"].roster.alive("a")


@in_virtual_time
async def test_votes_go_on_to_the_next_heir(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    await sites["a"].leave.leave()
    network.crash("a")
    await sites["b"].leave.leave()
    assert sites["b"].votes == set()
    assert sites["c"].votes == {"a", "b", "c"}
    shown = [PlainStatements("c").read(Handover, it) for it in sites["c"].rounds.handovers()]
    assert carried("c", shown) == {"a", "b", "c"}, "through two hands, both shown"


@in_virtual_time
async def test_when_all_leave_at_once_everybody_keeps_its_vote(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    await asyncio.gather(*(site.leave.leave() for site in sites.values()))
    assert [sites[name].votes for name in NAMES] == [{"a"}, {"b"}, {"c"}]


@in_virtual_time
async def test_an_answer_that_got_lost_counts_as_given(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    inherit = sites["b"].rounds.take_votes

    async def inherited(*votes: Any) -> None:
        await inherit(*votes)
        network.weather.loss = 1.0

    sites["b"].rounds.take_votes = inherited  # type: ignore[method-assign,assignment]
    await sites["a"].leave.leave()
    assert [sites[name].votes for name in NAMES] == [set(), {"a", "b"}, {"c"}]


@in_virtual_time
async def test_who_gets_no_answer_from_an_heir_before_anything_is_given_keeps_its_votes(
    network: Network, folder: Path
) -> None:
    sites = await members(network, folder)
    network.weather.loss = 1.0
    await sites["a"].leave.leave()
    assert sites["a"].votes == {"a"}


@in_virtual_time
async def test_a_silent_peer_is_waited_for_once(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    network.severed.add(frozenset("ab"))
    began = asyncio.get_running_loop().time()
    await sites["a"].leave.leave()
    assert sites["c"].votes == {"a", "c"}
    assert asyncio.get_running_loop().time() - began < 1.5 * TIMEOUT


@in_virtual_time
async def test_an_heir_that_falls_silent_is_waited_for_once(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    give, began = sites["a"].rounds.give_votes, asyncio.get_running_loop().time()

    async def give_and_lose_the_line(heir: str) -> frozenset[str]:
        network.severed.add(frozenset("ab"))
        return await give(heir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sites["a"].rounds, "give_votes", give_and_lose_the_line)
        await sites["a"].leave.leave()
    assert asyncio.get_running_loop().time() - began < 1.5 * TIMEOUT


@in_virtual_time
async def test_votes_that_never_arrived_count_where_giver_and_heir_meet(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sites["b"].rounds, "take_votes", refusing)
        await sites["a"].leave.leave()

    def by(group: str) -> frozenset[str]:
        told = [it for name in group for it in sites[name].rounds.handovers()]
        return carried(group, [PlainStatements("").read(Handover, it) for it in told])

    assert by("abc") == {"a", "b", "c"}
    assert by("bc") == {"b", "c"}
    assert by("ac") == {"c"}


@in_virtual_time
async def test_an_heir_at_another_round_refuses(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    later = Handover(node="a", heir="b", round=3, base=b"l" * 32, votes=["a"])
    request = LeaveRequest(node="a", handovers=[PlainStatements("a").seal(later)])
    for asked in (request, LeaveRequest(node="a", asks=b"l" * 32)):
        with pytest.raises(PeerRefused, match="it is at round 0"):
            await sites["a"].carrier.call("b", LEAVE, asked, 5.0)
    assert sites["b"].votes == {"b"}


@in_virtual_time
async def test_both_sides_remember_across_a_restart(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    await sites["a"].leave.leave()
    for name in NAMES:
        network.crash(name)
    assert Member(network, "a", folder).votes == set()
    assert Member(network, "b", folder).votes == {"a", "b"}


@in_virtual_time
async def test_who_takes_part_in_an_attempt_keeps_its_votes(network: Network, folder: Path) -> None:
    """The heir would not know of the attempt, and could decide another result than those who are in it."""
    sites = await members(network, folder)
    await sites["a"].rounds.promises.promise(Ballot(number=1, leader="a"), {"a"})
    await sites["a"].leave.leave()
    assert [sites[name].votes for name in NAMES] == [{"a"}, {"b"}, {"c"}]


@in_virtual_time
async def test_what_was_kept_for_another_round_is_void(network: Network, folder: Path) -> None:
    sites = await members(network, folder)
    await sites["a"].leave.leave()
    network.crash("b")
    assert Member(network, "b", folder, committed=1).votes == {"b"}


@in_virtual_time
async def test_a_torn_file_gives_no_vote(network: Network, folder: Path) -> None:
    (folder / "a.json").write_text("{")
    assert Member(network, "a", folder).votes == set()


@in_virtual_time
async def test_without_votes_a_site_only_says_goodbye(network: Network, folder: Path) -> None:
    """In a run in pairs nobody has any."""
    leaver, other = (Member(network, name, folder, pairs=True) for name in ("a", "b"))
    await leaver.meet()
    await other.meet()
    assert other.roster.alive("a")
    await leaver.leave.leave()
    assert not other.roster.alive("a")
    assert leaver.votes == {"a"}, "not given to anybody"


@in_virtual_time
async def test_a_handover_is_taken_once_though_later_ones_are_shown_with_it(network: Network, folder: Path) -> None:
    """a gives to b, who gives all to c; a is back, inherits, and gives to b again: its old vote is with c."""
    sites = await members(network, folder)
    for giver, heir in (("a", "b"), ("b", "c"), ("c", "a"), ("a", "b")):
        leave, rounds = sites[giver].leave, sites[giver].rounds
        if giver == "c":  # not the votes that it has, but its own alone: as if it had inherited after its handover
            continue
        assert await leave.hand_to(heir, rounds)
    assert [sites[name].votes for name in NAMES] == [set(), set(), {"a", "b", "c"}]


@in_virtual_time
async def test_an_heir_takes_no_more_than_it_can_announce(network: Network, folder: Path) -> None:
    """Or else its own announcements would be refused, and its votes lost."""
    sites = await members(network, folder)
    b = PlainStatements("b")
    own = [b.seal(Handover(node="b", heir="a", round=0, base=b"s" * 32, votes=["b"], number=it)) for it in range(40)]
    await sites["b"].rounds.promises.take(0, ["b"], own)
    await sites["a"].leave.leave()
    assert sites["c"].votes == {"a", "c"}
    call = sites["a"].carrier.call
    base = sites["b"].rounds.base
    handed = PlainStatements("a").seal(Handover(node="a", heir="b", round=0, base=base, votes=["a"], number=1))
    with pytest.raises(PeerRefused, match="could not name all of these handovers"):
        await call("b", LEAVE, LeaveRequest(node="a", handovers=[handed, *own]), 1.0)
