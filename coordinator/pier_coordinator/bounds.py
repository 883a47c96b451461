"""What the messages between a site and the coordinator may hold: checked on arrival, before anything looks at it."""

from __future__ import annotations

import math
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pier.v1.coordinator_pb2 import (
    Assignment,
    EnrolReply,
    EnrolRequest,
    HeartbeatReply,
    HeartbeatRequest,
    LinkRecord,
    Note,
    Order,
    Record,
    RegisterReply,
    RegisterRequest,
    Replica,
    ReportReply,
    ReportRequest,
    RoundRecord,
    Sample,
    WatchRequest,
)
from pier.v1.peer_pb2 import Pulse, Site
from pier_node.wire import bounds as peers
from pier_node.wire.bounds import AMOUNT, ANY, COUNT, HASH, LOSS, NODE, NODES, below, one_of, or_empty, size, text
from pier_node.wire.carrier import BadMessage
from pier_node.wire.rules import Many, Only, Part, Rule, Rules

MESSAGE_BYTES = 256 << 10
RECORDS = 256
"""Most records of a report."""
YEAR_9999 = 253_370_764_800
REVOKED = 4096
"""Most revoked nodes that a heartbeat's answer names: the latest."""

M = TypeVar("M", bound=Message)

NAME = text(64)
TEXT = text(2000, breaks="\n\t")
TIME = Only("seconds since 1970, before the year 9999", lambda value: 0 <= value < YEAR_9999)
FRACTION = Only("from 0 to 1, or NaN: not known", lambda value: math.isnan(value) or 0 <= value <= 1)
LEASE = size(1, 32)
PEM = size(1, 8192)
TRANSPORT = Only("grpc or hivemind", lambda value: value in ("grpc", "hivemind"))

FIELDS: dict[type[Message], dict[str, Rule]] = {
    Site: {**peers.FIELDS[Site], "name": NAME},
    Pulse: peers.FIELDS[Pulse],
    EnrolRequest: {"protocol": ANY, "name": NAME, "public_key": size(1, 512), "proof": size(1, 128), "time": TIME},
    EnrolReply: {"certificate": PEM, "authority": PEM, "run_config": text(1 << 16), "node": NODE},
    RegisterRequest: {
        "protocol": ANY,
        "run_hash": HASH,
        "site": Part(needed=True),
        "transport": TRANSPORT,
        "version": NAME,
        "workers": below(1 << 16),
        "time": TIME,
        "starting": ANY,
    },
    RegisterReply: {
        "lease": LEASE,
        "lease_seconds": AMOUNT,
        "heartbeat_seconds": AMOUNT,
        "founder": ANY,
        "slot": below(peers.SITES),
        "roster": Many(Part(), peers.SITES),
        "order": Part(needed=True),
    },
    HeartbeatRequest: {"lease": LEASE, "pulse": Part(needed=True), "order": COUNT},
    HeartbeatReply: {"order": COUNT, "revoked": Many(NODE, REVOKED)},
    WatchRequest: {"lease": LEASE},
    Order: {"epoch": COUNT, "activity": one_of(Order.Activity.values()), "assignment": Part(needed=True)},
    Assignment: {"replica": Part()},
    Replica: {},
    ReportRequest: {
        "lease": LEASE,
        "stream": size(1, 32),
        "first": COUNT,
        "records": Many(Part(), RECORDS),
        "dropped": COUNT,
    },
    ReportReply: {"stored": COUNT},
    Record: {"time": TIME, "sample": Part(), "round": Part(), "link": Part(), "note": Part()},
    Sample: {
        "inner_step": COUNT,
        "tokens": COUNT,
        "tokens_per_second": AMOUNT,
        "loss": LOSS,
        "utilisation": FRACTION,
        "bytes_sent": COUNT,
        "memory": COUNT,
    },
    RoundRecord: {
        "round": COUNT,
        "digest": or_empty(HASH),
        "members": NODES,
        "compute": AMOUNT,
        "waiting": AMOUNT,
        "exchange": AMOUNT,
        "retry": AMOUNT,
        "steps": COUNT,
        "tokens": COUNT,
        "bytes_sent": COUNT,
        "loss": LOSS,
        "validation_loss": LOSS,
    },
    LinkRecord: {"peer": NODE, "round_trip": AMOUNT, "bandwidth": AMOUNT, "bytes_sent": COUNT},
    Note: {"level": below(101), "text": TEXT},
}


def _record(record: Record) -> str:
    return "" if record.WhichOneof("body") else "records nothing that this version knows"


def _assignment(assignment: Assignment) -> str:
    return "" if assignment.WhichOneof("kind") else "assigns nothing that this version knows"


RULES = Rules(FIELDS, {Record: _record, Assignment: _assignment})


def parse(kind: type[M], raw: bytes) -> M:
    """The message of this kind that was sent. Raises BadMessage."""
    if len(raw) > MESSAGE_BYTES:
        raise BadMessage(f"a {kind.__name__} of {len(raw)} bytes: at most {MESSAGE_BYTES} are taken")
    try:
        message = kind.FromString(raw)
    except DecodeError as error:
        raise BadMessage(f"{len(raw)} bytes that are no {kind.__name__}") from error
    RULES.check(message)
    return message
