from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from wire import samples
from wire.sites import ALICE, BOB, CAROL, LEAVING, OTHER_TOKEN, QUICK, RUN, TOKEN, Sites, ack

from pier_node.identity.certificates import Credentials, credentials
from pier_node.wire.carrier import LEAVE
from pier_node.wire.grpc import carrier
from pier_node.wire.metadata import CallMetadata
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
    monkeypatch.setattr(carrier, "PATIENCE", 0.1)
    async with INSECURE.listening(BOB) as (bob, address):
        channel = grpc.aio.insecure_channel(address)
        headers = grpc.aio.Metadata(*CallMetadata(ALICE.node, b"\xee" * 32).call(bob.node).items())
        call = channel.stream_stream("/pier.v1.Peer/Exchange", None, None)(None, metadata=headers)
        await call.write(samples.CHUNK.SerializeToString())
        assert await call.read() == Ack().SerializeToString()
        async with asyncio.timeout(QUICK):
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        await channel.close(None)
