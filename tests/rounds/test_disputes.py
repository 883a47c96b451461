"""Two histories of one run: sites find the first round that differs, and put out who voted on both sides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from rounds.cases import CALM, Member, acquainted, link, outer_state
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.rounds.disputes import FIRST_PAUSE, LAST_PAUSE, LOOK
from pier_proto.v1.peer_pb2 import DoubleVote, Link


def digest(round: int, side: str) -> bytes:
    return f"{round:03}{side}".encode() * 8


def history(side: str, fork: int, last: int, before: str, after: str) -> list[Link]:
    """The links of a run that was at one until the round `fork`."""
    links = []
    for round in range(last + 1):
        base = digest(round - 1, side if round > fork else "-")
        members = after if round >= fork else before
        links.append(link(round, base, digest(round, side if round >= fork else "-"), members))
    return links


@dataclass
class Scene:
    """Sites a and b that are on two sides of what was a partition; l was on both."""

    network: Network = field(default_factory=lambda: Network(1, CALM))
    convicted: dict[str, list[str]] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    def site(self, name: str, links: list[Link], unheld: int = 0) -> None:
        """Add a site that holds the state of all its links but the last `unheld` ones."""
        last = links[len(links) - 1 - unheld]
        state = outer_state("".join(last.members), round=last.round)
        vars(state)["digest"] = bytes(last.digest)
        self.convicted[name] = []
        member = self.members[name] = Member(self.network, name, state)
        member.rounds.disputes._convict = self._noting(name)
        member.rounds.disputes._proofs.add(links)

    def _noting(self, name: str) -> Callable[[DoubleVote], None]:
        return lambda proof: self.convicted[name].append(proof.one.node)

    async def meet(self) -> None:
        for member in self.members.values():
            member.meet(*self.members)
            member.carrier.spawn(member.rounds.run())
        await acquainted(self.members)


@pytest.mark.parametrize(("ours", "theirs"), [(9, 9), (9, 30), (30, 9), (400, 30)])
def test_who_voted_on_both_sides_is_found_on_both(ours: int, theirs: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        scene = Scene()
        scene.site("a", history("a", 7, ours, "abl", "al"))
        scene.site("b", history("b", 7, theirs, "abl", "bl"))
        await scene.meet()
        await asyncio.sleep(60)
        assert {"l"} == {*scene.convicted["a"], *scene.convicted["b"]}
        if ours == theirs:
            assert scene.convicted["a"]
            assert scene.convicted["b"]

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "round 7 was committed twice" in caplog.text
    assert "l voted for both" in caplog.text


def test_a_link_whose_state_was_lost_before_it_was_held_is_no_history(caplog: pytest.LogCaptureFixture) -> None:
    """Found by the hunt, seed 602502: a crash after the link was written and before the state was, everywhere."""

    async def main() -> None:
        scene = Scene()
        scene.site("a", history("a", 9, 9, "abl", "al"), unheld=1)
        scene.site("b", history("b", 9, 9, "abl", "bl"))
        await scene.meet()
        await asyncio.sleep(60)
        assert scene.convicted["a"] == []

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "committed twice" not in caplog.text


def test_a_digest_without_a_proof_convicts_nobody_and_is_asked_about_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        scene = Scene()
        scene.site("a", history("a", 7, 9, "abl", "abl"))
        scene.site("b", history("-", 0, 9, "z", "z"))
        await scene.meet()
        await asyncio.sleep(3 * LAST_PAUSE)
        assert scene.convicted == {"a": [], "b": []}
        pause = scene.members["a"].rounds.disputes._pauses["b"]
        assert pause.seconds == LAST_PAUSE
        assert pause.until > asyncio.get_running_loop().time() - LOOK - FIRST_PAUSE

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "committed twice" not in caplog.text


def test_sites_of_one_history_are_not_asked() -> None:
    async def main() -> None:
        scene = Scene()
        scene.site("a", history("-", 0, 9, "ab", "ab"))
        scene.site("b", history("-", 0, 9, "ab", "ab"))
        await scene.meet()
        await asyncio.sleep(60)
        assert scene.members["a"].rounds.disputes._pauses == {}

    run(main())
