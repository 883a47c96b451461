"""Discovery over hivemind's DHT: sites publish their addresses, so that a peer whose address changed is found again.

What the DHT says is only a hint: the node at an address proves its identity on the connection itself. Every site knows
every other, so lookups are short; hivemind's own DHTNode leaves tasks behind that asyncio warns about.

`Holders` decides who may take part in the run's DHT, and `Records` what the DHT keeps. hivemind's DHT unpacks
MessagePack, never a pickle.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.timed_storage import get_dht_time

from pier_node.base.tasks import cancel_and_wait
from pier_node.identity.certificates import Credentials, certified_key
from pier_node.identity.node import ALGORITHM
from pier_node.wire.addresses import are_routes

RECORD_BYTES = 2048
_NODE_BYTES = 16


class Holders(AuthorizerBase):  # type: ignore[misc]
    """Admits only holders of the run's token to the DHT: each message carries a certificate and is signed.

    An answer names its question. Whoever hears a question can replay it, which does no harm: it stores only what its
    author said.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials, self._key = credentials, credentials.key

    async def sign_request(self, request: Any, _service_public_key: Any) -> None:
        """Called by hivemind before it sends a request."""
        request.auth.client_access_token.public_key = self._credentials.cert_pem
        request.auth.nonce = secrets.token_bytes(16)
        request.auth.signature = self._key.sign(request.SerializeToString(deterministic=True), ALGORITHM)

    async def validate_request(self, request: Any) -> bool:
        """Called by hivemind before it answers a request."""
        return self._signed(request, request.auth.client_access_token.public_key)

    async def sign_response(self, response: Any, request: Any) -> None:
        """Called by hivemind after it prepared a response."""
        response.auth.service_access_token.public_key = self._credentials.cert_pem
        response.auth.nonce = request.auth.nonce
        response.auth.signature = self._key.sign(response.SerializeToString(deterministic=True), ALGORITHM)

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Called by hivemind before it accepts a response."""
        same = response.auth.nonce == request.auth.nonce
        return same and self._signed(response, response.auth.service_access_token.public_key)

    def _signed(self, message: Any, certificate: bytes) -> bool:
        signature = message.auth.signature
        message.auth.signature = b""
        try:
            key = certified_key(self._credentials.ca_pem, certificate)
            key.verify(signature, message.SerializeToString(deterministic=True), ALGORITHM)
        except (ValueError, InvalidSignature):
            return False
        return True


class Records(RecordValidatorBase):  # type: ignore[misc]
    """Keeps only short records of the addresses of a run's sites."""

    def __init__(self, run_hash: bytes) -> None:
        self._run = run_hash

    def validate(self, record: DHTRecord) -> bool:
        """Called by hivemind before it keeps or accepts a record."""
        node = record.value[:_NODE_BYTES].decode(errors="replace")
        return len(record.value) <= RECORD_BYTES and record.key == key_of(self._run, node).to_bytes()


def key_of(run_hash: bytes, node: str) -> DHTID:
    """The key of a node's record."""
    return DHTID.generate(source=run_hash + node.encode())


def record(node: str, address: str) -> bytes:
    """The record that a node publishes about itself."""
    return f"{node} {address}".encode()


def said_by(node: str, value: bytes) -> str:
    """The address in a record; "" if it is another node's record."""
    who, _, address = value.decode(errors="replace").partition(" ")
    return address if who == node else ""


T = TypeVar("T")

PUBLISH = 60.0
"""Seconds between two times that a site publishes its address."""
LASTING = 600.0
"""Lifetime of a record in seconds; the clocks of two sites may differ by some minutes."""
ANSWER = 5.0
"""Seconds for a lookup."""
UNANSWERED = 60.0
"""Seconds until hivemind gives up a question. An answer at just that moment ends all others (hivemind 1.1.12)."""
REPLICAS, BUCKET, DEPTH = 5, 20, 5
"""Sites that keep a record; k and b of Kademlia's routing table (Maymounkov and Mazières, IPTPS 2002)."""
HOPS = 3


class Discovery:
    """This node's part of the DHT, which keeps records of one run only."""

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None) -> None:
        self._node, self._run, self._credentials = node, run_hash, credentials
        self._address = ""
        self._dht: DHTProtocol | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._questions: set[asyncio.Task[Any]] = set()

    async def join(self, p2p: P2P) -> None:
        """Take part through a p2pd that has just come up."""
        holders = Holders(self._credentials) if self._credentials else None
        self._dht = await DHTProtocol.create(
            *(p2p, DHTID.generate(), BUCKET, DEPTH, REPLICAS, UNANSWERED),
            record_validator=Records(self._run),
            authorizer=holders,
        )

    def publish(self, address: str) -> None:
        """Publish from now on that this node is reached at this address."""
        self._address = address
        self._publishing = asyncio.create_task(self._publish())

    def meet(self, peer: bytes) -> None:
        """Learn that a peer takes part, and let the peer learn the same of this node."""
        self._begin(self._met(peer))

    async def find(self, node: str) -> str:
        """The multiaddrs that a node has published; "" if nobody knows them."""
        question = self._begin(self._found(node))
        await asyncio.wait({question}, timeout=ANSWER)
        return question.result() if question.done() else ""

    async def stop(self) -> None:
        """Give up all questions, after p2pd has ended."""
        await cancel_and_wait(*self._questions, *([self._publishing] if self._publishing else []))

    def _begin(self, question: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Ask, and do not cancel before the answer: see UNANSWERED."""
        task = asyncio.create_task(question)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)
        return task

    async def _met(self, peer: bytes) -> None:
        place = await self._dht.call_ping(PeerID(peer)) if self._dht is not None else None
        if self._dht is not None and place is not None:
            await self._dht.update_routing_table(place, PeerID(peer))
            await self._tell()

    async def _found(self, node: str) -> str:
        if self._dht is None:
            return ""
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
        key, value, until = key_of(self._run, self._node), record(self._node, self._address), get_dht_time() + LASTING
        nearest = self._dht.routing_table.get_nearest_neighbors(key, REPLICAS)
        await asyncio.gather(*(self._dht.call_store(peer, [key], [value], until) for _, peer in nearest))
