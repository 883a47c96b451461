from __future__ import annotations

import math
from contextlib import suppress

import pytest
from coordinator.cases import ALICE, BOB, CAROL, NOW, STREAM, Ticket, pulse, register_request
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from wire.samples import HASH, REVOCATIONS, changed
from wire.samples import LINK as PROOF

from pier_coordinator.service.bounds import DOMAINS, EXPERTS, FIELDS, MESSAGE_BYTES, RECORDS, SHEET_BYTES, parse
from pier_node.config.run import SITES
from pier_node.pipeline.paths_file import MOST_BYTES
from pier_node.wire.bounds import DOUBLE_VOTES, MOST_HANDOVERS
from pier_node.wire.carrier import BadMessage
from pier_node.wire.files import PIECE
from pier_node.wire.rules import REVOKED
from pier_proto.v1 import coordinator_pb2
from pier_proto.v1.coordinator_pb2 import (
    ArrivedReply,
    ArrivedRequest,
    Assignment,
    CheckpointPart,
    DeliverRequest,
    EnrolReply,
    Expert,
    ExpertCheckpoint,
    ExpertJob,
    ExpertRecord,
    FetchCheckpointRequest,
    HeartbeatReply,
    HeartbeatRequest,
    LinkRecord,
    Note,
    Order,
    Paths,
    Record,
    RegisterReply,
    Replica,
    ReportReply,
    ReportRequest,
    RoundRecord,
    Sample,
    ScoredDomain,
    ScoreSheet,
    Scoring,
    Stage,
    WatchRequest,
)
from pier_proto.v1.peer_pb2 import (
    Ballot,
    DoubleVote,
    Handover,
    Link,
    Place,
    Pulse,
    Revocations,
    Signed,
    Site,
    TokenizerRequest,
    Vote,
    WitnessRequest,
)

KINDS = sorted(FIELDS, key=lambda kind: kind.__name__)
SAMPLE = Sample(inner_step=1, tokens=2, tokens_per_second=3.0, loss=math.nan, utilisation=0.5, bytes_sent=4, memory=5)
ROUND = RoundRecord(round=1, digest=bytes(32), members=sorted([ALICE.node, BOB.node]), compute=1.5, loss=2.0)
LINK = LinkRecord(peer=BOB.node, round_trip=0.05, bandwidth=5e6, bytes_sent=7)
EXPERT = ExpertRecord(plan="ab" * 16, job=3, name="cd" * 16, step=40, training_loss=math.nan, done=True, loss=2.0)
NOTE = Note(level=30, text="uplink\nslow")
RECORD_LIST = [
    Record(time=NOW, sample=SAMPLE),
    Record(time=NOW, round=ROUND),
    Record(time=NOW, link=LINK),
    Record(time=NOW, note=NOTE),
    Record(time=NOW, expert=EXPERT),
]
ORDER = Order(epoch=3, activity=Order.ACTIVITY_PAUSE, assignment=Assignment(replica=Replica()))
JOB = ExpertJob(
    domain="topics",
    source="builtin",
    text_field="text",
    domain_hash="ab" * 16,
    size="L",
    ffn_dim=704,
    steps=400,
    seed=1 << 60,
    batch_size=8,
    lr=1e-3,
    after=EXPERTS,
)
EXPERTS_ORDER = Order(epoch=4, assignment=Assignment(expert=Expert(plan="ab" * 16, jobs=[JOB] * EXPERTS)))
SCORED = ScoredDomain(name="topics", source="builtin", text_field="text")
SCORING = Scoring(id="ab" * 16, experts=["cd" * 16], domains=[SCORED], rows=20)
SCORING_ORDER = Order(assignment=Assignment(expert=Expert(plan="ab" * 16, complete=True, scoring=SCORING)))
CHECKPOINT = ExpertCheckpoint(job=3, step=40, size=1 << 40, digest="ef" * 32)
CHECKPOINT_ORDER = Order(assignment=Assignment(expert=Expert(plan="ab" * 16, checkpoints=[CHECKPOINT])))
STAGE_ORDER = Order(assignment=Assignment(stage=Stage(number=3)))
SHEET = ScoreSheet(scoring="ab" * 16, expert="cd" * 16)
DELIVERY = DeliverRequest(lease=b"l", sheet=SHEET, size=3, digest=bytes(32), piece=b"abc")
REPORT = ReportRequest(lease=b"l", stream=STREAM, first=4, records=RECORD_LIST, dropped=1)
REGISTERED = RegisterReply(lease=b"l", lease_seconds=15, founder=ALICE.node, roster=[Site(node=BOB.node)], order=ORDER)
BEAT = HeartbeatRequest(lease=b"l", pulse=pulse(ALICE, loss=math.nan))
PLACED = pulse(ALICE, place=Place(stage=1, forward=0.1, transfer={BOB.node: 0.2}, round_trip={BOB.node: 0.1}))
SAMPLES: list[Message] = [
    WitnessRequest(base=HASH, proof=[PROOF]),
    Ticket.make().request(ALICE),
    EnrolReply(certificate=b"PEM", authority=b"PEM", run_config="{}", node=CAROL.node),
    register_request(ALICE),
    REGISTERED,
    BEAT,
    HeartbeatRequest(lease=b"l", pulse=PLACED, paths=Paths(round=3, content=b"{}")),
    HeartbeatReply(order=1, revocations=REVOCATIONS),
    WatchRequest(lease=b"l"),
    ORDER,
    EXPERTS_ORDER,
    SCORING_ORDER,
    DELIVERY,
    DeliverRequest(piece=bytes(PIECE)),
    CHECKPOINT_ORDER,
    STAGE_ORDER,
    CheckpointPart(lease=b"l", plan="ab" * 16, checkpoint=CHECKPOINT),
    CheckpointPart(piece=bytes(PIECE)),
    FetchCheckpointRequest(lease=b"l", plan="ab" * 16, job=3),
    FetchCheckpointRequest(lease=b"l", plan="ab" * 16, job=3, digest="ef" * 32, offset=1 << 40),
    ArrivedRequest(lease=b"l", digest=bytes(32)),
    ArrivedReply(offset=1 << 40),
    TokenizerRequest(offset=1 << 20),
    REPORT,
    ReportReply(stored=9),
]


