"""What a message may hold: checked on arrival, before anything looks at it, so that nothing a peer sends surprises.

`FIELDS` says what every field of every message may hold, the functions after it what fields must be to each other. What
depends on where a node stands (this round, that ballot, this model's size) is checked by whoever handles the message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pier.v1.peer_pb2 import (
    AbortNotice,
    Ack,
    Ballot,
    Chunk,
    FetchRequest,
    HelloReply,
    HelloRequest,
    LeaveRequest,
    Manifest,
    MeetReply,
    MeetRequest,
    Phase,
    ProbeReply,
    ProbeRequest,
    Proposal,
    Pulse,
    Ready,
    SettleReply,
    SettleRequest,
    Share,
    Site,
    StateRequest,
    Tensor,
    Value,
    Vote,
)
from pier.v1.stream_pb2 import Opening, Passport
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM
from pier_node.wire.address import is_address
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage
from pier_node.wire.multiaddr import are_routes
from pier_node.wire.rules import Many, Only, Part, Rule, Rules, Table, increasing

SITES = 1024
"""Most sites of a run (RunSection.sites)."""
COUNTS = 2**53
"""Rounds, tokens and bytes stay below: whole numbers that JSON and a double hold exactly."""
ELEMENTS = 2**40
"""Most elements of a vector: 4 TiB of fp32."""
MANIFEST_HASHES = 400_000
"""Most pieces of a state: 12.5 MB of hashes, for 400 GiB of state in pieces of 1 MiB."""

FRAGMENTS = 64
NODE_ID = re.compile("[0-9a-f]{16}")
LEDGER_KEY = re.compile("[0-9a-f]{16}(/[1-9][0-9]?)?")

M = TypeVar("M", bound=Message)


def below(limit: int) -> Only:
    """Whole numbers below a limit."""
    return Only(f"below {limit}", lambda value: value < limit)


def text(most: int, breaks: str = "") -> Only:
    """Text that does nothing to a terminal that shows it; `breaks` are control characters allowed besides."""
    spaces = str.maketrans(dict.fromkeys(breaks, " "))
    return Only(
        f"at most {most} printable characters",
        lambda value: len(value) <= most and value.translate(spaces).isprintable(),
    )


def size(least: int, most: int) -> Only:
    """So many bytes."""
    span = f"{least}" if least == most else f"{least} to {most}"
    return Only(f"{span} bytes", lambda value: least <= len(value) <= most)


def one_of(values: Iterable[int]) -> Only:
    """A value of an enumeration."""
    known = frozenset(values)
    return Only("one that this version knows", lambda value: value in known)


def or_empty(rule: Only) -> Only:
    """What a rule allows, or nothing."""
    return Only(f"{rule.allowed}, or empty", lambda value: not value or rule.holds(value))


COUNT = below(COUNTS)
ELEMENT = below(ELEMENTS)
ANY = Only("anything", lambda _: True)
NODE = Only("a node id, 16 hex digits", lambda value: NODE_ID.fullmatch(value) is not None)
NODES = Many(NODE, SITES, ordered=True)
ENTRY = Only("a node id, or one with the number of a fragment", lambda value: LEDGER_KEY.fullmatch(value) is not None)
HASH = size(32, 32)
NONCE = size(1, 64)
REASON = text(4000, breaks="\n\t")
AMOUNT = Only("finite and not negative", lambda value: 0 <= value < math.inf)
LOSS = Only("finite, or NaN: none yet", lambda value: not math.isinf(value))
ADDRESS = Only("HOST:PORT, or multiaddrs", lambda value: is_address(value) or are_routes(value))
TENSORS = (ANCHOR, MOMENTUM, ADAM_M, ADAM_V)
TENSOR = Only(f"one of {', '.join(TENSORS)}", lambda value: value in TENSORS)
PADDING = size(0, CHUNK_BYTES)
VALUES = size(0, CHUNK_BYTES)

FIELDS: dict[type[Message], dict[str, Rule]] = {
    Ack: {},
    Site: {"node": NODE, "name": text(128), "address": or_empty(ADDRESS), "slot": below(SITES)},
    HelloRequest: {"protocol": ANY, "run_hash": or_empty(HASH), "site": Part()},
    HelloReply: {
        "protocol": ANY,
        "run_hash": HASH,
        "run_config": text(1 << 16),
        "site": Part(needed=True),
        "roster": Many(Part(), SITES),
        "seen_as": or_empty(ADDRESS),
    },
    Pulse: {
        "site": Part(needed=True),
        "phase": one_of(Phase.values()),
        "round": COUNT,
        "digest": or_empty(HASH),
        "inner_step": COUNT,
        "tokens": COUNT,
        "tokens_per_second": AMOUNT,
        "loss": LOSS,
        "validation_loss": LOSS,
        "bytes_sent": COUNT,
        "time": AMOUNT,
        "training_for": COUNT,
        "spread": LOSS,
        "pledge": or_empty(HASH),
    },
    LeaveRequest: {"node": NODE, "round": COUNT, "votes": NODES},
    Ballot: {"number": COUNT, "keeper": or_empty(NODE)},
    Value: {"origin": Part(needed=True), "digest": HASH, "members": NODES},
    Ready: {
        "node": NODE,
        "round": COUNT,
        "nonce": NONCE,
        "tokens": COUNT,
        "norm": AMOUNT,
        "bandwidth": AMOUNT,
        "seen": Part(),
        "voted": Part(),
        "voted_in": Part(),
        "voted_round": COUNT,
        "holds": ANY,
        "refuted": ANY,
        "suspects": NODES,
        "votes": NODES,
    },
    Share: {
        "node": NODE,
        "tokens": COUNT,
        "norm": AMOUNT,
        "offset": ELEMENT,
        "length": ELEMENT,
        "nonce": NONCE,
        "votes": NODES,
    },
    Proposal: {
        "verdict": one_of(Proposal.Verdict.values()),
        "round": COUNT,
        "ballot": Part(),
        "shares": Many(Part(), SITES),
        "adopt": Part(),
        "holders": Many(NODE, SITES),
        "other": or_empty(NODE),
        "reason": REASON,
    },
    Vote: {"node": NODE, "round": COUNT, "ballot": Part(needed=True), "value": Part(needed=True)},
    AbortNotice: {
        "node": NODE,
        "round": COUNT,
        "ballot": Part(needed=True),
        "suspect": or_empty(NODE),
        "reason": REASON,
    },
    MeetRequest: {
        "round": COUNT,
        "nonce": NONCE,
        "digest": HASH,
        "ledger": Table(NODE, COUNT, SITES),
        "holds": or_empty(HASH),
    },
    MeetReply: {"verdict": one_of(MeetReply.Verdict.values()), "partner": Part(), "other": or_empty(NODE)},
    SettleRequest: {
        "round": COUNT,
        "meeting": HASH,
        "yes": ANY,
        "digest": or_empty(HASH),
        "left": ANY,
        "at": COUNT,
    },
    SettleReply: {"outcome": one_of(SettleReply.Outcome.values()), "at": COUNT},
    Chunk: {
        "round": COUNT,
        "ballot": Part(),
        "stage": one_of(Chunk.Stage.values()),
        "offset": ELEMENT,
        "data": VALUES,
        "meeting": or_empty(HASH),
    },
    StateRequest: {"round": COUNT, "shadow": ANY, "moments": ANY},
    Tensor: {"name": TENSOR, "length": ELEMENT, "hashes": Many(HASH, MANIFEST_HASHES)},
    Manifest: {
        "round": COUNT,
        "digest": HASH,
        "members": NODES,
        "piece_length": Only("1 or more", lambda value: value > 0),
        "tensors": Many(Part(), len(TENSORS)),
        "adam_step": COUNT,
        "ledger": Table(ENTRY, COUNT, SITES * FRAGMENTS),
    },
    FetchRequest: {"round": COUNT, "shadow": ANY, "tensor": TENSOR, "offset": ELEMENT, "length": ELEMENT},
    ProbeRequest: {"padding": PADDING, "reply_size": below(CHUNK_BYTES + 1), "call_back": or_empty(ADDRESS)},
    ProbeReply: {"padding": PADDING, "time": AMOUNT, "reached": ANY, "detail": REASON},
    Passport: {"node": NODE, "certificate": size(0, 4096), "proof": size(0, 128)},
    Opening: {"protocol": ANY, "run_hash": or_empty(HASH), "to": or_empty(NODE), "passport": Part(needed=True)},
}


def _ballot(ballot: Ballot) -> str:
    return "" if bool(ballot.number) == bool(ballot.keeper) else "has a number without a keeper, or the reverse"


def _proposal(proposal: Proposal) -> str:
    nodes = [share.node for share in proposal.shares]
    if not increasing(nodes):
        return "has shares out of node-id order"
    going = proposal.verdict == Proposal.VERDICT_GO
    return "says go, but has no ballot or no shares" if going and not (proposal.ballot.number and nodes) else ""


def _meeting(reply: MeetReply) -> str:
    ready = reply.verdict == MeetReply.VERDICT_READY
    return "says that we meet, and not whom" if ready and not reply.HasField("partner") else ""


def _settling(request: SettleRequest) -> str:
    return "says yes to nothing" if request.yes and not request.digest else ""


def _chunk(chunk: Chunk) -> str:
    return "" if chunk.stage else "says of no stage that it belongs to it"


def _manifest(manifest: Manifest) -> str:
    for tensor in manifest.tensors:
        if len(tensor.hashes) != (pieces := -(-tensor.length // manifest.piece_length)):
            return f"has {len(tensor.hashes)} hashes for {pieces} pieces of {tensor.name}"
    names = {tensor.name for tensor in manifest.tensors}
    return "describes a tensor twice" if len(names) != len(manifest.tensors) else ""


RULES = Rules(
    FIELDS,
    {
        Ballot: _ballot,
        Proposal: _proposal,
        MeetReply: _meeting,
        SettleRequest: _settling,
        Chunk: _chunk,
        Manifest: _manifest,
    },
)


def check(message: Message) -> None:
    """Raise BadMessage, naming field, value and what is allowed, unless a message is within all bounds."""
    RULES.check(message)


def parse(kind: type[M], raw: bytes) -> M:
    """The message of this kind that was sent. Raises BadMessage."""
    try:
        message = kind.FromString(raw)
    except DecodeError as error:
        raise BadMessage(f"{len(raw)} bytes that are no {kind.__name__}") from error
    check(message)
    return message
