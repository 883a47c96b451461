"""The network of network.py, quicker: a call is three timers and one task, so that thousands of runs take an hour."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from simulation.network import Network, SimCarrier, _copy

from pier_node.wire.addresses import Choice
from pier_node.wire.carrier import BEAT, HELLO, BadMessage, Chunk, Method, PeerLost, PeerRefused, Q, R
from pier_proto.v1.peer_pb2 import FetchRequest, HelloReply, HelloRequest

if TYPE_CHECKING:
    from simulation.process import Process


class HuntCarrier(SimCarrier):
    """A site's carrier of one process."""

    def __init__(self, network: Network, node: str, here: Process) -> None:
        super().__init__(network, node)
        self.here = here
        self.context = copy_context()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run as a part of this process, whoever causes it."""
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    async def listen(self, _at: str, _advertise: str | None, _peers: Sequence[str]) -> Choice:
        """Come onto the network."""
        self.network.carriers[self.node] = self
        return Choice(self.node, "", "It listens.")

    def count_from(self, sent: int) -> None:
        """Bytes are not counted here."""

    async def stop(self) -> None:
        """Leave it."""
        self.die()

    def die(self) -> None:
        """Nothing comes and goes any more."""
        self.dead = True
        if self.network.carriers.get(self.node) is self:
            del self.network.carriers[self.node]
        self.gone.set()

    def refuse(self, _nodes: Iterable[str], _why: str) -> None:
        """Nobody is put out in this hunt."""

    def bytes_sent_to(self, _peer: str) -> int:
        """Nobody counts."""
        return 0

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        """Addresses are node ids."""
        return await self.call(address, HELLO, request, timeout)

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        """See Carrier."""
        call = _Call(self, peer, method, request)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout, call.fail, PeerLost(peer, f"no answer in {timeout:.1f} s"))
        try:
            reply: R = await call.answer
            return reply
        finally:
            timer.cancel()
            call.hang_up()

    async def pull(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """See Carrier."""
        target = await self.network.hop(self, peer)
        if target is None or target.on_pull is None:
            raise PeerLost(peer, "unreachable")
        try:
            async for chunk in target.on_pull(self.node, request):
                cut = self.network.random.random() < self.network.weather.cut_stream
                if cut or target.dead or not self.network.reaches(self.node, peer):
                    raise PeerLost(peer, "stream cut")
                yield _copy(chunk)
        except BadMessage as bad:
            raise PeerRefused(peer, str(bad)) from bad


class _Call:
    """One question on its way there and back."""

    def __init__(self, source: HuntCarrier, peer: str, method: Method[Any, Any], request: Any) -> None:
        self._source, self._peer, self._method = source, peer, method
        self._network, self._loop = source.network, asyncio.get_running_loop()
        self._data = request.SerializeToString()
        self._request = type(request)
        self._work: asyncio.Task[Any] | None = None
        self.answer: asyncio.Future[Any] = self._loop.create_future()
        if not source.dead:
            self._later(self._arrive)

    def _later(self, then: Any, *rest: Any) -> None:
        weather = self._network.weather
        self._loop.call_later(weather.delay + self._network.random.random() * weather.jitter, then, *rest)

    def _lost(self) -> bool:
        network = self._network
        return not network.reaches(self._source.node, self._peer) or network.random.random() < network.weather.loss

    def fail(self, error: Exception) -> None:
        """End it."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def hang_up(self) -> None:
        """Nobody waits for the answer any more."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
        if not self.answer.done():
            self.answer.cancel()

    def _arrive(self) -> None:
        if self._lost():
            return
        target = self._network.carriers.get(self._peer)
        if target is None:
            self.fail(PeerLost(self._peer, "connection refused"))
        elif self._method.name not in target.handlers:
            return
        elif self._method is BEAT:
            self._beat(target)
        else:
            if self._network.random.random() < self._network.weather.repeat:
                target.spawn(self._handled(target))
            self._work = target.spawn(self._handled(target))
            self._work.add_done_callback(self._back)

    def _beat(self, target: SimCarrier) -> None:
        """The answer to a beat waits for nothing, so it needs no task."""
        assert isinstance(target, HuntCarrier)
        target.context.run(self._step, self._handled(target))

    def _step(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            work.send(None)
        except StopIteration as done:
            self._later(self._deliver, done.value.SerializeToString())
        else:
            raise AssertionError("the answer to a beat waits for something")

    async def _handled(self, target: SimCarrier) -> Any:
        try:
            return await target.handlers[self._method.name](self._source.node, self._request.FromString(self._data))
        except (BadMessage, PeerLost) as error:
            return error

    def _back(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.fail(PeerLost(self._peer, "connection reset"))
            return
        if error := task.exception():
            self._source.here.world.failed(f"unhandled: {self._peer}: the answer to {self._method.name}: {error!r}")
            return
        result = task.result()
        if isinstance(result, Exception):
            self._later(self._refused, result)
        else:
            self._later(self._deliver, result.SerializeToString())

    def _refused(self, bad: Exception) -> None:
        if not self._lost():
            self.fail(PeerRefused(self._peer, str(bad)))

    def _deliver(self, data: bytes) -> None:
        if not self._lost() and not self.answer.done():
            self.answer.set_result(self._method.reply.FromString(data))
