"""Who has standing in a run of pairs: chains of vouches, how far the run is, and what strangers reach."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise

import pytest
from gossip.cases import LAST, PairMember, acquainted
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import CALM, outer_state
from simulation.network import Network
from simulation.pair_cluster import PairCluster, config
from simulation.statements import M, PlainStatements
from simulation.virtual_time import run

from pier_node.gossip.pair_rounds import PairRounds
from pier_node.gossip.standing import Standing, leads
from pier_node.rounds.roster import Roster
from pier_node.wire.bounds import VOUCHES
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Phase, Pulse, Signed, Site, Vouch


def vouch(by: str, partner: str, round: int = 1) -> Signed:
    return PlainStatements(by).seal(Vouch(node=by, partner=partner, round=round))


def chain(names: str) -> list[Signed]:
    """Each of these vouches for the next."""
    return [vouch(by, partner) for by, partner in pairwise(names)]


READER = PlainStatements("reader")


@given(st.permutations("bcdefgh"), st.integers(1, 7))
def test_a_chain_leads_from_the_founder_to_its_end_and_nowhere_else(names: list[str], length: int) -> None:
    path = "a" + "".join(names[:length])
    assert leads("a", path[-1], chain(path), READER)
    for other in "abcdefgh":
        assert leads("a", other, chain(path), READER) == (other == path[-1])
        assert not leads(other, path[-1], chain(path), READER) or other == "a"


@given(st.permutations("bcdef"), st.data())
def test_no_chain_with_a_link_that_is_missing_forged_or_of_another(names: list[str], data: st.DataObject) -> None:
    whole = chain("a" + "".join(names))
    at = data.draw(st.integers(0, len(whole) - 1))
    assert not leads("a", names[-1], whole[:at] + whole[at + 1 :], READER)
    forged = Signed(node=whole[at].node, statement=whole[at].statement, public=b"key", signature=b"another's")
    assert not leads("a", names[-1], [*whole[:at], forged, *whole[at + 1 :]], READER)
    assert not leads("a", names[-1], [*whole[:at], vouch("z", names[at]), *whole[at + 1 :]], READER)


def test_nobody_has_standing_by_nothing() -> None:
    assert not leads("a", "a", [], READER)
    assert not leads("a", "b", [], READER)


def members(network: Network, names: str, founder: str, **rounds: int) -> dict[str, PairMember]:
    sites = {
        node: PairMember(network, node, outer_state(node, round=rounds.get(node, 0)), founder=founder) for node in names
    }
    for site in sites.values():
        site.meet(*names)
    return sites


def vouched(site: PairMember, names: str) -> None:
    """Give a site the standing that these vouches make."""
    site.tools.records = replace(site.tools.records, vouches=chain(names))


def test_whoever_takes_a_step_with_a_site_that_has_standing_has_it_too_even_after_a_crash() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        sites = members(network, "abcd", founder="c")
        await acquainted(sites)
        assert [node for node in sites if sites["a"].tools.standing.has(node)] == ["c"]
        for _ in range(6):
            await asyncio.gather(*(site.bring(0.1) for site in sites.values()))
            await asyncio.sleep(3.0)
        for site in sites.values():
            assert all(map(site.tools.standing.has, sites))
            assert leads("c", site.node, site.journal.records.vouches, READER) == (site.node != "c"), "on its disk"

    run(main())


def test_sites_without_standing_give_none() -> None:
    async def main() -> None:
        sites = members(Network(1, CALM), "ab", founder="z")
        await acquainted(sites)
        await asyncio.gather(*(site.bring(0.1) for site in sites.values()))
        assert all(site.pairs.state.members == ("a", "b") for site in sites.values()), "they meet all the same"
        await asyncio.sleep(3.0)
        assert not any(site.tools.standing.has(node) for site in sites.values() for node in sites)
        assert sites["a"].tools.standing.peers() == {}

    run(main())


def test_a_shorter_chain_replaces_a_longer_one_and_a_bad_one_is_refused() -> None:
    async def main() -> None:
        sites = members(Network(1, CALM), "abc", founder="a")
        vouched(sites["b"], "axyb")
        vouched(sites["c"], "ac")
        await acquainted(sites)
        await asyncio.sleep(3.0)
        standing = sites["b"].tools.standing
        better = standing.better("c", vouch("c", "b"))
        assert better is not None
        assert len(better) == 2
        assert standing.better("a", vouch("a", "b")) == [vouch("a", "b")]
        assert sites["c"].tools.standing.better("b", vouch("b", "c")) is None, "it would be longer"
        assert sites["a"].tools.standing.better("b", vouch("b", "a")) is None, "the founder needs none"
        vouched(sites["b"], "")
        with pytest.raises(BadMessage, match="no standing"):
            standing.better("c", vouch("a", "b"))

    run(main())


def test_the_last_of_a_long_chain_vouches_for_nobody() -> None:
    async def main() -> None:
        site = members(Network(1, CALM), "z", founder="a")["z"]
        vouched(site, "a" + "bcdefghi"[: VOUCHES - 2] + "z")
        assert site.tools.standing.vouch("y", 3) is not None
        vouched(site, "a" + "bcdefghi"[: VOUCHES - 1] + "z")
        assert site.tools.standing.has("z")
        assert site.tools.standing.vouch("y", 3) is None

    run(main())


def test_whoever_was_vouched_for_by_a_site_that_is_put_out_loses_its_standing() -> None:
    async def main() -> None:
        sites = members(Network(1, CALM), "abc", founder="a")
        vouched(sites["b"], "ab")
        vouched(sites["c"], "axc")
        await acquainted(sites)
        await asyncio.sleep(3.0)
        standing = sites["a"].tools.standing
        assert [*standing.peers()] == ["b", "c"]
        sites["a"].roster.bar(["x"], "was revoked")
        assert [*standing.peers()] == ["b"]

    run(main())


class Counting(PlainStatements):
    """Counts what it reads."""

    reads = 0

    def read(self, kind: type[M], signed: Signed) -> M:
        self.reads += 1
        return super().read(kind, signed)


def test_a_chain_that_changes_all_the_time_is_read_once_a_second() -> None:
    async def main() -> None:
        sites = members(Network(1, CALM), "ab", founder="z")
        await acquainted(sites)
        contact, statements = sites["a"].roster.contacts["b"], Counting("a")
        standing = Standing(sites["a"].roster, "z", statements)
        for number in range(100):
            contact.pulse = stranger("b")
            contact.pulse.vouches.extend([vouch("z", "x", number), vouch("y", "b", number)])
            assert not standing.has("b")
        assert statements.reads == 2
        await asyncio.sleep(2.0)
        contact.pulse = stranger("b")
        contact.pulse.vouches.append(vouch("z", "b"))
        assert standing.has("b")

    run(main())


def test_without_a_founder_all_have_standing() -> None:
    async def main() -> None:
        sites = members(Network(1, CALM), "ab", founder="")
        await acquainted(sites)
        assert [*sites["a"].tools.standing.peers()] == ["b"]
        assert sites["a"].tools.standing.vouch("b", 1) is None

    run(main())


@pytest.mark.parametrize(
    ("rounds", "reached"), [({}, 0), ({"b": 7}, 7), ({"b": 7, "c": 9}, 7), ({"b": 7, "c": 9, "d": 5000}, 9)]
)
def test_the_run_is_as_far_as_half_of_the_others_are(rounds: dict[str, int], reached: int) -> None:
    async def main() -> None:
        sites = members(Network(1, CALM), "a" + "".join(rounds), founder="", **rounds)
        await acquainted(sites)
        assert sites["a"].tools.standing.reached() == (reached if rounds else -1)

    run(main())


def stranger(node: str, round: int = LAST) -> Pulse:
    digest = bytes([ord(node[-1])]) * 32
    return Pulse(site=Site(node=node, address="sim"), phase=Phase.PHASE_WAITING, round=round, digest=digest)


@pytest.mark.thorough
def test_strangers_that_claim_the_last_round_move_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A founder, three newcomers and ten strangers that never come to a meeting: no site takes a state or a round of
    theirs, and once the newcomers have standing the strangers cost no more than a pair in every other round."""
    rounds = 8
    cluster = PairCluster(config(4, rounds=rounds, adaptive_steps=False), ["a1", "b2", "c3", "d4"], 3, founder="c3")
    cluster.paces = dict.fromkeys(cluster.names, 0.5)
    strangers = [f"s{number}" for number in range(10)]

    async def main() -> None:
        for node in strangers:
            Roster(cluster.network.join(node), lambda node=node: stranger(node))  # type: ignore[misc]
        for name in cluster.names:
            cluster.boot(name)
            for node in strangers:
                cluster.nodes[name].roster.add(Site(node=node, address="sim"))
        await cluster.settle(cluster.names, 6 * 3600.0)
        pairs = cluster.nodes["a1"].rounds
        assert isinstance(pairs, PairRounds)
        assert all(map(pairs.standing.has, cluster.names))
        assert not any(map(pairs.standing.has, strangers))

    caplog.set_level(logging.CRITICAL)
    run(main())
    assert not cluster.adopted
    for name in cluster.names:
        assert [*cluster.steps[name]][:4] == [1, 2, 3, 4]
    steps = [step for by_round in cluster.steps.values() for number, step in by_round.items() if number > 4]
    assert sum(len(step.after.members) == 2 for step in steps) >= len(steps) / 2
