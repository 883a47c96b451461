"""The answering side of the gRPC carrier: admits callers, checks what they send, and turns failures into statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio

from pier_node.base.address import format_address
from pier_node.base.errors import PierError
from pier_node.identity import tls
from pier_node.identity.certificates import Credentials
from pier_node.wire.addresses import free_port
from pier_node.wire.carrier import EXCHANGE, FETCH, MESSAGE_BYTES, BadMessage, PeerLost
from pier_node.wire.grpc.options import END, SERVICE, server_options
from pier_node.wire.grpc.reasons import brief
from pier_node.wire.links import CALLS, GRACE, PATIENCE, Answers, Busy
from pier_node.wire.metadata import CallMetadata, Headers, NotAdmitted
from pier_proto.v1.peer_pb2 import Ack

ACK = Ack().SerializeToString()

Context = grpc.aio.ServicerContext[bytes, bytes]

log = logging.getLogger(__name__)


class PeerServer(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Serves a node's answers over gRPC.

    Args:
        answers: what is served.
        metadata: this node's own metadata.
        credentials: this node's credentials; None serves without TLS.
    """

    def __init__(self, answers: Answers, metadata: CallMetadata, credentials: Credentials | None) -> None:
        self._answers, self._metadata, self._credentials = answers, metadata, credentials
        self._server: grpc.aio.Server | None = None

    # --- what is served ------------------------------------------------------------------------

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Find a method for gRPC."""
        service, _, name = details.method.removeprefix("/").partition("/")
        if service != SERVICE or not self._answers.knows(name):
            return None
        if name == EXCHANGE:
            return grpc.stream_stream_rpc_method_handler(self._take)
        if name == FETCH:
            return grpc.unary_stream_rpc_method_handler(self._give)

        async def answer(raw: bytes, context: Context) -> bytes:
            async with self._admitted(name, context) as caller:
                return await self._answers.answer(name, caller, raw, _seen_as(context.peer()))

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _take(self, stream: AsyncIterator[bytes], context: Context) -> None:
        async with self._admitted(EXCHANGE, context, stream) as caller:
            await _outliving_the_call(self._answers.take(caller, _messages(caller, stream)))
            await context.write(ACK)

    async def _give(self, raw: bytes, context: Context) -> None:
        async with self._admitted(FETCH, context) as caller, aclosing(self._answers.give(caller, raw)) as messages:
            async for message in messages:
                await context.write(message)

    # --- start and stop ------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; the system chooses one if `port` is 0. Raises PierError."""
        self._server = grpc.aio.server(options=server_options(MESSAGE_BYTES), maximum_concurrent_rpcs=CALLS)
        self._server.add_generic_rpc_handlers((self,))
        address = format_address(host, port)
        try:
            bound = tls.add_port(self._server, address, self._credentials)
        except RuntimeError as error:
            free_port(host, port)  # it says why not, which gRPC does not
            raise PierError(f"gRPC cannot listen on {address}", "Choose another with --listen HOST:PORT.") from error
        await self._server.start()
        return bound

    async def stop(self) -> None:
        """Stop listening and end all calls."""
        if self._server is not None:
            await self._server.stop(GRACE)

    # --- a call --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _admitted(
        self, method: str, context: Context, stream: AsyncIterator[bytes] | None = None
    ) -> AsyncGenerator[str]:
        """The caller's node id while its call is in progress; failures end the call with a status.

        A caller that is still sending would not see the status, so its `stream` is first answered and allowed to end.
        """
        try:
            headers: Headers = dict(context.invocation_metadata() or ())
            caller = self._metadata.admit(method, headers, tls.caller_certificate(context))
            with self._answers.place(caller):
                await context.send_initial_metadata(tuple(self._metadata.answer(caller, headers).items()))
                yield caller
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            if not isinstance(error, tuple(_STATUSES)):
                log.exception("%s, asked by %s, failed", method, context.peer())
            if stream is not None:
                await context.write(ACK)
                await _drain(stream)
            await _refuse(context, error)


async def _messages(sender: str, stream: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    async for raw in stream:
        if raw == END:
            return
        yield raw
    raise PeerLost(sender, "its stream was cut off")


async def _outliving_the_call(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that learns from its stream that the caller is gone; cancel it only if it does not."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=GRACE)
        if not task.cancel() and not task.cancelled():
            task.exception()
        raise


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Let a caller find out that it was answered early, so that it stops sending."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            async for _ in stream:
                pass


async def _refuse(context: Context, error: Exception) -> NoReturn:
    code = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    text = type(error).__name__ if code is grpc.StatusCode.INTERNAL else str(error)
    await context.abort(code, brief(text))


_STATUSES = {
    NotAdmitted: grpc.StatusCode.FAILED_PRECONDITION,
    BadMessage: grpc.StatusCode.INVALID_ARGUMENT,
    Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerLost: grpc.StatusCode.ABORTED,
}


def _seen_as(peer: str) -> str:
    """HOST:PORT from gRPC's name of a connection, such as ipv4:10.0.0.1:5000 or ipv6:%5B::1%5D:5000."""
    return unquote(peer.partition(":")[2])
