"""Bounds of the messages between a site and the coordinator, checked on arrival before anything else reads them."""

from __future__ import annotations

import math
import re
from typing import TypeVar

from google.protobuf.message import Message

from pier_node.config.run import SITES
from pier_node.engine.messages import WORDS
from pier_node.experts.config import MOST_DOMAINS
from pier_node.experts.sheet import MOST_SCORED
from pier_node.pipeline.paths_file import MOST_BYTES
from pier_node.wire import bounds as peers
from pier_node.wire import rules
from pier_node.wire.carrier import BadMessage
from pier_node.wire.files import PIECE
from pier_node.wire.rules import AMOUNT, ANY, COUNT, HASH, LOSS, NODE, Many, Only, Part, below, or_empty, size, text
from pier_proto.v1 import coordinator_pb2 as pb
from pier_proto.v1 import peer_pb2

MESSAGE_BYTES = 512 << 10
"""Maximum size of a message, in bytes: a round of 1,024 sites has a proof of up to 390 kB, and what a site tells the
witness beside it takes up to 65 kB."""
RECORDS = 256
"""Maximum number of records in a report."""
YEAR_9999 = 253_370_764_800
EXPERTS, DOMAINS = MOST_DOMAINS, MOST_SCORED
SHEET_BYTES = 8 << 20
"""Maximum size of a score sheet, in bytes: no more of a split is scored than the node's experts/domains.py keeps."""

M = TypeVar("M", bound=Message)

NAME = text(64)
TEXT = text(2000, breaks="\n\t")
TIME = Only("seconds since 1970, before the year 9999", lambda value: 0 <= value < YEAR_9999)
PLAN = Only("32 hex digits", lambda value: re.fullmatch("[0-9a-f]{32}", value) is not None)
FRACTION = Only("from 0 to 1, or NaN: not known", lambda value: math.isnan(value) or 0 <= value <= 1)
LEASE = size(1, 32)
PEM = size(1, 8192)
TRANSPORT = Only("grpc or hivemind", lambda value: value in ("grpc", "hivemind"))

SOURCE = Only("a source of text", lambda value: value in ("builtin", "text", "jsonl", "parquet"))
WEIGHTS = Only("64 hex digits", lambda value: re.fullmatch("[0-9a-f]{64}", value) is not None)

AS_BETWEEN_SITES = (
    peer_pb2.Place,
    peer_pb2.Pulse,
    peer_pb2.Revocations,
    peer_pb2.WitnessRequest,
    peer_pb2.Link,
    peer_pb2.Ballot,
    peer_pb2.Signed,
    peer_pb2.DoubleVote,
    peer_pb2.TokenizerRequest,
)
"""Messages with the bounds that they have between sites."""

