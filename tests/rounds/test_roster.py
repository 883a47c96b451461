from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from simulation.network import Network, SimCarrier, Weather
from simulation.virtual_time import run

from pier_node.rounds.roster import FAILURES, QUESTIONS, Roster
from pier_node.wire.carrier import BEAT
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

WAITING, TRAINING = Phase.PHASE_WAITING, Phase.PHASE_TRAINING


class Friend:
    """A site that says of itself what a test wants."""

    def __init__(self, network: Network, node: str, round: int = 0, phase: Phase.ValueType = WAITING) -> None:
        self.node, self.round, self.phase = node, round, phase
        self.carrier: SimCarrier = network.join(node)
        self.introduced: list[tuple[str, str]] = []
        self.carrier.introduce = lambda node, address: self.introduced.append((node, address))  # type: ignore[method-assign]
        self.roster = Roster(self.carrier, self.pulse)

    def pulse(self) -> Pulse:
        return Pulse(
            site=Site(node=self.node, address="sim"), phase=self.phase, round=self.round, training_for=self.round + 1
        )

    def meet(self, *nodes: str) -> None:
        for node in nodes:
            self.roster.add(Site(node=node, address="sim"))
        for contact in self.roster.contacts.values():
            assert contact.task
            self.carrier.tasks.add(contact.task)


def friends(
    scene: Callable[[Network, Any], Awaitable[None]], names: str = "abc", weather: Weather | None = None
) -> None:
    """a knows all the others; they learn of it from its questions."""

    async def main() -> None:
        network = Network(1, weather or Weather(delay=0.01, jitter=0.0))
        made = {node: Friend(network, node) for node in names}
        made["a"].meet(*names)
        await made["a"].roster.settled()
        await scene(network, made)

    run(main())


def test_who_asks_is_known_from_then_on() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        assert [*sites["a"].roster.participants()] == ["a", "b", "c"]
        assert list(sites["a"].roster.contacts) == ["b", "c"], "not itself"
        await asyncio.sleep(2)
        assert [*sites["b"].roster.participants()] == ["a", "b"]
        assert sites["b"].introduced[0] == ("a", "sim")

    friends(scene)


def test_round_trips_are_of_those_that_have_answered() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        trips = sites["a"].roster.round_trips()
        assert trips == {"b": pytest.approx(0.02), "c": pytest.approx(0.02)}
        assert sites["b"].roster.round_trips() == {}, "it has asked nobody"

    friends(scene)


def test_a_new_address_replaces_the_old_one_and_none_does_not() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        roster = sites["a"].roster
        roster.add(Site(node="b", address="elsewhere"))
        roster.add(Site(node="b"))
        assert roster.contacts["b"].site.address == "elsewhere"
        assert sites["a"].introduced[-1] == ("b", "elsewhere")

    friends(scene)


def test_a_barred_site_is_forgotten_for_good() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        roster = sites["a"].roster
        roster.bar(["b", "unknown"], "was revoked")
        assert [*roster.participants()] == ["a", "c"]
        roster.add(Site(node="b", address="elsewhere"))
        await asyncio.sleep(30)
        assert list(roster.contacts) == ["c"], "whatever others say of it"

    friends(scene)


def test_a_pulse_in_anothers_name_is_not_believed() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        lie = Pulse(site=Site(node="c"), phase=WAITING, round=99)
        await sites["b"].carrier.call("a", BEAT, lie, 5.0)
        assert sites["a"].roster.ahead(0) == []

    friends(scene)


@pytest.mark.parametrize("phase", Phase.values())
def test_only_sites_that_train_or_exchange_take_part(phase: Phase.ValueType) -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        sites["b"].phase = phase
        await asyncio.sleep(2)
        active = phase in (TRAINING, WAITING, Phase.PHASE_EXCHANGING)
        assert ("b" in sites["a"].roster.participants()) == active

    friends(scene)


def test_who_still_trains_for_an_earlier_round_or_does_not_get_the_last_one_is_not_abreast() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        for node, round, phase in (("a", 4, WAITING), ("b", 3, TRAINING), ("c", 3, WAITING), ("d", 4, TRAINING)):
            sites[node].round, sites[node].phase = round, phase
        await asyncio.sleep(2)
        roster, now = sites["a"].roster, asyncio.get_running_loop().time()
        assert (roster.abreast(3, now - 5), roster.abreast(4, now - 5)) == (["b", "c"], ["a", "c", "d"])
        assert "b" in roster.abreast(4, now), "what it said before that commit does not tell what it trains for now"
        assert roster.abreast(4, now - 9) == ["a", "c", "d"]
        assert roster.abreast(4, now - 11) == ["a", "d"], "c should have the fourth round by now"

    friends(scene, "abcd")


def test_the_most_advanced_first() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        for node, round in (("b", 5), ("c", 7), ("d", 5)):
            sites[node].round = round
        await asyncio.sleep(2)
        roster = sites["a"].roster
        assert [roster.ahead(round) for round in (4, 5, 7)] == [["c", "b", "d"], ["c"], []]
        network.crash("c")
        await asyncio.sleep(3)
        assert roster.ahead(4) == ["b", "d"], "who does not answer cannot give us anything"

    friends(scene, "abcd")


