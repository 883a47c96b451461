from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import pytest
from wire import samples
from wire.sites import ALICE, BOB, CAROL, LEAVING, OTHER_TOKEN, QUICK, RUN, TOKEN, Sites, ack

from pier_node.identity.certificates import Credentials, credentials
from pier_node.wire import links
from pier_node.wire.carrier import CHUNK_BYTES, DESCRIBE, GATHER, LEAVE, MANIFEST_BYTES, MESSAGE_BYTES, PROPOSAL_BYTES
from pier_node.wire.grpc.carrier import CHANNEL_OPTIONS, SERVICE, server_options
from pier_node.wire.links import CallMetadata
from pier_proto.v1.peer_pb2 import Ack

TLS, INSECURE = Sites(True), Sites(False)


@pytest.mark.parametrize("shown", [None, credentials(CAROL, OTHER_TOKEN)], ids=["no certificate", "of another run"])
async def test_under_tls_a_caller_without_the_token_gets_nowhere(shown: Credentials | None) -> None:
    """It trusts everybody, so that only the server can refuse."""
    ours = credentials(BOB, TOKEN)
    own = (shown.key_pem, shown.cert_pem) if shown else (None, None)
    tls = grpc.ssl_channel_credentials(ours.ca_pem, *own)
    async with TLS.listening(BOB) as (bob, address):
        bob.serve(LEAVE, ack)
        channel = grpc.aio.secure_channel(address, tls, [("grpc.ssl_target_name_override", "pier")])
        headers = grpc.aio.Metadata(*CallMetadata(CAROL.node, RUN, CAROL.key).call(bob.node).items())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/pier.v1.Peer/Leave", None, None)(
                LEAVING.SerializeToString(), timeout=QUICK, metadata=headers
            )
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close(None)


async def test_a_refused_caller_that_goes_on_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PATIENCE", 0.1)
    async with INSECURE.listening(BOB) as (bob, address):
        channel = grpc.aio.insecure_channel(address)
        headers = grpc.aio.Metadata(*CallMetadata(ALICE.node, b"\xee" * 32).call(bob.node).items())
        call = channel.stream_stream("/pier.v1.Peer/Exchange", None, None)(None, metadata=headers)
        await call.write(samples.CHUNK.SerializeToString())
        assert await call.read() == Ack().SerializeToString()
        async with asyncio.timeout(QUICK):
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        await channel.close(None)


SERVER, CHANNEL = dict(server_options(MESSAGE_BYTES)), dict(CHANNEL_OPTIONS)


def test_idle_connections_are_kept_alive_from_both_ends() -> None:
    for options in (SERVER, CHANNEL):
        assert 20_000 <= int(options["grpc.keepalive_time_ms"]) <= 30_000
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0


def test_a_peer_that_comes_back_is_looked_for_every_second() -> None:
    assert int(CHANNEL["grpc.max_reconnect_backoff_ms"]) <= 1_000


def test_no_peer_sends_too_many_pings() -> None:
    assert SERVER["grpc.http2.max_ping_strikes"] == 0
    assert SERVER["grpc.http2.min_ping_interval_without_data_ms"] < CHANNEL["grpc.keepalive_time_ms"]  # type: ignore[operator]


def test_messages_are_bounded() -> None:
    assert CHUNK_BYTES < MESSAGE_BYTES < 2 * CHUNK_BYTES
    assert SERVER["grpc.max_receive_message_length"] == MESSAGE_BYTES
    assert CHANNEL["grpc.max_receive_message_length"] == PROPOSAL_BYTES
    limits = {
        entry["name"][0].get("method"): (entry["name"][0].get("service"), entry["maxResponseMessageBytes"])
        for entry in json.loads(str(CHANNEL["grpc.service_config"]))["methodConfig"]
    }
    assert limits[DESCRIBE.name] == (SERVICE, MANIFEST_BYTES)
    assert limits[GATHER.name] == (SERVICE, PROPOSAL_BYTES)
    assert limits[None] == (None, 2 * CHUNK_BYTES)


def test_a_second_server_on_a_port_is_an_error() -> None:
    assert SERVER["grpc.so_reuseport"] == 0