FIELDS = rules.complete(
    {
        peer_pb2.Site: {**peers.FIELDS[peer_pb2.Site], "name": NAME},
        **{kind: peers.FIELDS[kind] for kind in AS_BETWEEN_SITES},
        pb.EnrolRequest: {
            "protocol": ANY,
            "name": NAME,
            "public_key": size(1, 512),
            "proof": size(1, 128),
            "time": TIME,
        },
        pb.EnrolReply: {"certificate": PEM, "authority": PEM, "run_config": text(rules.RUN_CONFIG), "node": NODE},
        pb.RegisterRequest: {
            "protocol": ANY,
            "run_hash": HASH,
            "site": Part(needed=True),
            "transport": TRANSPORT,
            "version": NAME,
            "workers": below(1 << 16),
            "time": TIME,
        },
        pb.RegisterReply: {
            "lease": LEASE,
            "lease_seconds": AMOUNT,
            "heartbeat_seconds": AMOUNT,
            "founder": NODE,
            "slot": below(SITES),
            "roster": Many(Part(), SITES),
            "order": Part(needed=True),
        },
        pb.HeartbeatRequest: {
            "lease": LEASE,
            "pulse": Part(needed=True),
            "order": COUNT,
            "revocations": COUNT,
        },
        pb.Paths: {"round": COUNT, "content": size(1, MOST_BYTES)},
        pb.HeartbeatReply: {
            "order": COUNT,
        },
        pb.WatchRequest: {"lease": LEASE},
        pb.Order: {"epoch": COUNT, "assignment": Part(needed=True)},
        pb.Assignment: {},
        pb.Stage: {"number": peers.STAGE},
        pb.Replica: {},
        pb.Expert: {
            "plan": PLAN,
            "jobs": Many(Part(), EXPERTS),
            "checkpoints": Many(Part(), EXPERTS),
        },
        pb.ExpertCheckpoint: {"job": below(EXPERTS), "step": COUNT, "size": COUNT, "digest": WEIGHTS},
        pb.Scoring: {
            "id": PLAN,
            "experts": Many(PLAN, EXPERTS),
            "domains": Many(Part(), DOMAINS),
            "rows": below(1 << 31),
        },
        pb.ScoredDomain: {
            "name": NAME,
            "source": SOURCE,
            "path": text(4096),
            "text_field": text(256),
            "domain_hash": or_empty(PLAN),
        },
        pb.ExpertJob: {
            "number": below(EXPERTS),
            "domain": NAME,
            "source": SOURCE,
            "path": text(4096),
            "text_field": text(256),
            "domain_hash": PLAN,
            "size": Only("S, M or L", lambda value: value in ("S", "M", "L")),
            "ffn_dim": below(1 << 24),
            "steps": COUNT,
            "seed": ANY,
            "batch_size": below(1 << 20),
            "lr": AMOUNT,
            "min_lr": AMOUNT,
            "warmup_steps": COUNT,
            "max_epochs": AMOUNT,
            "after": below(EXPERTS + 1),
            "flops": AMOUNT,
        },
        pb.ReportRequest: {
            "lease": LEASE,
            "stream": size(1, 32),
            "first": COUNT,
            "records": Many(Part(), RECORDS),
            "dropped": COUNT,
        },
        pb.ReportReply: {"stored": COUNT},
        pb.Record: {
            "time": TIME,
        },
        pb.Sample: {
            "inner_step": COUNT,
            "tokens": COUNT,
            "tokens_per_second": AMOUNT,
            "loss": LOSS,
            "utilisation": FRACTION,
            "bytes_sent": COUNT,
            "memory": COUNT,
            "device": text(256),
            "device_memory": COUNT,
            "mfu": AMOUNT,
            "cpu": AMOUNT,
            "gradient_norm": AMOUNT,
        },
        pb.RoundRecord: {
            "round": COUNT,
            "digest": or_empty(HASH),
            "members": rules.NODES,
            "compute": AMOUNT,
            "waiting": AMOUNT,
            "exchange": AMOUNT,
            "retry": AMOUNT,
            "steps": COUNT,
            "inner_step": COUNT,
            "tokens": COUNT,
            "bytes_sent": COUNT,
            "loss": LOSS,
            "validation_loss": LOSS,
            "sample": text(WORDS, breaks="\n\t"),
        },
        pb.LinkRecord: {"peer": NODE, "round_trip": AMOUNT, "bandwidth": AMOUNT, "bytes_sent": COUNT},
        pb.Note: {"level": below(101), "text": TEXT},
        pb.ExpertRecord: {
            "plan": PLAN,
            "job": below(EXPERTS),
            "name": or_empty(PLAN),
            "step": COUNT,
            "training_loss": LOSS,
            "tokens": COUNT,
            "flops": AMOUNT,
            "seconds": AMOUNT,
            "loss": AMOUNT,
            "parent_loss": AMOUNT,
            "standard_error": AMOUNT,
            "epochs": AMOUNT,
            "problem": TEXT,
            "weights": or_empty(WEIGHTS),
        },
        pb.DeliverRequest: {
            "lease": or_empty(LEASE),
            "size": below(SHEET_BYTES + 1),
            "digest": or_empty(HASH),
            "piece": size(0, PIECE),
            "offset": below(SHEET_BYTES + 1),
        },
        pb.ScoreSheet: {"scoring": PLAN, "expert": PLAN, "domain": NAME, "problem": TEXT},
        pb.DeliverReply: {},
        pb.ArrivedRequest: {"lease": LEASE, "digest": HASH},
        pb.ArrivedReply: {"offset": COUNT},
        pb.CheckpointPart: {
            "lease": or_empty(LEASE),
            "plan": or_empty(PLAN),
            "piece": size(0, PIECE),
            "offset": COUNT,
        },
        pb.GiveCheckpointReply: {},
        pb.FetchCheckpointRequest: {
            "lease": LEASE,
            "plan": PLAN,
            "job": below(EXPERTS),
            "digest": or_empty(WEIGHTS),
            "offset": COUNT,
        },
    }
)


def _record(record: pb.Record) -> str:
    return "" if record.WhichOneof("body") else "records nothing that this version knows"


def _assignment(assignment: pb.Assignment) -> str:
    return "" if assignment.WhichOneof("kind") else "assigns nothing that this version knows"


RULES = rules.Rules(FIELDS, {pb.Record: _record, pb.Assignment: _assignment})


def parse(kind: type[M], raw: bytes) -> M:
    """Parse a message of this kind and check its bounds. Raises BadMessage."""
    if len(raw) > MESSAGE_BYTES:
        raise BadMessage(f"a {kind.__name__} of {len(raw)} bytes: at most {MESSAGE_BYTES} are taken")
    return RULES.parse(kind, raw)
