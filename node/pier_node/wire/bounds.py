"""Bounds: what a message may hold. They are checked on arrival, before anything else reads the message.

`FIELDS` has a rule for every field of every message; the functions after it check the fields of a message against each
other. Whatever depends on a node's state (this round, that ballot, this model's size) is checked by the code that
handles the message.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pier_node.config.run import SITES
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage
from pier_node.wire.rules import (
    ADDRESS,
    AMOUNT,
    ANY,
    COUNT,
    ELEMENT,
    ENTRY,
    FRAGMENTS,
    HASH,
    LOSS,
    MANIFEST_HASHES,
    NODE,
    NODES,
    NONCE,
    PADDING,
    REASON,
    REVOKED,
    RUN_CONFIG,
    SIGNATURE,
    TENSOR,
    TENSORS,
    VALUES,
    Many,
    Only,
    Part,
    Rule,
    Rules,
    Table,
    below,
    increasing,
    one_of,
    or_empty,
    size,
    text,
)
from pier_proto.v1.peer_pb2 import (
    AbortNotice,
    Ack,
    Activation,
    Ballot,
    Chunk,
    DoubleVote,
    Dropped,
    FetchRequest,
    Handover,
    HelloReply,
    HelloRequest,
    IterationPlan,
    LeaveRequest,
    Link,
    Manifest,
    MeetReply,
    MeetRequest,
    Path,
    Phase,
    Place,
    ProbeReply,
    ProbeRequest,
    Proposal,
    Pulse,
    Ready,
    Revocations,
    SettleReply,
    SettleRequest,
    Share,
    Signed,
    Site,
    StateRequest,
    Tensor,
    Total,
    Value,
    Vote,
    Worked,
)
from pier_proto.v1.stream_pb2 import IdentityProof, Opening

STAGES, MICROBATCHES, SIDE = 1024, 10_000, 2**31
"""Most stages of a pipeline, most microbatches of an iteration, and most elements along one side of a tensor sent."""
STAGE = below(STAGES)
SECONDS = Only("from 0 to 1e6", lambda value: 0 <= value <= 1e6)
"""Seconds of a task or a transfer: the path planner accepts no more (pier_node/pipeline/planning/problem.py)."""
STATE_STAGE = below(STAGES + 1)
"""The stage whose state is meant, counted from 1; 0 means the state of the run."""

PIPELINE: dict[type[Message], dict[str, Rule]] = {
    Place: {
        "stage": STAGE,
        "version": COUNT,
        "forward": SECONDS,
        "backward": SECONDS,
        "loss": SECONDS,
        "memory": below(MICROBATCHES),
        "transfer": Table(NODE, SECONDS, SITES),
        "round_trip": Table(NODE, SECONDS, SITES),
        "working": ANY,
    },
    IterationPlan: {
        "round": COUNT,
        "step": COUNT,
        "nodes": NODES,
        "stages": Many(STAGE, SITES),
        "paths": Many(Part(), MICROBATCHES),
        "waves": Many(below(MICROBATCHES + 1), MICROBATCHES),
        "newcomers": Many(STAGE, SITES),
        "candidates": NODES,
        "meet": ANY,
    },
    Path: {"sites": Many(below(SITES), STAGES)},
    Activation: {
        "attempt": HASH,
        "microbatch": below(MICROBATCHES),
        "hop": below(2 * STAGES + 1),
        "shape": Many(below(SIDE), 4),
        "dtype": one_of(Activation.Dtype.values()),
    },
    Worked: {"attempt": HASH, "square": AMOUNT, "loss": AMOUNT, "digest": or_empty(HASH), "round": COUNT},
    Total: {
        "square": AMOUNT,
        "loss": AMOUNT,
        "moved": Many(STAGE, STAGES),
        "digests": Many(HASH, STAGES),
    },
    Dropped: {"attempt": HASH, "suspect": or_empty(NODE), "reason": REASON},
}


def iteration_plan_flaw(plan: IterationPlan) -> str:
    """What is wrong between the fields of an iteration plan; "" if nothing is."""
    if len(plan.stages) != len(plan.nodes) or len(plan.newcomers) != len(plan.candidates):
        return "does not say of every site which stage it holds"
    if sum(plan.waves) != len(plan.paths):
        return "has other microbatches in its waves than paths"
    return ""


M = TypeVar("M", bound=Message)

STATEMENT = 96 << 10
"""Most bytes of a signed statement: an announcement that names all sites of a large run several times."""
LINKS = 1 << 14
DOUBLE_VOTES = 64
"""Most nodes that are excluded for double votes: more than can have been members one after another."""
HANDOVERS = Many(Part(), 64)

FIELDS: dict[type[Message], dict[str, Rule]] = {
    Ack: {},
    Site: {
        "node": NODE,
        "name": text(128),
        "address": or_empty(ADDRESS),
        "slot": below(SITES),
        "version": COUNT,
        "public": size(0, 128),
        "signature": size(0, 72),
    },
    HelloRequest: {"protocol": ANY, "run_hash": or_empty(HASH), "site": Part()},
    HelloReply: {
        "protocol": ANY,
        "run_hash": HASH,
        "run_config": text(RUN_CONFIG),
        "site": Part(needed=True),
        "roster": Many(Part(), SITES),
        "seen_as": or_empty(ADDRESS),
        "revocations": Part(),
        "double_votes": Many(Part(), DOUBLE_VOTES),
    },
    DoubleVote: {"one": Part(needed=True), "other": Part(needed=True)},
    Revocations: {"version": COUNT, "nodes": Many(NODE, REVOKED, ordered=True), "signature": SIGNATURE},
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
        "place": Part(),
        "wanted_stage": STAGE,
    },
    Signed: {"node": NODE, "statement": size(1, STATEMENT), "public": size(1, 256), "signature": size(1, 128)},
    Handover: {"node": NODE, "heir": NODE, "round": COUNT, "base": HASH, "votes": NODES, "number": ANY},
    LeaveRequest: {"node": NODE, "handovers": HANDOVERS, "asks": or_empty(HASH)},
    Ballot: {"number": COUNT, "leader": or_empty(NODE)},
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
        "holds": ANY,
        "refutation": Part(),
        "suspects": NODES,
        "votes": NODES,
        "base": HASH,
        "handovers": HANDOVERS,
    },
    Share: {"node": NODE, "tokens": COUNT, "norm": AMOUNT, "offset": ELEMENT, "length": ELEMENT},
    Proposal: {
        "verdict": one_of(Proposal.Verdict.values()),
        "round": COUNT,
        "ballot": Part(),
        "shares": Many(Part(), SITES),
        "readies": Many(Part(), SITES),
        "adopt": Part(),
        "holders": Many(NODE, SITES),
        "other": or_empty(NODE),
        "reason": REASON,
    },
    Vote: {
        "node": NODE,
        "round": COUNT,
        "ballot": Part(needed=True),
        "digest": HASH,
        "plan": HASH,
        "prior": Part(),
        "prior_digest": or_empty(HASH),
    },
    Link: {
        "round": COUNT,
        "digest": HASH,
        "base": or_empty(HASH),
        "ballot": Part(),
        "members": NODES,
        "votes": Many(Part(), SITES),
        "handovers": HANDOVERS,
    },
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
        "activation": Part(),
    },
    StateRequest: {
        "round": COUNT,
        "shadow": ANY,
        "moments": ANY,
        "stage": STATE_STAGE,
        "trusted": COUNT,
        "proof_only": ANY,
    },
    Tensor: {"name": TENSOR, "length": ELEMENT, "hashes": Many(HASH, MANIFEST_HASHES)},
    Manifest: {
        "round": COUNT,
        "digest": HASH,
        "members": NODES,
        "piece_length": AMOUNT,
        "tensors": Many(Part(), len(TENSORS)),
        "adam_step": COUNT,
        "ledger": Table(ENTRY, COUNT, SITES * FRAGMENTS),
        "proof": Many(Part(), LINKS),
    },
    FetchRequest: {
        "round": COUNT,
        "shadow": ANY,
        "tensor": TENSOR,
        "offset": ELEMENT,
        "length": ELEMENT,
        "stage": STATE_STAGE,
    },
    ProbeRequest: {
        "padding": PADDING,
        "reply_size": below(CHUNK_BYTES + 1),
        "call_back": or_empty(ADDRESS),
        "seen_as": or_empty(ADDRESS),
    },
    ProbeReply: {"padding": PADDING, "time": AMOUNT, "reached": ANY, "detail": REASON, "declined": ANY},
    **PIPELINE,
    IdentityProof: {"node": NODE, "certificate": size(0, 4096), "proof": size(0, 128)},
    Opening: {"protocol": ANY, "run_hash": or_empty(HASH), "to": or_empty(NODE), "identity_proof": Part(needed=True)},
}


def _ballot(ballot: Ballot) -> str:
    return "" if bool(ballot.number) == bool(ballot.leader) else "has a number without a leader, or the reverse"


def _proposal(proposal: Proposal) -> str:
    nodes = [share.node for share in proposal.shares]
    if not increasing(nodes):
        return "has shares out of node-id order"
    going = proposal.verdict == Proposal.VERDICT_GO
    if going and not (proposal.ballot.number and nodes):
        return "says go, but has no ballot or no shares"
    return "rests on announcements of others" if [it.node for it in proposal.readies] != nodes else ""


def _meeting(reply: MeetReply) -> str:
    ready = reply.verdict == MeetReply.VERDICT_READY
    return "says that we meet, and not whom" if ready and not reply.HasField("partner") else ""


def _settling(request: SettleRequest) -> str:
    return "says yes to nothing" if request.yes and not request.digest else ""


def _chunk(chunk: Chunk) -> str:
    return "" if chunk.stage else "says of no stage that it belongs to it"


def _manifest(manifest: Manifest) -> str:
    if manifest.tensors and not manifest.piece_length:
        return "has pieces of no length"
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
        IterationPlan: iteration_plan_flaw,
        Manifest: _manifest,
    },
)


def check(message: Message) -> None:
    """Raise BadMessage, naming the field, its value and what is allowed, unless a message is within all bounds."""
    RULES.check(message)


def parse(kind: type[M], raw: bytes) -> M:
    """Parse and check a message of this kind. Raises BadMessage."""
    try:
        message = kind.FromString(raw)
    except DecodeError as error:
        raise BadMessage(f"{len(raw)} bytes that are no {kind.__name__}") from error
    check(message)
    return message
