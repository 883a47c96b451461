"""Links are made up, and time passes only in them: see simulation/virtual_time.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from doctor.conftest import CONFIG, TOKEN, Peer
from hypothesis import given
from hypothesis import strategies as st

from bench.ports import free_port
from pier_node.config.run import RunConfig
from pier_node.doctor.finding import Verdict
from pier_node.doctor.links import (
    _SIGNS,
    AIM,
    Round,
    go_round,
    missed,
    to_be_reached,
    to_reach_peer,
    utilisation_finding,
    visit,
)
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity
from pier_node.rounds.prediction import Line
from pier_node.wire.carrier import HELLO, PROTOCOL
from pier_node.wire.grpc import reasons
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, Site

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
    files = [wire / name for name in ("grpc/reasons.py", "grpc/carrier.py", "libp2p/host.py", "links.py")]
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
    assert [finding.check for finding in findings] == ["reach it", "link", "clock"]
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


PARAMETERS = 30_800_000


def config(**outer: Any) -> RunConfig:
    """A step of 8 sequences of 128 tokens: 1024 tokens."""
    return RunConfig.model_validate({"inner": {"total_steps": 100_000}, "outer": outer})


def test_with_overlap_the_advice_needs_fewer_steps() -> None:
    finding = utilisation_finding(config(overlap=True), PARAMETERS, 2, Line(6.25e6, 0), 5120, None)
    assert finding.values["better_inner_steps"] == 89
    assert finding.remedy.endswith('; or set outer.codec = "int4" (an eighth of the bytes).')


def test_a_fast_line() -> None:
    """2 sites: 123.2 MB at 125 MB/s take 0.986 s; 50 steps of 1024 tokens at 5120 a second take 10 s."""
    finding = utilisation_finding(config(), PARAMETERS, 2, Line(125e6, 0), 5120, None)
    assert finding.verdict is Verdict.OK
    assert finding.values["exchange_seconds"] == pytest.approx(0.9856)
    assert finding.values["compute_seconds"] == pytest.approx(10.0)
    assert finding.values["utilisation"] == pytest.approx(10 / 10.9856)
    assert finding.detail == "91 % expected: H = 50 inner steps take 10 s, an exchange 986 ms"


def test_a_slow_line_is_met_by_more_inner_steps() -> None:
    """At 50 Mbit/s the exchange takes 19.7 s: 34 %. For 90 %: 9 · 19.7 s / 0.2 s = 887 steps."""
    finding = utilisation_finding(config(), PARAMETERS, 2, Line(6.25e6, 0), 5120, 0.31)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.values["better_inner_steps"] == 890
    assert "Raise outer.inner_steps to H = 890" in finding.remedy
    assert finding.detail.endswith("; 31 % so far, waits for others included")


def test_in_between_it_is_advice() -> None:
    finding = utilisation_finding(config(), PARAMETERS, 2, Line(25e6, 0), 5120, None)
    assert 0.5 < finding.values["utilisation"] < 0.8
    assert finding.verdict is Verdict.ADVICE


def test_no_advice_is_longer_than_the_run() -> None:
    short = RunConfig.model_validate({"inner": {"total_steps": 500}})
    finding = utilisation_finding(short, PARAMETERS, 2, Line(6.25e6, 0), 5120, None)
    assert "500 inner steps are fewer than the H = 890" in finding.remedy
    assert "smaller model" in finding.remedy


@pytest.mark.parametrize(
    ("outer", "advice"),
    [
        ({}, "overlap = true with fragments = 5 ("),
        ({"fragments": 2}, "overlap = true ("),
        ({"algorithm": "noloco"}, "overlap = true ("),
    ],
)
def test_overlap_is_advised_with_the_fragments_without_which_it_costs_loss(outer: dict[str, Any], advice: str) -> None:
    slow = RunConfig.model_validate({"inner": {"total_steps": 100_000}, "outer": outer})
    assert advice in utilisation_finding(slow, PARAMETERS, 2, Line(6.25e6, 0), 5120, None).remedy


def test_synchronous_training_exchanges_at_each_step() -> None:
    finding = utilisation_finding(config(algorithm="sync"), PARAMETERS, 2, Line(125e6, 0), 5120, None)
    assert finding.values["compute_seconds"] == pytest.approx(0.2)
    assert 'algorithm = "diloco"' in finding.remedy


def test_round_trips_take_time_in_each_fragments_round() -> None:
    long = Line(125e6, 0.25)
    once = utilisation_finding(config(), PARAMETERS, 2, long, 5120, None).values["exchange_seconds"]
    apart = utilisation_finding(config(fragments=5), PARAMETERS, 2, long, 5120, None).values["exchange_seconds"]
    assert once == pytest.approx(0.9856 + 0.5)
    assert apart == pytest.approx(0.9856 + 2.5)


def test_what_is_not_known_is_said() -> None:
    assert utilisation_finding(config(), PARAMETERS, 1, Line(0, 0), 0, None).verdict is Verdict.OK
    no_link = utilisation_finding(config(), PARAMETERS, 2, Line(0, 0), 5120, None)
    no_speed = utilisation_finding(config(), PARAMETERS, 2, Line(125e6, 0), 0, None)
    assert no_link.verdict is no_speed.verdict is Verdict.UNKNOWN
    assert "an exchange takes 986 ms" in no_speed.detail


@given(
    rate=st.floats(1e4, 1e9),
    trip=st.floats(0, 1),
    speed=st.floats(10, 1e7),
    steps=st.integers(1, 1000),
    sites=st.integers(2, 64),
)
def test_the_advice_is_worth_following(rate: float, trip: float, speed: float, steps: int, sites: int) -> None:
    """With the H that is advised the prediction reaches the aim, and not at twice the steps that it takes."""
    finding = utilisation_finding(config(inner_steps=steps), PARAMETERS, sites, Line(rate, trip), speed, None)
    wanted = int(finding.values.get("better_inner_steps", 0))
    if 0 < wanted <= 100_000:
        better = utilisation_finding(config(inner_steps=wanted), PARAMETERS, sites, Line(rate, trip), speed, None)
        assert AIM - 1e-9 <= better.values["utilisation"] <= 0.95
        assert wanted > steps
