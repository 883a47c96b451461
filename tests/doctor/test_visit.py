from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric import ec
from doctor.conftest import CONFIG, TOKEN, Peer

from bench.ports import free_port
from pier_node.doctor.finding import Verdict
from pier_node.doctor.visit import Round, go_round, missed, visit
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity
from pier_node.wire.carrier import HELLO, PROTOCOL
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, Site

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
