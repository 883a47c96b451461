"""Bounds: what a message may hold. They are checked on arrival, before anything else reads the message.

`FIELDS` has a rule for every field of every message; the functions after it check the fields of a message against each
other. Whatever depends on a node's state (this round, that ballot, this model's size) is checked by the code that
handles the message.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from pier_node.config.run import SITES
from pier_node.wire import rules
from pier_node.wire.carrier import CHUNK_BYTES, TOKENIZER_BYTES, BadMessage, Chunk, split
from pier_node.wire.rules import AMOUNT, ANY, COUNT, HASH, LOSS, NODE, NODES, REASON, Many, Part, below, or_empty, size
from pier_proto.v1 import peer_pb2 as peer
from pier_proto.v1 import stream_pb2 as stream

M = TypeVar("M", bound=Message)

STAGES, MICROBATCHES, SIDE = 1024, 10_000, 2**31
"""Most stages of a pipeline, most microbatches of an iteration, and most elements along one side of a tensor sent."""
STAGE = below(STAGES)
STATE_STAGE = below(STAGES + 1)
"""The stage whose state is meant, counted from 1; 0 means the state of the run."""
SECONDS = rules.Only("from 0 to 1e6", lambda value: 0 <= value <= 1e6)
"""Seconds of a task or a transfer: the path planner accepts no more (pier_node/pipeline/planning/problem.py)."""
STATEMENT = 96 << 10
"""Most bytes of a signed statement: an announcement that names all sites of a large run several times."""
LINKS = 1 << 14
VOUCHES = 8
"""Most steps from the founder of a run in pairs to a site that has standing there."""
DOUBLE_VOTES = 64
"""Most nodes that are excluded for double votes: more than can have been members one after another."""
MOST_HANDOVERS = 64
HANDOVERS = Many(Part(), MOST_HANDOVERS)
PARTS = Many(Part(), SITES)

FIELDS = rules.complete(
    {
        peer.Ack: {},
        peer.Site: {
            "node": NODE,
            "name": rules.text(128),
            "address": or_empty(rules.ADDRESS),
            "slot": below(SITES),
            "version": COUNT,
            "public": size(0, 128),
            "signature": size(0, 72),
        },
        peer.HelloRequest: {"protocol": ANY, "run_hash": or_empty(HASH), "roster_hash": or_empty(HASH)},
        peer.HelloReply: {
            "protocol": ANY,
            "run_hash": HASH,
            "run_config": rules.text(rules.RUN_CONFIG),
            "site": Part(needed=True),
            "roster": PARTS,
            "seen_as": or_empty(rules.ADDRESS),
            "double_votes": Many(Part(), DOUBLE_VOTES),
            "time": AMOUNT,
            "roster_hash": or_empty(HASH),
        },
        peer.DoubleVote: {"one": Part(needed=True), "other": Part(needed=True)},
        peer.Revocations: {
            "version": COUNT,
            "nodes": Many(NODE, rules.REVOKED, ordered=True),
            "signature": rules.SIGNATURE,
        },
        peer.Pulse: {
            "site": Part(needed=True),
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
            "wanted_stage": STAGE,
            "vouches": Many(Part(), VOUCHES),
        },
        peer.Signed: {
            "node": NODE,
            "statement": size(1, STATEMENT),
            "public": size(1, 256),
            "signature": size(1, 128),
        },
        peer.Handover: {"node": NODE, "heir": NODE, "round": COUNT, "base": HASH, "votes": NODES, "number": ANY},
        peer.LeaveRequest: {"node": NODE, "handovers": HANDOVERS, "asks": or_empty(HASH)},
        peer.Ballot: {"number": COUNT, "leader": or_empty(NODE)},
        peer.Value: {"origin": Part(needed=True), "digest": HASH, "members": NODES},
        peer.Ready: {
            "node": NODE,
            "round": COUNT,
            "nonce": rules.NONCE,
            "tokens": COUNT,
            "norm": AMOUNT,
            "bandwidth": AMOUNT,
            "suspects": NODES,
            "votes": NODES,
            "base": HASH,
            "handovers": HANDOVERS,
        },
        peer.Share: {"node": NODE, "tokens": COUNT, "norm": AMOUNT, "offset": rules.ELEMENT, "length": rules.ELEMENT},
        peer.Proposal: {
            "round": COUNT,
            "shares": PARTS,
            "readies": PARTS,
            "holders": Many(NODE, SITES),
            "other": or_empty(NODE),
            "reason": REASON,
        },
        peer.Vote: {
            "node": NODE,
            "round": COUNT,
            "ballot": Part(needed=True),
            "digest": HASH,
            "plan": HASH,
            "prior_digest": or_empty(HASH),
        },
        peer.Link: {
            "round": COUNT,
            "digest": HASH,
            "base": or_empty(HASH),
            "members": NODES,
            "votes": PARTS,
            "handovers": HANDOVERS,
        },
        peer.WitnessRequest: {
            "base": HASH,
            "proof": Many(Part(), LINKS),
            "double_votes": Many(Part(), DOUBLE_VOTES),
            "handovers": HANDOVERS,
        },
        peer.WitnessReply: {"trusted": COUNT, "reason": REASON},
        peer.AbortNotice: {
            "node": NODE,
            "round": COUNT,
            "ballot": Part(needed=True),
            "suspect": or_empty(NODE),
            "reason": REASON,
        },
        peer.Vouch: {"node": NODE, "partner": NODE, "round": COUNT},
        peer.MeetRequest: {
            "round": COUNT,
            "nonce": rules.NONCE,
            "digest": HASH,
            "ledger": rules.Table(NODE, COUNT, SITES),
            "holds": or_empty(HASH),
        },
        peer.MeetReply: {"other": or_empty(NODE)},
        peer.SettleRequest: {"round": COUNT, "meeting": HASH, "digest": or_empty(HASH), "at": COUNT},
        peer.SettleReply: {"at": COUNT},
        peer.Chunk: {"round": COUNT, "offset": rules.ELEMENT, "data": rules.VALUES, "meeting": or_empty(HASH)},
        peer.StateRequest: {"round": COUNT, "stage": STATE_STAGE, "trusted": COUNT},
        peer.Tensor: {"name": rules.TENSOR, "length": rules.ELEMENT, "hashes": Many(HASH, rules.MANIFEST_HASHES)},
        peer.Manifest: {
            "round": COUNT,
            "digest": HASH,
            "members": NODES,
            "piece_length": AMOUNT,
            "tensors": Many(Part(), len(rules.TENSORS)),
            "adam_step": COUNT,
            "ledger": rules.Table(rules.ENTRY, COUNT, SITES * rules.FRAGMENTS),
            "proof": Many(Part(), LINKS),
        },
        peer.FetchRequest: {
            "round": COUNT,
            "tensor": or_empty(rules.TENSOR),
            "offset": rules.ELEMENT,
            "length": rules.ELEMENT,
            "stage": STATE_STAGE,
        },
        peer.TokenizerRequest: {"offset": below(TOKENIZER_BYTES)},
        peer.TokenizerPart: {"data": size(1, CHUNK_BYTES), "size": below(TOKENIZER_BYTES + 1)},
        peer.ProbeRequest: {
            "padding": rules.PADDING,
            "reply_size": below(CHUNK_BYTES + 1),
            "call_back": or_empty(rules.ADDRESS),
            "seen_as": or_empty(rules.ADDRESS),
        },
        peer.ProbeReply: {"padding": rules.PADDING, "time": AMOUNT, "detail": REASON},
        peer.Place: {
            "stage": STAGE,
            "version": COUNT,
            "forward": SECONDS,
            "backward": SECONDS,
            "loss": SECONDS,
            "memory": below(MICROBATCHES),
            "transfer": rules.Table(NODE, SECONDS, SITES),
            "round_trip": rules.Table(NODE, SECONDS, SITES),
        },
        peer.IterationPlan: {
            "round": COUNT,
            "step": COUNT,
            "nodes": NODES,
            "stages": Many(STAGE, SITES),
            "paths": Many(Part(), MICROBATCHES),
            "waves": Many(below(MICROBATCHES + 1), MICROBATCHES),
            "newcomers": Many(STAGE, SITES),
            "candidates": NODES,
        },
        peer.Path: {"sites": Many(below(SITES), STAGES)},
        peer.Activation: {
            "attempt": HASH,
            "microbatch": below(MICROBATCHES),
            "hop": below(2 * STAGES + 1),
            "shape": Many(below(SIDE), 4),
        },
        peer.Worked: {"attempt": HASH, "square": AMOUNT, "loss": AMOUNT, "digest": or_empty(HASH), "round": COUNT},
        peer.Total: {"square": AMOUNT, "loss": AMOUNT, "moved": Many(STAGE, STAGES), "digests": Many(HASH, STAGES)},
        peer.Dropped: {"attempt": HASH, "suspect": or_empty(NODE), "reason": REASON},
        stream.IdentityProof: {"node": NODE, "certificate": size(0, 4096), "proof": size(0, 128)},
        stream.Opening: {
            "protocol": ANY,
            "run_hash": or_empty(HASH),
            "to": or_empty(NODE),
            "identity_proof": Part(needed=True),
        },
    }
)


def _ballot(ballot: peer.Ballot) -> str:
    return "" if bool(ballot.number) == bool(ballot.leader) else "has a number without a leader, or the reverse"


def _proposal(proposal: peer.Proposal) -> str:
    nodes = [share.node for share in proposal.shares]
    if not rules.increasing(nodes):
        return "has shares out of node-id order"
    going = proposal.verdict == peer.Proposal.VERDICT_GO
    if going and not (proposal.ballot.number and nodes):
        return "says go, but has no ballot or no shares"
    return "rests on announcements of others" if [it.node for it in proposal.readies] != nodes else ""


def _meeting(reply: peer.MeetReply) -> str:
    ready = reply.verdict == peer.MeetReply.VERDICT_READY
    return "says that we meet, and not whom" if ready and not reply.HasField("partner") else ""


def _settling(request: peer.SettleRequest) -> str:
    return "says yes to nothing" if request.yes and not request.digest else ""


def _chunk(chunk: peer.Chunk) -> str:
    return "" if chunk.stage else "says of no stage that it belongs to it"


def _iteration_plan(plan: peer.IterationPlan) -> str:
    if len(plan.stages) != len(plan.nodes) or len(plan.newcomers) != len(plan.candidates):
        return "does not say of every site which stage it holds"
    return "has other microbatches in its waves than paths" if sum(plan.waves) != len(plan.paths) else ""


def _fetch(request: peer.FetchRequest) -> str:
    return "" if bool(request.tensor) != request.mean else "asks for neither a tensor nor a mean, or for both"


def _manifest(manifest: peer.Manifest) -> str:
    if manifest.tensors and not manifest.piece_length:
        return "has pieces of no length"
    for tensor in manifest.tensors:
        if len(tensor.hashes) != (pieces := -(-tensor.length // manifest.piece_length)):
            return f"has {len(tensor.hashes)} hashes for {pieces} pieces of {tensor.name}"
    names = {tensor.name for tensor in manifest.tensors}
    return "describes a tensor twice" if len(names) != len(manifest.tensors) else ""


RULES = rules.Rules(
    FIELDS,
    {
        peer.Ballot: _ballot,
        peer.Proposal: _proposal,
        peer.MeetReply: _meeting,
        peer.SettleRequest: _settling,
        peer.Chunk: _chunk,
        peer.IterationPlan: _iteration_plan,
        peer.Manifest: _manifest,
        peer.FetchRequest: _fetch,
    },
)


def parse(kind: type[M], raw: bytes) -> M:
    """Parse and check a message of this kind. Raises BadMessage."""
    return RULES.parse(kind, raw)


def parse_chunk(raw: bytes) -> Chunk:
    """Parse and check a chunk; its data is a view of `raw`. Raises BadMessage."""
    head, data = split(raw)
    header = parse(peer.Chunk, head)
    if data and header.data:
        raise BadMessage("Chunk.data is there twice")
    if not rules.VALUES.holds(data):
        raise BadMessage(f"Chunk.data = {len(data)} bytes: must be {rules.VALUES.allowed}")
    return Chunk.of(header, data or header.data)
