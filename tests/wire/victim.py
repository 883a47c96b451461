"""A node in a process of its own, to be killed: `python victim.py grpc|hivemind tls|insecure ADDRESS-OF-ALICE`."""

from __future__ import annotations

import asyncio
import sys

from wire.sites import ALICE, BOB, Sites, endless, hold, take_all

from pier_node.wire.carrier import BEAT, LEAVE
from pier_node.wire.transport import Transport
from pier_proto.v1.peer_pb2 import Pulse


async def echo(sender: str, pulse: Pulse) -> Pulse:
    return pulse


async def main(transport: Transport, mode: str, alice: str) -> None:
    async with Sites(mode == "tls", transport).listening(BOB) as (bob, address):
        bob.serve(LEAVE, hold)
        bob.serve(BEAT, echo)
        bob.serve_push(take_all)
        bob.serve_pull(endless)
        bob.introduce(ALICE.node, alice)
        print(address, flush=True)
        await bob.push(ALICE.node, endless())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))  # type: ignore[arg-type]
