"""What comes a moment before this site has begun the attempt waits for it; what comes after it is refused at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pier_node.base.tasks import Signal
from pier_node.pipeline.dispatch import Dispatch
from pier_node.wire.carrier import TALLY, BadMessage
from pier_proto.v1.peer_pb2 import Total, Worked

NAME = b"7" * 32


class Here:
    """A site that has begun nothing yet."""

    def __init__(self) -> None:
        self.attempt: Any = None
        self.begun, self.committed, self.news = b"", 2, Signal()
        self._handlers: dict[Any, Any] = {}
        carrier: Any = SimpleNamespace(serve=self._handlers.__setitem__, serve_push=lambda _: None)
        state = (lambda: self.attempt), (lambda: self.begun), (lambda: self.committed)
        Dispatch(carrier, self._streams, *state, self.news)

    async def _streams(self, _sender: str, _chunks: Any) -> None:
        raise AssertionError("no stream comes here")

    def begin(self) -> None:
        async def tally(sender: str, worked: Worked) -> Total:
            return Total(loss=3.5)

        self.attempt, self.begun = SimpleNamespace(plan=SimpleNamespace(name=NAME), tally=tally), NAME
        self.news.notify()

    async def tell(self) -> Any:
        return await self._handlers[TALLY]("beta", Worked(attempt=NAME, round=3))


async def test_a_site_that_is_faster_than_this_one_is_answered() -> None:
    here = Here()
    told = asyncio.create_task(here.tell())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not told.done()
    here.begin()
    assert (await told).loss == 3.5


@pytest.mark.parametrize("begun", [True, False])
async def test_what_is_over_is_refused(begun: bool) -> None:
    here = Here()
    if begun:
        here.begin()
        here.attempt = None
    else:
        here.committed = 3
    with pytest.raises(BadMessage, match="that attempt is over"):
        await here.tell()
