from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from wire import samples
from wire.sites import ALICE, BOB, FETCH, LEAVING, QUICK, Sites, chunks, clear_up_after, endless

from pier_node.wire.carrier import BEAT, LEAVE, Chunk, PeerLost
from pier_node.wire.links import SiteCarrier
from pier_proto.v1.peer_pb2 import HelloRequest

VICTIM = Path(__file__).with_name("victim.py")


@asynccontextmanager
async def victim(sites: Sites, alice_at: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """Bob in another process, and the address it listens on."""
    path = os.pathsep.join([str(VICTIM.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    mode = [sites.transport, "tls" if sites.secure else "insecure"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(VICTIM), *mode, alice_at),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stdout
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield process, line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        clear_up_after(process.pid)


class Witness:
    """Alice: what she saw of Bob's stream."""

    def __init__(self) -> None:
        self.flowing = asyncio.Semaphore(0)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def take(self, sender: str, stream: AsyncIterator[Chunk]) -> None:
        try:
            async for _ in stream:
                self.flowing.release()
        except PeerLost as lost:
            self.lost.set_result(lost.node)
            raise

    async def refrain(self, sender: str, stream: AsyncIterator[Chunk]) -> None:
        await self.lost


async def pulling(alice: SiteCarrier, progress: asyncio.Semaphore) -> None:
    async for _ in alice.pull(BOB.node, FETCH):
        progress.release()


async def pushing(alice: SiteCarrier, progress: asyncio.Semaphore) -> None:
    async def source() -> AsyncIterator[Chunk]:
        async for chunk in endless():
            yield chunk
            progress.release()

    await alice.push(BOB.node, source())


async def test_whatever_is_under_way_with_a_peer_that_is_killed_ends(sites: Sites) -> None:
    seen, pulled, pushed = Witness(), asyncio.Semaphore(0), asyncio.Semaphore(0)
    async with sites.listening(ALICE) as (alice, alice_at), victim(sites, alice_at) as (process, address):
        alice.serve_push(seen.take)
        alice.introduce(BOB.node, address)
        work = [
            asyncio.create_task(pulling(alice, pulled)),
            asyncio.create_task(pushing(alice, pushed)),
            asyncio.create_task(alice.call(BOB.node, LEAVE, LEAVING, 60)),
        ]
        for progress in (seen.flowing, pulled, pushed):
            for _ in range(3):
                await asyncio.wait_for(progress.acquire(), 2 * QUICK)
        process.kill()
        done, pending = await asyncio.wait(work, timeout=QUICK)
        assert not pending
        for task in done:
            error = task.exception()
            assert isinstance(error, PeerLost)
            assert f"{address}: the connection was cut off" in error.reason
        assert await asyncio.wait_for(seen.lost, QUICK) == BOB.node
        with pytest.raises(PeerLost, match=f"{address}: "):
            await alice.call(BOB.node, LEAVE, LEAVING, QUICK)


async def test_a_peer_that_is_frozen_is_given_up_at_the_deadline(sites: Sites) -> None:
    async with sites.listening(ALICE) as (alice, alice_at), victim(sites, alice_at) as (process, address):
        alice.serve_push(Witness().refrain)
        alice.introduce(BOB.node, address)
        await alice.call(BOB.node, BEAT, samples.PULSE, 2 * QUICK)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"no answer within 0\.3 s"):
            await alice.call(BOB.node, LEAVE, LEAVING, 0.3)


async def test_a_host_that_takes_the_connection_and_says_nothing_is_given_up(sites: Sites) -> None:
    alice = sites.carrier(ALICE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = sites.nowhere(silent.getsockname()[1])
        alice.introduce(BOB.node, address)
        for ask in (alice.call(BOB.node, LEAVE, LEAVING, 0.3), alice.greet(address, HelloRequest(protocol=1), 0.3)):
            with pytest.raises(PeerLost, match=r"no connection within 0\.3 s: it is down, or behind a firewall"):
                await ask
    await alice.stop()


async def test_stopping_ends_what_has_no_connection_yet(sites: Sites) -> None:
    alice = sites.carrier(ALICE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        alice.introduce(BOB.node, sites.nowhere(silent.getsockname()[1]))
        work = [
            asyncio.create_task(pulling(alice, asyncio.Semaphore())),
            asyncio.create_task(pushing(alice, asyncio.Semaphore())),
            asyncio.create_task(alice.call(BOB.node, LEAVE, LEAVING, 60)),
        ]
        loop = asyncio.get_running_loop()
        accepted = [await asyncio.wait_for(loop.sock_accept(silent), QUICK) for _ in ("questions", "streams")]
        await asyncio.wait_for(alice.stop(), QUICK)
        done, pending = await asyncio.wait(work, timeout=QUICK)
        assert not pending
        assert {type(task.exception()) for task in done} == {PeerLost}
        for connection, _ in accepted:
            connection.close()


async def test_a_name_that_nobody_has_is_said_to_be_unknown(sites: Sites) -> None:
    alice, address = sites.carrier(ALICE), sites.nowhere(7700, "no-such-host.invalid")
    with pytest.raises(PeerLost, match=f"{address}: (no such host|the host's name cannot be)") as error:
        await alice.greet(address, HelloRequest(protocol=1), QUICK)
    assert error.value.node == address
    await alice.stop()


async def test_a_source_that_is_not_taken_whole_is_left_where_it_was(sites: Sites) -> None:
    taken: list[int] = []

    async def source() -> AsyncIterator[Chunk]:
        async for chunk in chunks(1000):
            taken.append(chunk.offset)
            yield chunk

    async with sites.pair() as (alice, bob):
        with pytest.raises(PeerLost, match="no streams are taken here yet"):
            await alice.push(bob.node, source())
    assert len(taken) < 100
