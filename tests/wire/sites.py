"""Nodes with real sockets on loopback, and what they hold."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity, Token
from pier_node.wire.addresses import Route, first_hop
from pier_node.wire.carrier import Chunk
from pier_node.wire.links import SiteCarrier
from pier_node.wire.transport import Transport, make_carrier
from pier_proto.v1.peer_pb2 import Ack, Ballot, FetchRequest, LeaveRequest

RUN = hashlib.sha256(b"run").digest()
TOKEN = Token(hashlib.sha256(b"secret").digest(), RUN[:16])
OTHER_TOKEN = Token(hashlib.sha256(b"other secret").digest(), RUN[:16])
ALICE, BOB, CAROL = (Identity(ec.derive_private_key(number, ec.SECP256R1())) for number in (1, 2, 3))
NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
"""A libp2p peer id."""
MIB = 1 << 20
QUICK = 30.0
"""Seconds within which things must have happened, on a busy machine; they take milliseconds."""

LEAVING = LeaveRequest(node=ALICE.node)
FETCH = FetchRequest(round=1, tensor="anchor", length=1)
Pair = tuple[SiteCarrier, SiteCarrier]


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
    transport: Transport = "grpc"

    def carrier(
        self, identity: Identity, run: bytes = RUN, token: Token = TOKEN, folder: Path | None = None
    ) -> SiteCarrier:
        proof = credentials(identity, token) if self.secure else None
        return make_carrier(self.transport, identity.node, run, proof, folder)

    def nowhere(self, port: int = 1, host: str = "127.0.0.1") -> str:
        """An address as a peer would tell it."""
        return f"{host}:{port}" if self.transport == "grpc" else str(Route(host, port, NOBODY))

    @asynccontextmanager
    async def listening(
        self,
        identity: Identity,
        run: bytes = RUN,
        token: Token = TOKEN,
        port: int = 0,
        folder: Path | None = None,
    ) -> AsyncGenerator[tuple[SiteCarrier, str]]:
        """A node, and the address it listens on."""
        carrier = self.carrier(identity, run, token, folder)
        try:
            yield carrier, (await carrier.listen(f"127.0.0.1:{port}", None, [])).address
        finally:
            await carrier.stop()

    @asynccontextmanager
    async def pair(self) -> AsyncGenerator[Pair]:
        """Alice and Bob, who know each other."""
        async with self.listening(ALICE) as (alice, at_alice), self.listening(BOB) as (bob, at_bob):
            alice.introduce(bob.node, at_bob)
            bob.introduce(alice.node, at_alice)
            yield alice, bob


def port_of(address: str) -> int:
    """The port in an address of either kind."""
    return int(first_hop(address).rpartition(":")[2])


async def chunks(count: int, size: int = MIB) -> AsyncIterator[Chunk]:
    """Chunks whose bytes say which one they are."""
    for number in range(count):
        data = bytes([number % 256]) * size
        yield Chunk(
            round=1, ballot=Ballot(number=1, leader="a" * 16), stage=Chunk.STAGE_SCATTER, offset=number, data=data
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


def clear_up_after(pid: int) -> None:
    """Remove what a process that was killed could not remove itself: the folder of p2pd's sockets."""
    for home in Path("/tmp").glob(f"pier-p2pd-{pid}-*"):
        shutil.rmtree(home)
