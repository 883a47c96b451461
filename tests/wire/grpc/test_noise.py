from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import samples
from wire.sites import ALICE, BOB, QUICK, RUN, take_all

from pier_node.wire.carrier import ABORT, BEAT, DESCRIBE, GATHER, HELLO, LEAVE, PROBE, VOTE, BadMessage, Chunk, Method
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_node.wire.links import CallMetadata
from pier_proto.v1.peer_pb2 import Ack, FetchRequest, Pulse


class Background:
    """A node on an event loop of its own, so that tests without one can talk to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.carrier = GrpcCarrier(BOB.node, RUN, None)
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(QUICK)

    async def _start(self) -> int:
        async def echo(sender: str, pulse: Pulse) -> Pulse:
            return pulse

        async def give(sender: str, request: FetchRequest) -> AsyncIterator[Chunk]:
            yield Chunk(stage=Chunk.STAGE_STATE)

        async def never(sender: str, request: object) -> Ack:
            raise BadMessage("noise that is a message by chance")

        self.carrier.serve(BEAT, echo)
        others: list[Method[Any, Any]] = [HELLO, LEAVE, GATHER, VOTE, ABORT, DESCRIBE, PROBE]
        for method in others:
            self.carrier.serve(method, never)
        self.carrier.serve_push(take_all)
        self.carrier.serve_pull(give)
        return await self.carrier.start("127.0.0.1", 0)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.carrier.stop(), self.loop).result(QUICK)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(QUICK)
        self.loop.close()


@pytest.fixture(scope="module")
def live() -> Iterator[grpc.Channel]:
    background = Background()
    channel = grpc.insecure_channel(f"127.0.0.1:{background.port}")
    yield channel
    channel.close()
    background.stop()


HEADERS = tuple(CallMetadata(ALICE.node, RUN).call(BOB.node).items())
METHODS = ["Hello", "Beat", "Leave", "Gather", "CastVote", "Abort", "Describe", "Probe", "Exchange", "Fetch", "Nothing"]
texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
noisy_headers = st.lists(
    st.tuples(st.sampled_from(["pier-protocol", "pier-run", "pier-node", "pier-to", "x"]), texts), max_size=5
)


@settings(max_examples=250, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    messages=st.lists(st.binary(max_size=200), min_size=1, max_size=3),
    headers=st.one_of(st.just(HEADERS), noisy_headers.map(tuple)),
)
def test_noise_gets_an_error_and_nothing_else(
    live: grpc.Channel, method: str, messages: list[bytes], headers: tuple[tuple[str, str | bytes], ...]
) -> None:
    call = live.stream_stream(f"/pier.v1.Peer/{method}", None, None)
    stream = call(iter(messages), metadata=headers, timeout=QUICK)
    with suppress(grpc.RpcError):
        assert len(list(stream)) == 1
    if stream.code() is grpc.StatusCode.OK:
        assert headers == HEADERS
        assert method in ("Beat", "Exchange", "Fetch")
    assert stream.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    good = live.unary_unary("/pier.v1.Peer/Beat", Pulse.SerializeToString, Pulse.FromString)
    assert good(samples.PULSE, metadata=HEADERS, timeout=QUICK).site == samples.SITE
