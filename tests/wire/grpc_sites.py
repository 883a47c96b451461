"""Nodes with real sockets on loopback, and what they hold."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from pier.v1.peer_pb2 import Ack, Ballot, Chunk, FetchRequest, LeaveRequest
from pier_node.certificates import credentials
from pier_node.identity import Identity, Token
from pier_node.wire.grpc_carrier import GrpcCarrier

RUN = hashlib.sha256(b"run").digest()
TOKEN = Token(hashlib.sha256(b"secret").digest(), RUN[:16])
OTHER_TOKEN = Token(hashlib.sha256(b"other secret").digest(), RUN[:16])
ALICE, BOB, CAROL = (Identity(ec.derive_private_key(number, ec.SECP256R1())) for number in (1, 2, 3))
MIB = 1 << 20
QUICK = 5.0
"""Seconds within which things must have happened; they take milliseconds."""

LEAVING = LeaveRequest(node=ALICE.node)
FETCH = FetchRequest(round=1, tensor="anchor", length=1)
Pair = tuple[GrpcCarrier, GrpcCarrier]


def impostor(real: Identity, name: str) -> Identity:
    """Holds the token, and writes another's name wherever its own belongs."""

    class Impostor(Identity):
        @property
        def node(self) -> str:
            return name

    return Impostor(real.key)


@dataclass(frozen=True)
class Sites:
    """Makes nodes, with TLS or without."""

    secure: bool

    def carrier(self, identity: Identity, run: bytes = RUN, token: Token = TOKEN) -> GrpcCarrier:
        return GrpcCarrier(identity.node, run, credentials(identity, token) if self.secure else None)

    @asynccontextmanager
    async def listening(
        self, identity: Identity, run: bytes = RUN, token: Token = TOKEN, port: int = 0
    ) -> AsyncGenerator[tuple[GrpcCarrier, str]]:
        """A node, and the address it listens on."""
        carrier = self.carrier(identity, run, token)
        bound = await carrier.start("127.0.0.1", port)
        try:
            yield carrier, f"127.0.0.1:{bound}"
        finally:
            await carrier.stop()

    @asynccontextmanager
    async def pair(self) -> AsyncGenerator[tuple[GrpcCarrier, GrpcCarrier]]:
        """Alice and Bob, who know each other."""
        async with self.listening(ALICE) as (alice, at_alice), self.listening(BOB) as (bob, at_bob):
            alice.introduce(bob.node, at_bob)
            bob.introduce(alice.node, at_alice)
            yield alice, bob


async def chunks(count: int, size: int = MIB) -> AsyncIterator[Chunk]:
    """Chunks whose bytes say which one they are."""
    for number in range(count):
        data = bytes([number % 256]) * size
        yield Chunk(
            round=1, ballot=Ballot(number=1, keeper="a" * 16), stage=Chunk.STAGE_SCATTER, offset=number, data=data
        )


async def endless(sender: str = "", request: FetchRequest = FETCH) -> AsyncIterator[Chunk]:
    """A source, or an answer to a pull, that never ends."""
    while True:
        async for chunk in chunks(100):
            yield chunk


async def take_all(sender: str, stream: AsyncIterator[Chunk]) -> None:
    """Takes a pushed stream to its end."""
    async for _ in stream:
        pass


async def ack(sender: str, request: LeaveRequest) -> Ack:
    """Answers at once."""
    return Ack()


async def hold(sender: str, request: LeaveRequest) -> Ack:
    """Never answers."""
    return await asyncio.Event().wait() and Ack()
