"""Discovery: sites tell hivemind's DHT where they are reached, so that a peer whose address changed is found again.

What the DHT says is a hint and no more: who answers at an address proves on the line who it is. Every site meets every
other, so the lookup is short; hivemind's own, DHTNode's, leaves tasks behind that asyncio complains about.

Identity proofs: which node a libp2p peer is.

libp2p proves that the other end of a connection holds the key of its peer id, and nothing else. An identity proof binds
that peer id to a node: the node's certificate, which only a holder of the run's token can issue, and a signature of the
peer id by the key in it. To anybody but that peer it is worth nothing, so it may be shown to all.

Who may take part in the run's DHT, and what it keeps. What hivemind's DHT unpacks is MessagePack, never a pickle.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils.auth import AuthorizerBase

from pier_node.identity.certificates import Credentials, node_id_of_certificate
from pier_node.wire.multiaddr import are_routes
from pier_proto.v1.stream_pb2 import IdentityProof

if TYPE_CHECKING:
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.p2p import P2P


_ALGORITHM = ec.ECDSA(hashes.SHA256())


def issue(node: str, credentials: Credentials | None, peer: bytes) -> IdentityProof:
    """A node's identity proof for its libp2p peer id; without credentials it only says a name."""
    if credentials is None:
        return IdentityProof(node=node)
    proof = credentials.key.sign(_signed(peer), _ALGORITHM)
    return IdentityProof(node=node, certificate=credentials.cert_pem, proof=proof)


@lru_cache(maxsize=2048)
def bearer(ca: bytes, certificate: bytes, proof: bytes, peer: bytes) -> str:
    """The node id of a libp2p peer that shows this.

    Args:
        ca: certificate of the run's authority (PEM).

    Raises:
        ValueError: the identity proof is of another run, another node or another peer, forged, or not valid now.
    """
    node = node_id_of_certificate(certificate)
    try:
        certified(ca, certificate).verify(proof, _signed(peer), _ALGORITHM)
    except InvalidSignature as error:
        raise ValueError("its identity_proof is of another libp2p peer") from error
    return node


@lru_cache(maxsize=2048)
def certified(ca: bytes, certificate: bytes) -> ec.EllipticCurvePublicKey:
    """The key that the run's authority certified (both PEM). Raises ValueError: it did not, or not for now."""
    shown = x509.load_pem_x509_certificate(certificate)
    try:
        shown.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
    except (InvalidSignature, ValueError, TypeError) as error:
        raise ValueError("its certificate is of another run: the tokens differ") from error
    now = datetime.now(UTC)
    if now < shown.not_valid_before_utc:
        raise ValueError("its certificate is not valid yet: the clocks of the two sites differ by more than a day")
    if now > shown.not_valid_after_utc:
        raise ValueError("its certificate has expired: set the clock there, or restart that node")
    key = shown.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("the certificate's key is not of the kind P-256")
    return key


def _signed(peer: bytes) -> bytes:
    return b"pier identity_proof\0" + peer


RECORD_BYTES = 2048
_NODE_BYTES = 16


class Holders(AuthorizerBase):  # type: ignore[misc]
    """Lets only holders of the run's token ask and answer: each message carries a certificate and is signed.

    An answer names its question. A question may be asked again by whoever heard it, and does no harm then: what it
    stores is what its author said.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials, self._key = credentials, credentials.key

    async def sign_request(self, request: Any, _service_public_key: Any) -> None:
        """Called by hivemind before it asks."""
        request.auth.client_access_token.public_key = self._credentials.cert_pem
        request.auth.nonce = secrets.token_bytes(16)
        request.auth.signature = self._key.sign(request.SerializeToString(deterministic=True), _ALGORITHM)

    async def validate_request(self, request: Any) -> bool:
        """Called by hivemind before it answers."""
        return self._signed(request, request.auth.client_access_token.public_key)

    async def sign_response(self, response: Any, request: Any) -> None:
        """Called by hivemind after it answered."""
        response.auth.service_access_token.public_key = self._credentials.cert_pem
        response.auth.nonce = request.auth.nonce
        response.auth.signature = self._key.sign(response.SerializeToString(deterministic=True), _ALGORITHM)

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Called by hivemind before it believes an answer."""
        same = response.auth.nonce == request.auth.nonce
        return same and self._signed(response, response.auth.service_access_token.public_key)

    def _signed(self, message: Any, certificate: bytes) -> bool:
        signature = message.auth.signature
        message.auth.signature = b""
        try:
            key = certified(self._credentials.ca_pem, certificate)
            key.verify(signature, message.SerializeToString(deterministic=True), _ALGORITHM)
        except (ValueError, InvalidSignature):
            return False
        return True


class Records(RecordValidatorBase):  # type: ignore[misc]
    """Keeps nothing but short records of where the sites of a run are."""

    def __init__(self, run_hash: bytes) -> None:
        self._run = run_hash

    def validate(self, record: DHTRecord) -> bool:
        """Called by hivemind before it keeps or believes a record."""
        node = record.value[:_NODE_BYTES].decode(errors="replace")
        return len(record.value) <= RECORD_BYTES and record.key == key_of(self._run, node).to_bytes()


def key_of(run_hash: bytes, node: str) -> DHTID:
    """Under which key the record of a node is kept."""
    return DHTID.generate(source=run_hash + node.encode())


def record(node: str, address: str) -> bytes:
    """What a node says of itself."""
    return f"{node} {address}".encode()


def said_by(node: str, value: bytes) -> str:
    """The address in a record; "": it is of another node."""
    who, _, address = value.decode(errors="replace").partition(" ")
    return address if who == node else ""


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

        key, value, until = key_of(self._run, self._node), record(self._node, self._address), get_dht_time() + LASTING
        leaders = self._dht.routing_table.get_nearest_neighbors(key, REPLICAS)
        await asyncio.gather(*(self._dht.call_store(peer, [key], [value], until) for _, peer in leaders))
