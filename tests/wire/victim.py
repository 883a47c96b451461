"""A node in a process of its own, to be killed: `python victim.py tls|insecure ADDRESS-OF-ALICE`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from wire.grpc_sites import ALICE, BOB, Sites, chunks

from pier.v1.peer_pb2 import Ack, Chunk, FetchRequest, LeaveRequest, Pulse
from pier_node.wire.carrier import BEAT, LEAVE


async def endless(sender: str = "", request: FetchRequest | None = None) -> AsyncIterator[Chunk]:
    while True:
        async for chunk in chunks(100):
            yield chunk


async def take(sender: str, stream: AsyncIterator[Chunk]) -> None:
    async for _ in stream:
        pass


async def hold(sender: str, request: LeaveRequest) -> Ack:
    return await asyncio.Event().wait() and Ack()


async def echo(sender: str, pulse: Pulse) -> Pulse:
    return pulse


async def main(mode: str, alice: str) -> None:
    async with Sites(mode == "tls").listening(BOB) as (bob, address):
        bob.serve(LEAVE, hold)
        bob.serve(BEAT, echo)
        bob.serve_push(take)
        bob.serve_pull(endless)
        bob.introduce(ALICE.node, alice)
        print(address, flush=True)
        await bob.push(ALICE.node, endless())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
