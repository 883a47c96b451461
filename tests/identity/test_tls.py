"""Real connections over loopback: who gets in, and whom a client takes for the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.certificates import Credentials, credentials, node_id_of_certificate
from pier_node.identity.invite import Invite
from pier_node.identity.node import Identity, Token, key_pem
from pier_node.identity.tls import Trust, add_port, caller_certificate, certificate_at, channel, der

TOKEN, OTHER = Token(bytes(range(32)), bytes(16)), Token(bytes(32), bytes(16))
ALICE, BOB = (Identity(ec.derive_private_key(number, ec.SECP256R1())) for number in (1, 2))
OWN = credentials(BOB, TOKEN)


class Mirror(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers each call with the certificate that the caller has shown."""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def answer(_raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return caller_certificate(context) or b"none"

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def serving(listen: Callable[[grpc.aio.Server, str], int]) -> AsyncGenerator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Mirror(),))
    port = listen(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def ask(address: str, node: str | None, own: Credentials | None) -> bytes:
    connection = channel(address, node, own, [("grpc.use_local_subchannel_pool", 1)])
    try:
        answer: bytes = await connection.unary_unary("/any/Method", None, None)(b"", timeout=60)
    finally:
        await connection.close(None)
    return answer


async def assert_unreached(address: str, node: str | None, own: Credentials | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(address, node, own)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nodes_of_a_run_meet_and_show_who_they_are() -> None:
    async with serving(lambda server, address: add_port(server, address, OWN)) as address:
        for node in (BOB.node, None):
            shown = await ask(address, node, credentials(ALICE, TOKEN))
            assert node_id_of_certificate(shown) == ALICE.node
        await assert_unreached(address, ALICE.node, credentials(ALICE, TOKEN))
        for stranger in (credentials(ALICE, OTHER), None):
            await assert_unreached(address, None, stranger)


async def test_without_credentials_there_is_no_tls() -> None:
    async with serving(lambda server, address: add_port(server, address, None)) as address:
        assert await ask(address, BOB.node, None) == b"none"
        await assert_unreached(address, BOB.node, credentials(ALICE, TOKEN))


async def test_holders_of_invites_get_in_as_long_as_they_are_trusted() -> None:
    trust, invite = Trust(OWN), Invite.new(BOB.key.public_key())
    guest = Credentials(OWN.ca_pem, invite.certificate, key_pem(invite.key))
    async with serving(trust.add_port) as address:
        await assert_unreached(address, BOB.node, guest)
        trust.change([invite.certificate])
        assert der(await ask(address, BOB.node, guest)) == der(invite.certificate)
        assert await ask(address, BOB.node, credentials(ALICE, TOKEN))
        trust.change([])
        await assert_unreached(address, BOB.node, guest)


async def test_a_server_s_certificate_can_be_looked_at_before_it_is_trusted() -> None:
    async with serving(lambda server, address: add_port(server, address, OWN)) as address:
        seen = await asyncio.to_thread(certificate_at, address, 10.0)
        assert seen.public_key() == BOB.key.public_key()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(certificate_at, address, 10.0)
