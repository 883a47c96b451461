"""Discovery: sites tell hivemind's DHT where they are reached, so that a peer whose address changed is found again.

What the DHT says is a hint and no more: who answers at an address proves on the line who it is. Every site meets every
other, so the lookup is short; hivemind's own, DHTNode's, leaves tasks behind that asyncio complains about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from pier_node.certificates import Credentials
from pier_node.wire.multiaddr import are_routes

if TYPE_CHECKING:
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.p2p import P2P

T = TypeVar("T")

PUBLISH = 60.0
"""Seconds between two times that a site says where it is."""
LASTING = 600.0
"""Seconds that it is remembered: the clocks of two sites may differ by some minutes."""
ANSWER = 5.0
"""Seconds for a lookup."""
UNANSWERED = 60.0
"""Seconds until hivemind gives up a question. An answer that comes just then ends all others (hivemind 1.1.12)."""
REPLICAS, BUCKET, DEPTH = 5, 20, 5
"""How many sites keep a record; and, of Kademlia's routing table, k and b (Maymounkov and Mazières, IPTPS 2002)."""
HOPS = 3


class Discovery:
    """This node's part of the DHT.

    Args:
        run_hash: of the run; records of other runs are not kept.
    """

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None) -> None:
        self._node, self._run, self._credentials = node, run_hash, credentials
        self._address = ""
        self._dht: DHTProtocol | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._questions: set[asyncio.Task[Any]] = set()

    async def join(self, p2p: P2P) -> None:
        """Take part through a p2pd that has just come up."""
        from hivemind.dht.protocol import DHTProtocol
        from hivemind.dht.routing import DHTID

        from pier_node.wire.hivemind_records import Holders, Records

        holders = Holders(self._credentials) if self._credentials else None
        self._dht = await DHTProtocol.create(
            *(p2p, DHTID.generate(), BUCKET, DEPTH, REPLICAS, UNANSWERED),
            record_validator=Records(self._run),
            authorizer=holders,
        )

    def publish(self, address: str) -> None:
        """Say from now on where this node is reached."""
        self._address = address
        self._publishing = asyncio.create_task(self._publish())

    def meet(self, peer: bytes) -> None:
        """Learn that a peer takes part, and let it learn so of this node."""
        self._begin(self._met(peer))

    async def find(self, node: str) -> str:
        """Where a node says that it is reached, by multiaddrs; "": nobody knows."""
        question = self._begin(self._found(node))
        await asyncio.wait({question}, timeout=ANSWER)
        return question.result() if question.done() else ""

    async def stop(self) -> None:
        """Give up all questions, after p2pd has ended."""
        work = {*self._questions, *({self._publishing} if self._publishing else set())}
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def _begin(self, question: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Ask, and do not let go before the answer: see UNANSWERED."""
        task = asyncio.create_task(question)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)
        return task

    async def _met(self, peer: bytes) -> None:
        from hivemind.p2p import PeerID

        place = await self._dht.call_ping(PeerID(peer)) if self._dht is not None else None
        if self._dht is not None and place is not None:
            await self._dht.update_routing_table(place, PeerID(peer))
            await self._tell()

    async def _found(self, node: str) -> str:
        if self._dht is None:
            return ""
        from pier_node.wire.hivemind_records import key_of, said_by

        key = key_of(self._run, node)
        asked, near = set[object](), dict(self._dht.routing_table.get_nearest_neighbors(key, REPLICAS))
        for _ in range(HOPS):
            peers = [peer for peer in near.values() if peer not in asked][:REPLICAS]
            asked |= set(peers)
            answers = await asyncio.gather(*(self._dht.call_find(peer, [key]) for peer in peers))
            found = [answer[key] for answer in answers if answer]
            records = [record for record, _ in found if record is not None]
            if records:
                address = said_by(node, max(records, key=lambda record: float(record.expiration_time)).value)
                return address if are_routes(address) else ""
            near = {near_by: peer for _, others in found for near_by, peer in others.items()}
        return ""

    async def _publish(self) -> None:
        while True:
            self._begin(self._tell())
            await asyncio.sleep(PUBLISH)

    async def _tell(self) -> None:
        if self._dht is None or not self._address:
            return
        from hivemind.utils.timed_storage import get_dht_time

        from pier_node.wire.hivemind_records import key_of, record

        key, value, until = key_of(self._run, self._node), record(self._node, self._address), get_dht_time() + LASTING
        keepers = self._dht.routing_table.get_nearest_neighbors(key, REPLICAS)
        await asyncio.gather(*(self._dht.call_store(peer, [key], [value], until) for _, peer in keepers))
