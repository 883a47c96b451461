"""What a stranger gets who opens streams by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire import samples
from wire.sites import ALICE, BOB, LEAVING, QUICK, RUN, TOKEN, Sites, ack, endless, take_all

from pier_node.identity.certificates import credentials
from pier_node.wire.addresses import parse_routes
from pier_node.wire.bounds import parse
from pier_node.wire.carrier import BEAT, LEAVE, PROTOCOL, PeerRefused
from pier_node.wire.libp2p import server
from pier_node.wire.libp2p.carrier import HivemindCarrier
from pier_node.wire.libp2p.host import Host, issue
from pier_node.wire.libp2p.stream import LINE, CutOff, Kind, Stream
from pier_proto.v1.peer_pb2 import Pulse
from pier_proto.v1.stream_pb2 import IdentityProof, Opening

SITES = Sites(secure=True, transport="hivemind")


class Stranger:
    """A libp2p peer with a connection to Bob, and nothing else."""

    def __init__(self, host: Host, bob: bytes) -> None:
        self.host, self._bob = host, bob

    async def stream(self, name: str) -> Stream:
        return await self.host.stream(self._bob, name)

    async def opening(self) -> Opening:
        """What Alice would open a line with from here."""
        me = (await self.host.client()).peer_id.to_bytes()
        return Opening(protocol=PROTOCOL, run_hash=RUN, identity_proof=issue(ALICE.node, credentials(ALICE, TOKEN), me))

    async def told(self, name: str, *bodies: bytes) -> tuple[Kind, str]:
        """The answer to a stream of these messages."""
        stream = await self.stream(name)
        for body in bodies:
            with suppress(CutOff):
                await stream.send(Kind.MESSAGE, body)
        kind, body = await asyncio.wait_for(stream.receive(8192), QUICK)
        stream.close()
        return kind, body.decode(errors="replace")


@pytest.fixture
async def bob() -> AsyncGenerator[tuple[HivemindCarrier, str]]:
    async def echo(sender: str, pulse: Pulse) -> Pulse:
        return pulse

    async with SITES.listening(BOB) as (carrier, address):
        carrier.serve(LEAVE, ack)
        carrier.serve(BEAT, echo)
        carrier.serve_push(take_all)
        carrier.serve_pull(endless)
        assert isinstance(carrier, HivemindCarrier)
        yield carrier, address


@pytest.fixture
async def stranger(bob: tuple[HivemindCarrier, str]) -> AsyncGenerator[Stranger]:
    asker = SITES.carrier(ALICE)
    assert isinstance(asker, HivemindCarrier)
    yield Stranger(asker._host, await asker._host.connect(parse_routes(bob[1])))
    await asker.stop()


async def test_nothing_is_answered_before_a_line_is_open(stranger: Stranger) -> None:
    for name in (LEAVE.name, "Exchange", "Fetch", "Nothing"):
        kind, reason = await stranger.told(name, LEAVING.SerializeToString())
        assert kind is Kind.FAILED
        assert "asks before it has said who it is" in reason


async def test_a_line_lets_a_holder_of_the_token_in_and_its_end_shuts_it_out(stranger: Stranger) -> None:
    line = await stranger.stream(LINE)
    await line.send(Kind.MESSAGE, (await stranger.opening()).SerializeToString())
    kind, body = await line.receive(8192)
    assert kind is Kind.MESSAGE
    assert parse(IdentityProof, body).node == BOB.node
    assert (await stranger.told(LEAVE.name, LEAVING.SerializeToString()))[0] is Kind.MESSAGE
    await line.send(Kind.PING)
    assert await line.receive(0) == (Kind.PING, b"")
    line.close()
    async with asyncio.timeout(QUICK):
        while (await stranger.told(LEAVE.name, LEAVING.SerializeToString()))[0] is Kind.MESSAGE:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_anothers_identity_proof_lets_nobody_in(stranger: Stranger) -> None:
    stolen = issue(ALICE.node, credentials(ALICE, TOKEN), b"\x12\x20" + bytes(32))
    opened = Opening(protocol=PROTOCOL, run_hash=RUN, identity_proof=stolen)
    kind, reason = await stranger.told(LINE, opened.SerializeToString())
    assert kind is Kind.REFUSED
    assert reason == "the caller is not let in: its identity_proof is of another libp2p peer"


async def test_one_that_says_nothing_is_hung_up_on(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.1)
    stream = await stranger.stream(LINE)
    kind, reason = await asyncio.wait_for(stream.receive(0), QUICK)
    assert (kind, reason) == (Kind.REFUSED, b"nothing came within 0 s")
    with pytest.raises(CutOff):
        await asyncio.wait_for(stream.receive(0), QUICK)


async def test_strangers_together_have_only_so_many_streams(
    bob: tuple[HivemindCarrier, str], stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STRANGERS", 2)
    streams = [await stranger.stream(LINE) for _ in range(3)]
    waiting = {asyncio.create_task(stream.receive(0)) for stream in streams}
    (ended,), held = await asyncio.wait(waiting, timeout=QUICK, return_when=asyncio.FIRST_COMPLETED)
    assert type(ended.exception()) is CutOff
    assert len(held) == 2
    for stream in streams:
        stream.close()
    await asyncio.wait(held)
    assert {type(task.exception()) for task in held} == {CutOff}


@pytest.mark.parametrize("known", [False, True])
async def test_one_peer_has_only_so_many_streams(
    bob: tuple[HivemindCarrier, str], stranger: Stranger, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Streams that say nothing, or lines, which last: they leave room for other peers, and have it again later."""
    monkeypatch.setattr(server, "OPENINGS", 3)
    monkeypatch.setattr(server, "STREAMS_PER_PEER", 4)
    opening, lines = (await stranger.opening()).SerializeToString(), list[Stream]()
    if known:
        lines.append(await stranger.stream(LINE))
        await lines[0].send(Kind.MESSAGE, opening)
        assert (await lines[0].receive(8192))[0] is Kind.MESSAGE
    lines += [await stranger.stream(LINE) for _ in range(4)]
    waiting = {asyncio.create_task(stream.receive(0)) for stream in lines[known:]}
    (ended,), held = await asyncio.wait(waiting, timeout=QUICK, return_when=asyncio.FIRST_COMPLETED)
    assert type(ended.exception()) is CutOff
    assert len(held) == 3
    other = SITES.carrier(ALICE)
    other.introduce(bob[0].node, bob[1])
    await other.call(bob[0].node, LEAVE, LEAVING, QUICK)
    await other.stop()
    for stream in lines:
        stream.close()
    await asyncio.wait(held)
    async with asyncio.timeout(QUICK):
        while not await _answered(stranger, opening):
            pass


