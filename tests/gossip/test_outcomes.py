"""How meetings ended, for those who were left without an answer: a decides, b asks."""

from __future__ import annotations

import asyncio

import pytest
from gossip.cases import PairMember, acquainted, hold_at, scene
from rounds.cases import CALM, outer_state
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.gossip.pair_commit import Doubt, Records
from pier_node.gossip.pair_rounds import FOLLOW
from pier_node.wire.carrier import SETTLE, PeerRefused
from pier_proto.v1.peer_pb2 import SettleReply, SettleRequest

Outcome = SettleReply.Outcome
DOUBT = Doubt(3, "a", b"m" * 32, b"d" * 32)


def met_again(a_round: int, b_round: int, partners: dict[int, str], b_members: str = "b") -> dict[str, PairMember]:
    """a, with these records, and b, which is in doubt about round 3; b asks."""
    sites: dict[str, PairMember] = {}

    async def main() -> None:
        network = Network(1, CALM)
        sites["a"] = PairMember(network, "a", outer_state("a", round=a_round), records=Records(partners))
        state = outer_state(tuple(b_members), round=b_round)
        sites["b"] = PairMember(network, "b", state, records=Records().voted(DOUBT))
        for site in sites.values():
            site.meet("a", "b")
        await acquainted(sites)
        await sites["b"].pairs.resolve()
        sources.update({node: site.pairs.sources() for node, site in sites.items()})
        await asyncio.sleep(FOLLOW)
        assert not any(site.pairs._outcomes.source for site in sites.values()), "nobody tries for ever"

    sources.clear()
    run(main())
    return sites


sources: dict[str, list[str]] = {}


def test_a_step_that_was_not_taken_is_no_doubt_any_more() -> None:
    sites = met_again(5, 4, partners={4: "b", 2: "b"})
    assert not sites["b"].journal.records.doubts
    assert sources == {"a": [], "b": []}


@pytest.mark.parametrize(("a_round", "b_round"), [(3, 3), (7, 4), (3, 2)])
def test_who_was_in_doubt_takes_the_state_of_a_decider_that_is_not_behind(a_round: int, b_round: int) -> None:
    sites = met_again(a_round, b_round, partners={3: "b"})
    assert sources == {"a": [], "b": ["a"]}
    assert sites["b"].journal.records.doubts, "until it has it"


def test_a_site_that_goes_on_from_another_state_is_not_in_doubt_after_a_restart_either() -> None:
    async def main() -> None:
        b = PairMember(Network(1, CALM), "b", outer_state("b", round=4), records=Records({2: "a"}).voted(DOUBT))
        await b.pairs.adopt(outer_state("a", round=7))
        assert b.tools.records == b.journal.records == Records({2: "a"})

    run(main())


def test_a_decider_that_is_behind_takes_the_state_of_who_went_on() -> None:
    sites = met_again(3, 5, partners={3: "b"})
    assert sources == {"a": ["b"], "b": []}
    assert not sites["b"].journal.records.doubts


def test_a_voter_that_had_the_answer_before_it_went_down_needs_nothing() -> None:
    sites = met_again(3, 3, partners={3: "b"}, b_members="ab")
    assert sources == {"a": [], "b": []}
    assert sites["b"].journal.records == Records({3: "a"})


def test_a_decider_that_went_down_after_it_saved_knows_by_its_state() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        a = sites["a"]
        a.pairs.state, a.pairs.saved = outer_state("ab", round=3), 3
        request = SettleRequest(round=3, meeting=b"m" * 32, yes=True, digest=b"d" * 32)
        reply = await sites["b"].carrier.call("a", SETTLE, request, 5.0)
        assert (reply.outcome, reply.at) == (Outcome.OUTCOME_COMMITTED, 3)
        a.pairs.saved = 2
        reply = await sites["b"].carrier.call("a", SETTLE, request, 5.0)
        assert reply.outcome == Outcome.OUTCOME_REFUSED, "what is not on the disk did not happen"

    scene(play)


def test_a_decider_that_went_down_after_it_saved_still_knows_it_rounds_later() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        a = PairMember(network, "a", outer_state("ab", round=3))  # it went down before it wrote its record
        b = PairMember(network, "b", outer_state("b", round=3), records=Records().voted(DOUBT))
        for site in (a, b):
            site.meet("a", "b")
        await acquainted({"a": a, "b": b})
        await a.pairs.resolve()
        a.pairs.state, a.pairs.saved = outer_state("a", round=4), 4  # its next step
        await b.pairs.resolve()
        assert b.pairs.sources() == ["a"]

    run(main())


def test_only_the_other_one_may_ask() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        request = SettleRequest(round=3, meeting=b"m" * 32)
        with pytest.raises(PeerRefused, match="the one that decides"):
            await sites["a"].carrier.call("b", SETTLE, request, 5.0)
        reply = await sites["c"].carrier.call("a", SETTLE, request, 5.0)
        assert reply.outcome == Outcome.OUTCOME_REFUSED

    scene(play, "abc")


def test_a_question_while_it_is_decided_waits_for_the_decision() -> None:
    saving = asyncio.Event()

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        sites["a"].bring(0.1)
        task = sites["b"].bring(0.3)
        await sites["a"].tools.news.until(lambda: sites["a"].pairs.state.round == 1)
        asyncio.get_running_loop().call_later(25.0, saving.set)
        assert (await task).members == ("a", "b"), "a disk may take longer than a question is held open"
        assert asyncio.get_running_loop().time() > 25

    scene(play, a=hold_at("committed", saving))


def test_a_decider_that_does_not_live_is_not_asked() -> None:
    async def main() -> None:
        b = PairMember(Network(1, CALM), "b", outer_state("b", round=4), records=Records().voted(DOUBT))
        b.meet("a")
        await b.pairs.resolve()
        assert asyncio.get_running_loop().time() < 0.1
        assert b.journal.records.doubts

    run(main())
