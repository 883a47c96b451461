"""A member that lies changes no weight and stops nobody: what it sends is refused, and the others are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes.rogue import Lie, Rogue, astray
from processes.run import ENDLESS, Found, Run
from processes.site import Site

from pier_node.outer.mean import Update
from pier_node.rounds.double_votes import VOTED_TWICE
from pier_node.rounds.roster import HEARSAY_PER_PEER

pytestmark = pytest.mark.processes

ROUNDS = 3
"""That the honest sites commit while it goes on."""
STREAMS = 10_000


Attack = Callable[[Rogue], Coroutine[Any, Any, None]]


def bring(value: float, kind: type[Update] = Lie) -> Attack:
    def attack(rogue: Rogue) -> Coroutine[Any, Any, None]:
        vector = np.full(rogue.length, value, np.float32)
        return rogue.take_part(kind(vector, tokens=1000), astray)

    return attack


def cut_short(rogue: Rogue) -> Coroutine[Any, Any, None]:
    rogue.cut_short()
    return bring(0.0)(rogue)


ATTACKS: dict[str, tuple[Attack, str]] = {
    "NaN": (bring(float("nan")), "not finite"),
    "Inf": (bring(float("inf")), "not finite"),
    "1e30": (bring(1e30), "its norm is above"),
    "longer than announced": (bring(1.0), "its norm is above"),
    "half of each chunk": (cut_short, "bytes for"),
}


def refuses(
    run: Run, rogue: Rogue, attack: Coroutine[Any, Any, None], until: Callable[[], bool] = lambda: True
) -> None:
    """The honest sites go on while a rogue does this."""

    async def main() -> None:
        async with rogue.in_the_run():
            attacking = asyncio.create_task(attack)
            for site in run.sites:
                await asyncio.to_thread(site.reach, site.round + ROUNDS)
            await asyncio.to_thread(run.sites[0].wait, "does what it must", until)
            assert not attacking.done() or attacking.exception() is None
            attacking.cancel()
            await asyncio.wait([attacking])

    asyncio.run(main())


@pytest.fixture
def run(found: Found) -> Run:
    """Two honest sites at work."""
    run = found(2, inner=ENDLESS)
    run.start()
    for site in run.sites:
        site.reach(2)
    return run


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_member_makes_up_gets_into_no_round(run: Run, tmp_path: Path, name: str) -> None:
    attack, complaint = ATTACKS[name]
    rogue = Rogue(run, tmp_path / "rogue")
    refuses(run, rogue, attack(rogue))
    for site in run.sites:
        assert complaint in site.output
        assert all(rogue.carrier.node not in event["members"] for event in site.events())
        assert site.status()["loss"] < 10
    run.stop()


def test_who_votes_for_other_bits_cannot_make_the_others_do_so(run: Run, tmp_path: Path) -> None:
    rogue = Rogue(run, tmp_path / "rogue")
    refuses(run, rogue, bring(0.0, Update)(rogue))
    for site in run.sites:
        assert "voted for a different result than ours" in site.output
    run.stop()


def test_a_member_that_votes_twice_is_put_out_by_all(run: Run, tmp_path: Path) -> None:
    """One site has the two votes; the other hears of them, and both go on without the liar."""
    rogue, first = Rogue(run, tmp_path / "rogue"), run.by_node[0]
    refuses(run, rogue, rogue.vote_twice(first.node), until=lambda: all(VOTED_TWICE in it.output for it in run.sites))
    assert any(rogue.carrier.node in event["members"] for site in run.sites for event in site.events())
    for site in run.sites:
        site.reach(site.round + ROUNDS)
        assert rogue.carrier.node not in site.events()[-1]["members"]
    run.check()
    run.stop()


@pytest.mark.parametrize("rounds", [5, 1 << 40])
def test_nobody_follows_who_says_that_it_is_ahead(run: Run, tmp_path: Path, rounds: int) -> None:
    refuses(run, rogue := Rogue(run, tmp_path / "rogue"), rogue.boast(rounds))
    for site in run.sites:
        assert "catching up" not in site.output
    run.stop()


def test_forged_votes_decide_nothing(run: Run, tmp_path: Path) -> None:
    """A stranger with the lowest id answers each site with a group of itself, and claims everybody's votes."""
    refuses(run, rogue := Rogue(run, tmp_path / "rogue"), rogue.forge(run))
    assert not rogue.proposed, "nobody asks a stranger what to do while a member is there"
    for site in run.sites:
        assert all(rogue.carrier.node not in event["members"] for event in site.events())
    run.check()
    run.stop()


def test_an_invented_state_is_asked_for_its_proof_and_not_adopted(run: Run, tmp_path: Path) -> None:
    refuses(run, rogue := Rogue(run, tmp_path / "rogue"), rogue.invent(5000))
    assert rogue.asked_for_proof
    for site in run.sites:
        assert "catching up" not in site.output
        assert site.round < 5000
        assert "has not proved yet that it is ahead" in site.output
    run.stop()


def test_ghosts_are_taken_in_small_number_and_stop_nobody(run: Run, tmp_path: Path) -> None:
    rogue = Rogue(run, tmp_path / "rogue")

    def ghosts(site: Site) -> int:
        return sum(peer["name"].startswith("ghost") for peer in site.status().get("peers", []))

    def haunted(site: Site) -> bool:
        return ghosts(site) > 0

    async def attack() -> None:
        telling = asyncio.create_task(rogue.name_ghosts(1000))
        for site in run.sites:
            await asyncio.to_thread(site.wait, "hears of ghosts", partial(haunted, site))
        await telling

    refuses(run, rogue, attack())
    for site in run.sites:
        assert ghosts(site) <= HEARSAY_PER_PEER
    run.stop()


def test_votes_that_are_replayed_and_streams_that_never_end_change_nothing(run: Run, tmp_path: Path) -> None:
    rogue, victim = Rogue(run, tmp_path / "rogue"), run.sites[0]
    refuses(run, rogue, rogue.replay(victim.node, votes=500))
    memory = victim.daemon.memory_info().rss
    rogue = Rogue(run, tmp_path / "rogue")
    refuses(run, rogue, rogue.half_a_message(victim.node, STREAMS))
    assert victim.daemon.memory_info().rss < memory + (256 << 20)
    run.stop()