async def _answered(stranger: Stranger, opening: bytes) -> bool:
    with suppress(CutOff):  # no place yet
        return (await stranger.told(LINE, opening))[0] is Kind.MESSAGE
    return False


async def test_a_peer_with_a_line_takes_no_strangers_place(
    bob: tuple[HivemindCarrier, str], stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STRANGERS", 1)
    line = await stranger.stream(LINE)
    await line.send(Kind.MESSAGE, (await stranger.opening()).SerializeToString())
    assert (await line.receive(8192))[0] is Kind.MESSAGE
    other = SITES.carrier(ALICE)
    other.introduce(bob[0].node, bob[1])
    await other.call(bob[0].node, LEAVE, LEAVING, QUICK)
    await other.stop()
    line.close()


async def test_frames_out_of_place_are_refused(stranger: Stranger) -> None:
    line = await stranger.stream(LINE)
    await line.send(Kind.MESSAGE, (await stranger.opening()).SerializeToString())
    await line.receive(8192)
    for name, kind in ((LEAVE.name, Kind.END), ("Exchange", Kind.PING), ("Fetch", Kind.REFUSED)):
        stream = await stranger.stream(name)
        await stream.send(kind)
        answer, reason = await asyncio.wait_for(stream.receive(0), QUICK)
        assert answer is Kind.REFUSED
        assert b"where a" in reason
        stream.close()
    line.close()


names = st.one_of(st.sampled_from([LINE, BEAT.name, LEAVE.name, "Exchange", "Fetch", ""]), st.text(max_size=80))


async def test_noise_gets_an_error_and_nothing_else(bob: tuple[HivemindCarrier, str], stranger: Stranger) -> None:
    alice = SITES.carrier(ALICE)
    alice.introduce(bob[0].node, bob[1])
    loop = asyncio.get_running_loop()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(name=names, bodies=st.lists(st.binary(max_size=200), max_size=3))
    def make_noise(name: str, bodies: list[bytes]) -> None:
        async def one() -> None:
            if not bodies and name == LINE:
                return  # it would wait for the rest
            kind, _ = await stranger.told(name, *bodies)
            assert kind in (Kind.REFUSED, Kind.FAILED)
            assert await alice.call(BOB.node, BEAT, samples.PULSE, QUICK) == samples.PULSE

        asyncio.run_coroutine_threadsafe(one(), loop).result(2 * QUICK)

    await asyncio.to_thread(make_noise)
    await alice.stop()


async def test_it_may_be_asked_again_after_a_refusal(bob: tuple[HivemindCarrier, str]) -> None:
    alice = SITES.carrier(ALICE, run=b"\xee" * 32)
    alice.introduce(bob[0].node, bob[1])
    for _ in range(2):
        with pytest.raises(PeerRefused, match="this is run"):
            await alice.call(bob[0].node, LEAVE, LEAVING, QUICK)
    await alice.stop()
