"""Links are made up, and time passes only in them: see simulation/virtual_time.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from doctor.conftest import CONFIG, TOKEN, Peer
from simulation.virtual_time import run

from bench.ports import free_port
from pier_node.doctor.finding import Verdict
from pier_node.doctor.links import (
    _SIGNS,
    LONG_ENOUGH,
    SIZES,
    Link,
    Round,
    go_round,
    measure,
    missed,
    to_be_reached,
    to_reach_peer,
    visit,
)
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity
from pier_node.wire.carrier import CHUNK_BYTES, HELLO, PROTOCOL, PeerLost
from pier_node.wire.grpc import reasons
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, ProbeReply, ProbeRequest, Site

EPOCH = 1.7e9


@dataclass
class Line:
    """A line to a peer: seconds of round trip, bytes a second each way, how far the peer's clock is ahead."""

    round_trip: float
    up: float
    down: float
    ahead: float = 0.0
    carried: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def __post_init__(self) -> None:
        self._ways = {"up": asyncio.Lock(), "down": asyncio.Lock()}

    async def ask(self, request: ProbeRequest) -> ProbeReply:
        assert len(request.padding) <= CHUNK_BYTES
        assert request.reply_size <= CHUNK_BYTES
        await asyncio.sleep(self.round_trip / 2)
        await self._carry("up", len(request.padding), self.up)
        reply = ProbeReply(padding=bytes(request.reply_size), time=self.clock() + self.ahead)
        await self._carry("down", request.reply_size, self.down)
        await asyncio.sleep(self.round_trip / 2)
        return reply

    def clock(self) -> float:
        return EPOCH + asyncio.get_running_loop().time()

    async def _carry(self, way: str, size: int, rate: float) -> None:
        async with self._ways[way]:
            await asyncio.sleep(size / rate)
            self.carried[way] += size


def measured(line: Line) -> tuple[Link, float]:
    """What the measurement says, and the seconds that it took."""

    async def main() -> tuple[Link, float]:
        return await measure(line.ask, line.clock), asyncio.get_running_loop().time()

    return run(main())


@pytest.mark.parametrize("up", [12_500.0, 125e4, 125e6, 125e7])
@pytest.mark.parametrize("round_trip", [0.0005, 0.04, 0.3])
def test_a_line_is_as_fast_as_it_is(up: float, round_trip: float) -> None:
    """From 100 kbit/s to 10 Gbit/s, around the corner or around the world."""
    line = Line(round_trip, up, up * 4)
    link, took = measured(line)
    assert link.round_trip == pytest.approx(round_trip, rel=1e-4)
    assert link.up == pytest.approx(up, rel=0.01)
    assert link.down == pytest.approx(4 * up, rel=0.01)
    assert took < 15


def test_a_slow_line_is_not_held_for_long() -> None:
    line = Line(0.05, 12_500, 1e9)
    measured(line)
    assert line.carried["up"] == SIZES[0]
    assert line.carried["down"] == sum(SIZES)
    assert SIZES[0] / 12_500 > LONG_ENOUGH


@pytest.mark.parametrize("ahead", [0.0, 12.0, -86_400.0])
def test_clocks_are_compared_in_the_middle_of_the_round_trip(ahead: float) -> None:
    link, _ = measured(Line(0.2, 1e9, 1e9, ahead))
    assert link.clock_ahead == pytest.approx(ahead, abs=1e-6)


def test_the_quickest_answer_counts() -> None:
    """A peer that is busy at first is not farther away for that."""
    line = Line(0.02, 1e9, 1e9)
    late = iter([3.0, 1.0])

    async def ask(request: ProbeRequest) -> ProbeReply:
        await asyncio.sleep(next(late, 0.0))
        return await line.ask(request)

    async def main() -> Link:
        return await measure(ask, line.clock)

    link = run(main())
    assert link.round_trip == pytest.approx(0.02)
    assert link.clock_ahead == pytest.approx(0.0, abs=1e-6)


def test_a_peer_that_is_lost_is_lost() -> None:
    async def ask(request: ProbeRequest) -> ProbeReply:
        raise PeerLost("b", "gone")

    with pytest.raises(PeerLost, match="gone"):
        run(measure(ask))


HERE, THERE = "10.0.0.1:7700", "10.0.0.2:7801"
DOWN = f"{THERE}: no connection within 10 s: it is down, or behind a firewall"
UNNAMED = "The log of that site says more."


# A connection that was there and went silent is nothing that settings mend.
@pytest.mark.parametrize("text", [text for sign, text in reasons._SIGNS if sign != "keepalive"])
def test_every_reason_that_the_wire_gives_has_a_remedy_of_its_own(text: str) -> None:
    assert to_reach_peer(THERE, f"{THERE}: {text}") != UNNAMED


