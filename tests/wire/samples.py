"""One message of each kind that is within all bounds, with as many fields set as can be; and others like them."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

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
    TokenizerPart,
    TokenizerRequest,
    Total,
    Value,
    Vote,
    Vouch,
    WitnessReply,
    WitnessRequest,
    Worked,
)
from pier_proto.v1.stream_pb2 import IdentityProof, Opening

ALICE, BOB, CAROL = "a" * 16, "b" * 16, "c" * 16
HASH = bytes(range(32))

BALLOT = Ballot(number=3, leader=ALICE)
SITE = Site(node=ALICE, name="Zürich 1", address="[fd00::5]:7700", slot=7)
VALUE = Value(origin=BALLOT, digest=HASH, members=[ALICE, BOB])
SHARES = [
    Share(node=ALICE, tokens=0, offset=0, length=10, norm=0.5),
    Share(node=BOB, tokens=4096, offset=10, length=3, norm=2.5),
]
SIGNED = [Signed(node=node, statement=b"said", public=bytes(91), signature=bytes(72)) for node in (ALICE, BOB)]
HANDOVER = Handover(node=CAROL, heir=BOB, round=4, base=HASH, votes=[BOB, CAROL])
VOUCH = Vouch(node=ALICE, partner=BOB, round=5)
VOTE = Vote(node=ALICE, round=5, ballot=BALLOT, digest=HASH, plan=HASH[::-1], prior=BALLOT, prior_digest=HASH)
LINK = Link(round=5, digest=HASH, base=HASH, ballot=BALLOT, members=[ALICE, BOB], votes=SIGNED, handovers=SIGNED)
REVOCATIONS = Revocations(version=1_800_000_000_000, nodes=[BOB, CAROL], signature=bytes(70))
DOUBLE_VOTE = DoubleVote(one=SIGNED[0], other=SIGNED[0])
HELLO_REPLY = HelloReply(
    protocol=1,
    run_hash=HASH,
    run_config='{"run":{}}',
    site=SITE,
    roster=[SITE, Site(node=BOB)],
    seen_as="10.0.0.1:5000",
    revocations=REVOCATIONS,
    double_votes=[DOUBLE_VOTE],
)
PLACE = Place(
    stage=3,
    version=7 << 24,
    forward=0.1,
    backward=0.2,
    loss=0.05,
    memory=3,
    transfer={BOB: 0.2},
    round_trip={BOB: 0.1},
    working=True,
)
PULSE = Pulse(
    site=SITE,
    phase=Phase.PHASE_TRAINING,
    training_for=4,
    round=4,
    digest=HASH,
    inner_step=200,
    tokens=1 << 40,
    tokens_per_second=1e6,
    loss=2.5,
    validation_loss=float("nan"),
    bytes_sent=1 << 50,
    time=1.7e9,
    spread=0.03,
    place=PLACE,
    gives=True,
)
READY = Ready(
    node=BOB,
    round=5,
    nonce=b"n" * 16,
    tokens=4096,
    bandwidth=1e8,
    seen=Ballot(),
    voted=VALUE,
    voted_in=BALLOT,
    holds=True,
    refutation=SIGNED[0],
    suspects=[CAROL],
    votes=[BOB],
    base=HASH,
    handovers=SIGNED,
)
PROPOSAL = Proposal(
    verdict=Proposal.VERDICT_GO,
    round=5,
    ballot=BALLOT,
    shares=SHARES,
    readies=SIGNED,
    adopt=VALUE,
    holders=[BOB, ALICE],
    other=CAROL,
    reason="waiting\n\tfor two",
)
MANIFEST = Manifest(
    round=4,
    digest=HASH,
    members=[ALICE, BOB],
    piece_length=4,
    tensors=[Tensor(name=name, length=9, hashes=[HASH] * 3) for name in ("anchor", "momentum")],
    adam_step=9,
    ledger={ALICE: 5, BOB: 0},
    proof=[LINK],
)
ACTIVATION = Activation(attempt=HASH, microbatch=5, hop=6, shape=[4, 128, 64], dtype=Activation.DTYPE_BF16)
PATHS = [Path(sites=[0, 1]), Path(sites=[0])]
ITINERARY = IterationPlan(
    round=5,
    step=4,
    nodes=[ALICE, BOB],
    stages=[0, 2],
    paths=PATHS,
    waves=[1, 1],
    candidates=[CAROL],
    newcomers=[1],
)
CHUNK = Chunk(round=5, ballot=BALLOT, stage=Chunk.STAGE_SCATTER, offset=1 << 30, data=b"1234" * 2, meeting=HASH)
PASSING = Chunk(round=5, stage=Chunk.STAGE_ACTIVATION, activation=ACTIVATION)
MEETING = MeetRequest(round=5, nonce=b"n" * 16, digest=HASH, ledger={ALICE: 5, BOB: 0}, holds=HASH)
SETTLING = SettleRequest(round=5, meeting=HASH, yes=True, digest=HASH, left=True, at=7)

PASSPORT = IdentityProof(node=ALICE, certificate=b"PEM" * 300, proof=bytes(72))

SAMPLES: tuple[Message, ...] = (
    Ack(),
    SITE,
    HelloRequest(protocol=1, run_hash=HASH, site=SITE, roster_hash=HASH),
    HELLO_REPLY,
    DOUBLE_VOTE,
    REVOCATIONS,
    PULSE,
    *SIGNED,
    HANDOVER,
    VOUCH,
    LeaveRequest(node=ALICE, handovers=SIGNED, asks=HASH),
    BALLOT,
    VALUE,
    READY,
    *SHARES,
    PROPOSAL,
    VOTE,
    LINK,
    WitnessRequest(base=HASH, proof=[LINK], double_votes=[DOUBLE_VOTE], handovers=SIGNED),
    WitnessReply(trusted=6, handover=SIGNED[0], reason="another has it"),
    AbortNotice(node=ALICE, round=5, ballot=BALLOT, suspect=BOB, reason="lost"),
    MEETING,
    MeetReply(verdict=MeetReply.VERDICT_READY, partner=MEETING, other=CAROL),
    SETTLING,
    SettleReply(outcome=SettleReply.OUTCOME_COMMITTED, at=8),
    PLACE,
    CHUNK,
    ACTIVATION,
    PASSING,
    *PATHS,
    ITINERARY,
    Worked(attempt=HASH, square=2.5, loss=12.0),
    Total(square=3.5, loss=4.5),
    Dropped(attempt=HASH, suspect=BOB, reason="lost"),
    StateRequest(round=4, shadow=True, stage=3, trusted=5, proof_only=True),
    *MANIFEST.tensors,
    MANIFEST,
    FetchRequest(round=4, shadow=True, tensor="adam_v", offset=4, length=5, stage=3),
    ProbeRequest(padding=bytes(100), reply_size=1 << 20, call_back="site.example.org:7700", seen_as="10.0.0.1:5000"),
    TokenizerRequest(offset=1 << 20),
    TokenizerPart(data=bytes(100), size=(1 << 20) + 100),
    ProbeReply(padding=bytes(100), time=1.7e9, reached=True, detail="42 ms"),
    PASSPORT,
    Opening(protocol=1, run_hash=HASH, to=BOB, identity_proof=PASSPORT),
)


M = TypeVar("M", bound=Message)


def changed(message: M, **fields: Any) -> M:
    """A copy with some fields set to something else, or, with None, to nothing."""
    copy = type(message).FromString(message.SerializeToString())
    for field, value in fields.items():
        copy.ClearField(field)
        if value is not None:
            copy.MergeFrom(type(message)(**{field: value}))
    return copy
