from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from wire.sites import ALICE, BOB, LEAVING, QUICK, Sites, ack, clear_up_after, endless, hold, take_all

from pier_node.base.errors import PierError
from pier_node.wire.carrier import LEAVE, PeerLost
from pier_node.wire.libp2p import p2pd
from pier_node.wire.libp2p.p2pd import ASKING, P2pd
from pier_node.wire.links import SiteCarrier
from pier_proto.v1.peer_pb2 import Ack, LeaveRequest

pytestmark = pytest.mark.processes

SITES = Sites(secure=True, transport="hivemind")
PARENT = """
import asyncio, psutil
from pier_node.wire.libp2p.p2pd import ASKING
from pier_node.wire.libp2p.p2pd import P2pd

async def nothing(client): pass

async def main():
    await P2pd(None, ASKING, nothing).start()
    print(psutil.Process().children()[0].pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def nothing(client: Any) -> None:
    pass


def children() -> list[psutil.Process]:
    """The p2pds of this process."""
    return [child for child in psutil.Process().children() if "p2pd" in child.name()]


def homes() -> set[Path]:
    """The folders of p2pds' sockets on this machine."""
    return set(Path("/tmp").glob("pier-p2pd-*"))


async def again(carrier: SiteCarrier, peer: str) -> None:
    """Return when a peer answers, within seconds."""
    async with asyncio.timeout(4 * QUICK):
        while True:
            with suppress(PeerLost):
                await carrier.call(peer, LEAVE, LEAVING, QUICK)
                break
            await asyncio.sleep(0.05)


@pytest.mark.alone
async def test_it_leaves_nothing_behind() -> None:
    before = homes()
    daemon = P2pd(None, ASKING, nothing)
    client = await daemon.start()
    assert client is await daemon.client()
    (child,) = children()
    (home,) = homes() - before
    assert home.stat().st_mode & 0o077 == 0
    await daemon.stop()
    assert not child.is_running()
    assert not home.exists()


async def test_one_that_ends_just_as_its_time_is_up_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_late(ending: Coroutine[Any, Any, int], _seconds: float) -> int:
        await ending
        await asyncio.sleep(0.1)  # until asyncio, too, knows that it is gone
        raise TimeoutError

    daemon = P2pd(None, ASKING, nothing)
    await daemon.start()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "wait_for", too_late)
        await daemon.stop()
    assert not children()


async def test_whoever_is_there_first_hears_of_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd, "PAUSES", (0.0,))
    told: asyncio.Queue[Any] = asyncio.Queue()
    daemon = P2pd(None, ASKING, told.put)
    first = await daemon.start()
    assert told.get_nowait() is first
    (child,) = children()
    child.kill()
    second = await asyncio.wait_for(told.get(), 2 * QUICK)
    assert second is await daemon.client()
    assert second is not first
    assert second.peer_id == first.peer_id
    await daemon.stop()


async def test_one_that_is_not_sound_is_started_anew() -> None:
    seen: list[Any] = []

    async def sound(client: Any) -> bool:
        seen.append(client)
        return len(seen) == 3

    daemon = P2pd(None, ASKING, nothing, sound)
    assert await daemon.start() is seen[2]
    assert len(children()) == 1
    await daemon.stop()


async def test_one_that_does_not_start_says_why() -> None:
    daemon = P2pd(None, ["-hostAddrs=/ip4/192.0.2.1/tcp/7700"], nothing)
    with pytest.raises(PierError, match=r"p2pd does not start: .*cannot assign requested address"):
        await daemon.start()
    await daemon.stop()
    assert not children()


def test_it_goes_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.name() == "p2pd"
    parent.kill()
    assert psutil.wait_procs([child], timeout=QUICK)[1] == []
    parent.wait(QUICK)
    parent.stdout.close()
    clear_up_after(parent.pid)


@pytest.mark.parametrize("whose", ["asker", "answerer"])
async def test_when_it_dies_what_is_under_way_fails_and_the_rest_goes_on(whose: str) -> None:
    asked = asyncio.Event()

    async def held(sender: str, request: LeaveRequest) -> Ack:
        asked.set()
        return await hold(sender, request)

    async with SITES.listening(ALICE) as (alice, at_alice):
        (of_alice,) = children()
        async with SITES.listening(BOB) as (bob, at_bob):
            alice.introduce(bob.node, at_bob)
            bob.introduce(alice.node, at_alice)
            of_bob = next(child for child in children() if child != of_alice)
            bob.serve(LEAVE, held)
            bob.serve_push(take_all)
            work = [
                asyncio.create_task(alice.call(bob.node, LEAVE, LEAVING, 60)),
                asyncio.create_task(alice.push(bob.node, endless())),
            ]
            await asyncio.wait_for(asked.wait(), QUICK)
            (of_alice if whose == "asker" else of_bob).kill()
            done, pending = await asyncio.wait(work, timeout=QUICK)
            assert not pending
            assert {type(task.exception()) for task in done} == {PeerLost}
            for carrier, other in ((alice, bob), (bob, alice)):
                other.serve(LEAVE, ack)
                await again(carrier, other.node)