def test_no_remedy_is_for_what_nobody_says() -> None:
    """Reasons come from the wire's translations, from calling cards and from the reception."""
    wire = Path(reasons.__file__).parent.parent
    files = [wire / name for name in ("grpc/reasons.py", "grpc/carrier.py", "libp2p/host.py", "metadata.py")]
    said = "".join(path.read_text() for path in [*files, wire.parent / "site/join.py", wire / "probe.py"])
    missing = [sign for sign, _ in _SIGNS if sign not in said]
    assert not missing


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (DOWN, "At that site: open TCP port 7801 on the firewall and forward it on the router"),
        (f"{THERE}: connection refused: nothing listens there", "Start that site"),
        (f"{THERE}: its certificate is of another run: the tokens differ", "Use the token that the run's first site"),
        (f"{THERE}: it does not speak TLS: it was started with --insecure, or is no Pier node", "or none"),
        ("this is run aaaaaaaa, the caller is in run bbbbbbbb", "different runs"),
        ("something new", UNNAMED),
    ],
)
def test_to_reach_a_peer(reason: str, remedy: str) -> None:
    assert remedy in to_reach_peer(THERE, reason)


def test_to_be_reached() -> None:
    refused = to_be_reached(HERE, f"{HERE}: connection refused: nothing listens there", "")
    assert "--listen 0.0.0.0:7700" in refused
    blocked = to_be_reached(HERE, f"{HERE}: no connection within 8 s: it is down, or behind a firewall", "")
    assert "At this site: open TCP port 7700" in blocked
    assert "--advertise HOST:7700" in blocked
    assert to_be_reached(HERE, "something new", "").startswith("Open TCP port 7700")


def test_an_address_that_a_router_translates_is_pointed_out() -> None:
    hint = "sees this site as 203.0.113.5: try --advertise 203.0.113.5:7700"
    assert hint in to_be_reached(HERE, "no route to that host", "203.0.113.5:40000")
    assert "sees this site" not in to_be_reached(HERE, "no route to that host", "10.0.0.1:40000")


ME = Identity(ec.derive_private_key(7, ec.SECP256R1()))


def carrier(run_hash: bytes = CONFIG.hash()) -> GrpcCarrier:
    return GrpcCarrier(ME.node, run_hash, credentials(ME, TOKEN))


async def visited(addresses: list[str], run_hash: bytes = CONFIG.hash()) -> Round:
    mine = carrier(run_hash)
    try:
        return await go_round(mine, addresses, run_hash)
    finally:
        await mine.stop()


async def test_everybody_is_met_once_at_whatever_address() -> None:
    """Alpha is reached by two names and named by beta at one of them."""
    alpha, beta = Peer("alpha"), Peer("beta")
    async with alpha.running() as at_alpha, beta.running() as at_beta:
        beta.names, alpha.names = [alpha.site], [beta.site]
        found = await visited([at_alpha, at_alpha.replace("127.0.0.1", "localhost"), at_beta])
    assert sorted(reply.site.name for reply in found.met.values()) == ["alpha", "beta"]
    assert not found.missed


async def test_who_does_not_know_the_run_yet_is_told() -> None:
    async with Peer("alpha").running() as address:
        found = await visited([address], run_hash=b"")
    assert found.met[address].run_config == CONFIG.canonical()
    assert found.met[address].seen_as.startswith("127.0.0.1:")


async def test_this_site_is_not_sent_to_itself() -> None:
    alpha, listening = Peer("alpha"), carrier()

    async def answer(_sender: str, _request: HelloRequest) -> HelloReply:
        me = Site(node=ME.node, name="me")
        return HelloReply(protocol=PROTOCOL, run_hash=CONFIG.hash(), run_config=CONFIG.canonical(), site=me)

    listening.serve(HELLO, answer)
    own = f"127.0.0.1:{await listening.start('127.0.0.1', 0)}"
    alpha.names = [Site(node=ME.node, name="me", address=own)]
    try:
        async with alpha.running() as address:
            found = await visited([address, own])
    finally:
        await listening.stop()
    assert [reply.site.name for reply in found.met.values()] == ["alpha"]
    assert not found.missed


async def test_who_is_missed_is_said_with_a_remedy() -> None:
    address = f"127.0.0.1:{free_port()}"
    found = await visited([address])
    finding = missed("", address, found.missed[address])
    assert (finding.site, finding.verdict) == (address, Verdict.PROBLEM)
    assert finding.detail == "connection refused: nothing listens there"
    assert finding.remedy
    named = missed("beta", address, found.missed[address])
    assert (named.site, named.detail) == ("beta", f"{address}: connection refused: nothing listens there")


async def test_a_site_that_does_not_listen_is_not_called_back() -> None:
    alpha, mine = Peer("alpha"), carrier()
    async with alpha.running() as address:
        hello = (await go_round(mine, [address], CONFIG.hash())).met[address]
        findings, link = await visit(mine, address, hello, "")
        await mine.stop()
    assert [finding.check for finding in findings] == ["reach it", "line", "clock"]
    assert link
    assert 0 < link.round_trip < 5


async def test_a_peer_that_goes_away_in_between_is_not_known() -> None:
    alpha, mine = Peer("alpha"), carrier()
    async with alpha.running() as address:
        hello = (await go_round(mine, [address], CONFIG.hash())).met[address]
    findings, link = await visit(mine, address, hello, "")
    await mine.stop()
    assert link is None
    assert [finding.verdict for finding in findings] == [Verdict.UNKNOWN]