def test_there_is_a_rule_for_every_field_of_every_message() -> None:
    messages = dict(coordinator_pb2.DESCRIPTOR.message_types_by_name)
    of_sites = {
        "Site",
        "Pulse",
        "Place",
        "Revocations",
        "TokenizerRequest",
        "WitnessRequest",
        "Link",
        "Ballot",
        "Signed",
        "DoubleVote",
    }
    assert {kind.__name__ for kind in KINDS} - of_sites == set(messages)
    for kind in KINDS:
        assert set(FIELDS[kind]) == set(kind.DESCRIPTOR.fields_by_name), kind.__name__


@pytest.mark.parametrize(
    "message",
    [
        *SAMPLES,
        changed(REPORT, records=[RECORD_LIST[0]] * RECORDS),
        changed(REGISTERED, roster=[Site(node=f"{number:016x}") for number in range(SITES)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_within_bounds_arrives(message: Message) -> None:
    raw = message.SerializeToString(deterministic=True)
    assert parse(type(message), raw).SerializeToString(deterministic=True) == raw


CROWD = {f"{number:016x}": 0.1 for number in range(SITES + 1)}
BEYOND = [
    (register_request(ALICE, name="x" * 65), "RegisterRequest.site.name"),
    (register_request(ALICE, name="\x1b[2J"), "RegisterRequest.site.name"),
    (register_request(ALICE, transport="pigeon"), "RegisterRequest.transport = 'pigeon': must be grpc or hivemind"),
    (register_request(ALICE, time=math.inf), "RegisterRequest.time"),
    (register_request(ALICE, workers=1 << 16), "RegisterRequest.workers"),
    (changed(register_request(ALICE), site=None), "RegisterRequest.site is missing"),
    (changed(BEAT, pulse=None), "HeartbeatRequest.pulse is missing"),
    (changed(BEAT, pulse=Pulse()), "HeartbeatRequest.pulse.site is missing"),
    (changed(BEAT, lease=b""), "HeartbeatRequest.lease = 0 bytes: must be 1 to 32 bytes"),
    (changed(BEAT, pulse=pulse(ALICE, place=Place(backward=math.inf))), "HeartbeatRequest.pulse.place.backward = inf"),
    (changed(BEAT, pulse=pulse(ALICE, place=Place(transfer={"bob": 1.0}))), "HeartbeatRequest.pulse.place.transfer"),
    (changed(BEAT, pulse=pulse(ALICE, place=Place(round_trip=CROWD))), "HeartbeatRequest.pulse.place.round_trip"),
    (changed(BEAT, paths=Paths(content=bytes(MOST_BYTES + 1))), "HeartbeatRequest.paths.content = 131073 bytes"),
    (
        HeartbeatReply(revocations=Revocations(nodes=[ALICE.node] * (REVOKED + 1))),
        "HeartbeatReply.revocations.nodes has 4097 items",
    ),
    (changed(REGISTERED, roster=[Site(node=ALICE.node)] * (SITES + 1)), "RegisterReply.roster has 1025 items"),
    (changed(REGISTERED, slot=SITES), "RegisterReply.slot"),
    (changed(ORDER, assignment=None), "Order.assignment is missing"),
    (changed(ORDER, assignment=Assignment()), "Order.assignment assigns nothing that this version knows"),
    (Order(assignment=Assignment(stage=Stage(number=1024))), "Order.assignment.stage.number = 1024"),
    (changed(BEAT, pulse=pulse(ALICE, wanted_stage=1024)), "HeartbeatRequest.pulse.wanted_stage = 1024"),
    (changed(ORDER, activity=9), "Order.activity = 9: must be one that this version knows"),
    (changed(REPORT, records=[RECORD_LIST[0]] * (RECORDS + 1)), "ReportRequest.records has 257 items"),
    (changed(REPORT, records=[Record(time=NOW)]), "ReportRequest.records[0] records nothing that this version knows"),
    (changed(REPORT, first=1 << 53), "ReportRequest.first"),
    (Record(time=1e300, note=NOTE), "Record.time = 1e+300: must be seconds since 1970, before the year 9999"),
    (Record(note=Note(text="x" * 2001)), "Record.note.text"),
    (Record(note=Note(level=101)), "Record.note.level"),
    (Record(sample=changed(SAMPLE, utilisation=1.5)), "Record.sample.utilisation = 1.5: must be from 0 to 1, or NaN"),
    (Record(sample=changed(SAMPLE, loss=math.inf)), "Record.sample.loss"),
    (Record(round=changed(ROUND, members=["b", "a"])), "Record.round.members[0]"),
    (Record(round=changed(ROUND, retry=-1.0)), "Record.round.retry"),
    (Record(expert=changed(EXPERT, plan="ab")), "Record.expert.plan = 'ab': must be 32 hex digits"),
    (Record(expert=changed(EXPERT, loss=math.nan)), "Record.expert.loss"),
    (Record(expert=changed(EXPERT, job=EXPERTS)), "Record.expert.job"),
    (changed(JOB, size="XL"), "ExpertJob.size = 'XL': must be S, M or L"),
    (changed(JOB, domain_hash="../x"), "ExpertJob.domain_hash"),
    (changed(JOB, lr=math.inf), "ExpertJob.lr"),
    (Expert(plan="ab" * 16, jobs=[JOB] * (EXPERTS + 1)), "Expert.jobs has 257 items"),
    (Record(expert=changed(EXPERT, weights="ab")), "Record.expert.weights = 'ab': must be 64 hex digits, or empty"),
    (Scoring(id="ab"), "Scoring.id = 'ab': must be 32 hex digits"),
    (changed(SCORING, experts=["../x"]), "Scoring.experts[0]"),
    (changed(SCORING, domains=[changed(SCORED, source="web")]), "Scoring.domains[0].source"),
    (changed(SCORING, domains=[SCORED] * (DOMAINS + 1)), "Scoring.domains has 513 items"),
    (changed(DELIVERY, size=SHEET_BYTES + 1), "DeliverRequest.size"),
    (changed(DELIVERY, digest=b"x"), "DeliverRequest.digest = 1 bytes: must be 32 bytes, or empty"),
    (changed(DELIVERY, piece=bytes(PIECE + 1)), "DeliverRequest.piece = 131073 bytes: must be 0 to 131072 bytes"),
    (changed(DELIVERY, offset=SHEET_BYTES + 1), "DeliverRequest.offset"),
    (CheckpointPart(offset=1 << 53), "CheckpointPart.offset"),
    (FetchCheckpointRequest(lease=b"l", plan="ab" * 16, digest="../x"), "FetchCheckpointRequest.digest"),
    (FetchCheckpointRequest(lease=b"l", plan="ab" * 16, offset=1 << 53), "FetchCheckpointRequest.offset"),
    (ArrivedRequest(digest=bytes(32)), "ArrivedRequest.lease"),
    (ArrivedRequest(lease=b"l"), "ArrivedRequest.digest = 0 bytes: must be 32 bytes"),
    (changed(CHECKPOINT, digest="ef"), "ExpertCheckpoint.digest = 'ef': must be 64 hex digits"),
    (changed(CHECKPOINT, job=EXPERTS), "ExpertCheckpoint.job"),
    (Expert(plan="ab" * 16, checkpoints=[CHECKPOINT] * (EXPERTS + 1)), "Expert.checkpoints has 257 items"),
    (CheckpointPart(plan="../x", checkpoint=CHECKPOINT), "CheckpointPart.plan = '../x': must be 32 hex digits"),
    (CheckpointPart(piece=bytes(PIECE + 1)), "CheckpointPart.piece = 131073 bytes"),
    (FetchCheckpointRequest(plan="ab" * 16), "FetchCheckpointRequest.lease"),
    (Record(link=changed(LINK, peer="bob")), "Record.link.peer"),
]


@pytest.mark.parametrize(("message", "text"), BEYOND, ids=[text.partition(" ")[0] for _, text in BEYOND])
def test_what_is_out_of_bounds_is_named(message: Message, text: str) -> None:
    with pytest.raises(BadMessage) as caught:
        parse(type(message), message.SerializeToString())
    assert str(caught.value).startswith(text)


def test_a_message_has_a_largest_size() -> None:
    with pytest.raises(BadMessage, match="a ReportRequest of 524289 bytes: at most 524288 are taken"):
        parse(ReportRequest, bytes(MESSAGE_BYTES + 1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(raw=st.binary(max_size=200))
def test_noise_is_a_bad_message_or_one_within_bounds(kind: type[Message], raw: bytes) -> None:
    with suppress(BadMessage):
        parse(kind, raw)


@given(message=st.sampled_from(SAMPLES), place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_one_wrong_byte_raises_nothing_else(message: Message, place: int, value: int) -> None:
    raw = bytearray(message.SerializeToString())
    raw[place % len(raw)] = value
    with suppress(BadMessage):
        parse(type(message), bytes(raw))


def test_the_longest_question_to_the_witness_is_taken() -> None:
    """Of 1,024 sites that voted before in the same round, by one that has votes of others and proof of liars."""
    node, digest, ballot = "f" * 16, b"\xff" * 32, Ballot(number=1000, leader="f" * 16)

    def signed(statement: Message) -> Signed:
        return Signed(node=node, statement=statement.SerializeToString(), public=bytes(91), signature=bytes(72))

    vote = signed(
        Vote(node=node, round=1 << 24, ballot=ballot, digest=digest, plan=digest, prior=ballot, prior_digest=digest)
    )
    handover = signed(Handover(node=node, heir=node, round=1 << 24, base=digest, votes=[node], number=1))
    members = [f"{number:016x}" for number in range(SITES)]
    proof = Link(round=1 << 24, digest=digest, base=digest, ballot=ballot, members=members, votes=[vote] * SITES)
    request = WitnessRequest(
        base=digest,
        proof=[proof],
        double_votes=[DoubleVote(one=vote, other=vote)] * DOUBLE_VOTES,
        handovers=[handover] * MOST_HANDOVERS,
    )
    assert parse(WitnessRequest, request.SerializeToString()) == request