def test_two_failures_in_a_row_and_it_is_not_alive() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        roster, died_at = sites["a"].roster, asyncio.get_running_loop().time()
        network.crash("b")
        await roster.changed.until(lambda: not roster.alive("b"))
        assert asyncio.get_running_loop().time() - died_at < 2
        contact = roster.contacts["b"]
        assert (contact.failures >= FAILURES, contact.last_error) == (True, "connection refused")

    friends(scene)


def test_one_failure_is_forgiven_and_asked_again_soon() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        roster = sites["a"].roster
        gone = network.carriers.pop("b")
        await roster.changed.until(lambda: roster.contacts["b"].failures == 1)
        assert roster.alive("b")
        network.carriers["b"] = gone
        missed_at = asyncio.get_running_loop().time()
        await roster.changed.until(lambda: roster.contacts["b"].failures == 0)
        assert asyncio.get_running_loop().time() - missed_at < 0.5

    friends(scene)


def test_silence_is_noticed_by_what_was_usual() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        roster = sites["a"].roster
        await asyncio.sleep(30)
        limit = roster.contacts["b"].limit.seconds()
        assert limit == pytest.approx(5, abs=1), "five intervals: less would be the machine's jitter"
        network.partition({"a"}, {"b"}, {"c"})
        cut_at = asyncio.get_running_loop().time()
        await roster.changed.until(lambda: not roster.alive("b"))
        assert asyncio.get_running_loop().time() - cut_at <= 2 * limit + 1.1, "at a beat that failed, at the latest"

    friends(scene)


def test_a_slow_network_is_given_more_time() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        await asyncio.sleep(200)
        assert all(sites["a"].roster.alive(node) for node in "bc")
        assert sites["a"].roster.contacts["b"].limit.seconds() > 5

    friends(scene, weather=Weather(delay=0.5, jitter=4.0))


def test_however_many_peers_there_are_a_site_asks_and_answers_no_more_of_them_a_second() -> None:
    names = [f"{number:03d}" for number in range(2 * QUESTIONS + 1)]

    async def main() -> None:
        network = Network(1, Weather(delay=0.01, jitter=0.0))
        sites = {node: Friend(network, node) for node in names}
        for site in sites.values():
            site.meet(*names)
        await sites["000"].roster.settled()
        questions = network.hops.total()
        await asyncio.sleep(10)
        a_second = (network.hops.total() - questions) / 10 / len(names)
        assert a_second == pytest.approx(2 * QUESTIONS, rel=0.05), (
            "its questions and its answers, not two for each peer"
        )
        assert all([*site.roster.participants()] == names for site in sites.values())

        network.partition({"001"}, {*names} - {"001"})
        cut_at, roster = asyncio.get_running_loop().time(), sites["000"].roster
        await roster.changed.until(lambda: not roster.alive("001"))
        assert asyncio.get_running_loop().time() - cut_at <= 4 * roster.contacts["001"].limit.seconds()

    run(main())


def test_who_comes_back_is_alive_again() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        roster = sites["a"].roster
        network.crash("b")
        await roster.changed.until(lambda: not roster.alive("b"))
        Friend(network, "b", round=3)
        await roster.changed.until(lambda: roster.alive("b"))
        assert roster.ahead(2) == ["b"]

    friends(scene)


def test_nobody_waits_for_who_said_goodbye() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        roster = sites["a"].roster
        waiting = asyncio.create_task(roster.changed.until(lambda: [*roster.participants()] == ["a", "c"]))
        await asyncio.sleep(0)
        roster.goodbye("b")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done()
        roster.goodbye("unheard of")

    friends(scene)


def test_news_is_told_at_once() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        await asyncio.sleep(2.5)
        sites["a"].round = 8
        began = asyncio.get_running_loop().time()
        await sites["a"].roster.announce()
        assert asyncio.get_running_loop().time() - began < 0.1
        assert [sites[node].roster.ahead(7) for node in "bc"] == [["a"], ["a"]]

    friends(scene)


def test_news_is_told_without_waiting_and_not_after_the_end() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        await asyncio.sleep(2.5)
        sites["a"].round = 8
        sites["a"].roster.tell()
        sites["a"].roster.tell()
        await asyncio.sleep(0.1)
        assert [sites[node].roster.ahead(7) for node in "bc"] == [["a"], ["a"]]
        sites["a"].round = 9
        sites["a"].roster.tell()
        await sites["a"].roster.stop()
        assert "announce" not in {task.get_name() for task in asyncio.all_tasks()}

    friends(scene)


def test_settled_once_all_have_answered_or_failed() -> None:
    async def main() -> None:
        network = Network(1, Weather(delay=0.01, jitter=0.0))
        site = Friend(network, "a")
        Friend(network, "b")
        site.meet("b", "z")
        await site.roster.settled()
        assert site.roster.alive("b")
        assert site.roster.contacts["z"].failures >= FAILURES
        assert site.roster.pulse_of("z") is None
        assert site.roster.pulse_of("never heard of") is None

    run(main())


def test_nothing_is_asked_after_the_end() -> None:
    async def scene(network: Network, sites: dict[str, Friend]) -> None:
        await sites["a"].roster.stop()
        heard_at = sites["a"].roster.contacts["b"].heard_at
        await sites["b"].roster.stop()
        await asyncio.sleep(20)
        assert sites["a"].roster.contacts["b"].heard_at == heard_at
        assert not sites["a"].roster.alive("b")

    friends(scene)
