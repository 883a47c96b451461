from __future__ import annotations

import math
from contextlib import suppress

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.samples import (
    ALICE,
    BALLOT,
    BOB,
    CAROL,
    HANDOVER,
    HASH,
    HELLO_REPLY,
    LINK,
    MANIFEST,
    MEETING,
    PLACE,
    PROPOSAL,
    PULSE,
    READY,
    REVOCATIONS,
    SAMPLES,
    SETTLING,
    SHARES,
    SIGNED,
    SITE,
    VALUE,
    VOTE,
    changed,
)

from pier_node.config.run import SITES
from pier_node.wire.bounds import FIELDS, RULES, STATEMENT, parse
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage
from pier_node.wire.rules import FRAGMENTS, REVOKED, RUN_CONFIG
from pier_proto.v1 import peer_pb2, stream_pb2
from pier_proto.v1.peer_pb2 import (
    AbortNotice,
    Ballot,
    Chunk,
    FetchRequest,
    HelloRequest,
    LeaveRequest,
    Manifest,
    MeetReply,
    ProbeReply,
    ProbeRequest,
    Proposal,
    Revocations,
    SettleReply,
    SettleRequest,
    Share,
    Site,
    Tensor,
    Value,
)

KINDS = sorted(FIELDS, key=lambda kind: kind.__name__)
NODES = [f"{number:016x}" for number in range(SITES + 1)]
ENTRIES = [f"{node}/{part}" for node in NODES for part in range(1, FRAGMENTS + 1)]

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def test_there_is_a_rule_for_every_field_of_every_message() -> None:
    files = (peer_pb2.DESCRIPTOR, stream_pb2.DESCRIPTOR)
    messages = {name: kind for file in files for name, kind in file.message_types_by_name.items()}
    assert {kind.__name__ for kind in KINDS} == set(messages)
    for kind in KINDS:
        assert set(FIELDS[kind]) == set(messages[kind.__name__].fields_by_name), kind.__name__


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_within_bounds_arrives(message: Message) -> None:
    RULES.check(message)
    raw = message.SerializeToString(deterministic=True)
    assert parse(type(message), raw).SerializeToString(deterministic=True) == raw


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(message) for message in SAMPLES} == set(KINDS)


@pytest.mark.parametrize(
    "message",
    [
        HelloRequest(),  # somebody who has nothing but the token
        Site(node=ALICE),  # a site that nobody can reach, or whose address is not known yet
        changed(PULSE, loss=math.nan, digest=None),
        Chunk(stage=Chunk.STAGE_GATHER, ballot=BALLOT),  # opens a stream
        Chunk(stage=Chunk.STAGE_STATE, data=bytes(CHUNK_BYTES)),
        Proposal(verdict=Proposal.VERDICT_WAIT),
        MeetReply(verdict=MeetReply.VERDICT_OVER),
        SettleRequest(meeting=HASH),  # a no
        Manifest(digest=HASH, piece_length=1),
        changed(HELLO_REPLY, roster=[Site(node=node) for node in NODES[:SITES]]),
        changed(VALUE, members=NODES[:SITES]),
    ],
)
def test_the_edges_are_within(message: Message) -> None:
    RULES.check(message)


BEYOND = [
    (Site(), "Site.node = '': must be a node id"),
    (changed(SITE, node="A" * 16), "Site.node = 'AAAAAAAAAAAAAAAA'"),
    (changed(SITE, node="a" * 17), "Site.node"),
    (changed(SITE, node="a" * 15 + "\n"), "Site.node = 'aaaaaaaaaaaaaaa\\n'"),
    (changed(SITE, name="x" * 129), "Site.name = 'xxx"),
    (changed(SITE, name="\x1b[2J"), "Site.name = '\\x1b[2J': must be at most 128 printable characters"),
    (changed(SITE, name="two\nlines"), "Site.name"),
    (changed(SITE, address="nowhere"), "Site.address = 'nowhere': must be HOST:PORT, or multiaddrs, or empty"),
    (changed(SITE, address="10.0.0.1:0"), "Site.address"),
    (changed(SITE, slot=SITES), "Site.slot = 1024: must be below 1024"),
    (HelloRequest(run_hash=b"x"), "HelloRequest.run_hash = 1 bytes: must be 32 bytes, or empty"),
    (HelloRequest(site=Site()), "HelloRequest.site.node"),
    (changed(HELLO_REPLY, run_hash=None), "HelloReply.run_hash = 0 bytes"),
    (changed(HELLO_REPLY, site=None), "HelloReply.site is missing"),
    (changed(HELLO_REPLY, roster=[SITE, Site()]), "HelloReply.roster[1].node"),
    (changed(HELLO_REPLY, roster=[SITE] * (SITES + 1)), "HelloReply.roster has 1025 items"),
    (changed(HELLO_REPLY, run_config="{" * (RUN_CONFIG + 1)), "HelloReply.run_config"),
    (changed(HELLO_REPLY, seen_as="?"), "HelloReply.seen_as"),
    (changed(HELLO_REPLY, revocations=Revocations()), "HelloReply.revocations.signature"),
    (changed(REVOCATIONS, nodes=[CAROL, BOB]), "Revocations.nodes: must be in order, each once"),
    (changed(REVOCATIONS, nodes=[BOB] * (REVOKED + 1)), "Revocations.nodes has 4097 items"),
    (changed(REVOCATIONS, signature=bytes(73)), "Revocations.signature = 73 bytes"),
    (changed(PULSE, site=None), "Pulse.site is missing"),
    (changed(PULSE, phase=99), "Pulse.phase = 99: must be one that this version knows"),
    (changed(PULSE, digest=b"x" * 31), "Pulse.digest"),
    (changed(PULSE, round=1 << 53), "Pulse.round"),
    (changed(PULSE, loss=math.inf), "Pulse.loss = inf: must be finite, or NaN"),
    (changed(PULSE, tokens_per_second=math.nan), "Pulse.tokens_per_second = nan"),
    (changed(PULSE, time=math.inf), "Pulse.time"),
    (changed(PLACE, forward=2e6), "Place.forward = 2000000.0: must be from 0 to 1e6"),
    (changed(PLACE, transfer={BOB: math.nan}), "Place.transfer"),
    (changed(PLACE, round_trip={BOB: 1.1e6}), "Place.round_trip"),
    (Ballot(number=1), "Ballot has a number without a leader"),
    (Ballot(leader=ALICE), "Ballot has a number without a leader, or the reverse"),
    (changed(VALUE, digest=None), "Value.digest"),
    (changed(VALUE, origin=None), "Value.origin is missing"),
    (changed(VALUE, members=[BOB, ALICE]), "Value.members: must be in order, each once"),
    (changed(VALUE, members=[ALICE, ALICE]), "Value.members: must be in order, each once"),
    (changed(VALUE, members=NODES), "Value.members has 1025 items: must have at most 1024"),
    (changed(READY, nonce=None), "Ready.nonce"),
    (changed(READY, nonce=bytes(65)), "Ready.nonce"),
    (changed(READY, bandwidth=-1.0), "Ready.bandwidth = -1.0: must be finite and not negative"),
    (changed(READY, bandwidth=math.nan), "Ready.bandwidth"),
    (changed(READY, voted=Value(digest=HASH)), "Ready.voted.origin is missing"),
    (changed(READY, suspects=NODES), "Ready.suspects has 1025 items"),
    (changed(SHARES[0], offset=1 << 40), "Share.offset"),
    (changed(PROPOSAL, verdict=9), "Proposal.verdict"),
    (changed(PROPOSAL, shares=SHARES[::-1]), "Proposal has shares out of node-id order"),
    (changed(PROPOSAL, shares=[Share(node=node) for node in NODES]), "Proposal.shares has 1025 items"),
    (changed(PROPOSAL, shares=None), "Proposal says go, but has no ballot or no shares"),
    (changed(PROPOSAL, ballot=None), "Proposal says go"),
    (changed(PROPOSAL, other="?"), "Proposal.other"),
    (changed(PROPOSAL, reason="\x07"), "Proposal.reason"),
    (changed(PROPOSAL, readies=SIGNED[:1]), "Proposal rests on announcements of others"),
    (changed(PROPOSAL, readies=[*SIGNED, SIGNED[0]]), "Proposal rests on announcements of others"),
    (changed(VOTE, ballot=None), "Vote.ballot is missing"),
    (changed(VOTE, digest=None), "Vote.digest = 0 bytes"),
    (changed(VOTE, plan=b"x"), "Vote.plan = 1 bytes"),
    (changed(READY, base=None), "Ready.base = 0 bytes"),
    (changed(READY, handovers=SIGNED * 513), "Ready.handovers has 1026 items"),
    (changed(SIGNED[0], node="?"), "Signed.node"),
    (changed(SIGNED[0], statement=None), "Signed.statement = 0 bytes"),
    (changed(SIGNED[0], statement=bytes(STATEMENT + 1)), f"Signed.statement = {STATEMENT + 1} bytes"),
    (changed(SIGNED[0], public=bytes(257)), "Signed.public = 257 bytes"),
    (changed(SIGNED[0], signature=bytes(129)), "Signed.signature = 129 bytes"),
    (changed(HANDOVER, base=None), "Handover.base = 0 bytes"),
    (changed(HANDOVER, heir=None), "Handover.heir"),
    (changed(HANDOVER, votes=[CAROL, BOB]), "Handover.votes: must be in order, each once"),
    (LeaveRequest(node=ALICE, asks=b"x"), "LeaveRequest.asks = 1 bytes: must be 32 bytes, or empty"),
    (LeaveRequest(node=ALICE, handovers=SIGNED * 513), "LeaveRequest.handovers has 1026 items"),
    (changed(LINK, digest=None), "Link.digest = 0 bytes"),
    (changed(LINK, votes=SIGNED * 513), "Link.votes has 1026 items"),
    (changed(LINK, members=[BOB, ALICE]), "Link.members: must be in order, each once"),
    (AbortNotice(node=ALICE), "AbortNotice.ballot is missing"),
    (AbortNotice(node=ALICE, ballot=BALLOT, reason="x" * 4001), "AbortNotice.reason"),
    (changed(PULSE, spread=math.inf), "Pulse.spread = inf: must be finite, or NaN"),
    (changed(MEETING, nonce=None), "MeetRequest.nonce"),
    (changed(MEETING, digest=None), "MeetRequest.digest = 0 bytes: must be 32 bytes"),
    (changed(MEETING, holds=b"x"), "MeetRequest.holds = 1 bytes: must be 32 bytes, or empty"),
    (changed(MEETING, ledger=dict.fromkeys(NODES, 1)), "MeetRequest.ledger has 1025 items"),
    (MeetReply(verdict=MeetReply.VERDICT_READY), "MeetReply says that we meet, and not whom"),
    (MeetReply(verdict=9), "MeetReply.verdict = 9"),  # type: ignore[arg-type]
    (MeetReply(other="?"), "MeetReply.other"),
    (changed(SETTLING, meeting=None), "SettleRequest.meeting = 0 bytes"),
    (changed(SETTLING, digest=None), "SettleRequest says yes to nothing"),
    (changed(SETTLING, at=1 << 53), "SettleRequest.at"),
    (SettleReply(outcome=9), "SettleReply.outcome = 9"),  # type: ignore[arg-type]
    (Chunk(stage=1, meeting=b"x"), "Chunk.meeting = 1 bytes: must be 32 bytes, or empty"),  # type: ignore[arg-type]
    (Chunk(), "Chunk says of no stage"),
    (Chunk(stage=7), "Chunk.stage = 7"),  # type: ignore[arg-type]
    (Chunk(stage=1, data=bytes(CHUNK_BYTES + 4)), "Chunk.data = 1048580 bytes"),  # type: ignore[arg-type]
    (Chunk(stage=1, offset=1 << 40), "Chunk.offset"),  # type: ignore[arg-type]
    (Tensor(name="gradient"), "Tensor.name = 'gradient': must be one of anchor, momentum, adam_m, adam_v"),
    (Tensor(name="anchor", hashes=[HASH, b"x"]), "Tensor.hashes[1] = 1 bytes"),
    (changed(MANIFEST, piece_length=0), "Manifest has pieces of no length"),
    (changed(MANIFEST, piece_length=5), "Manifest has 3 hashes for 2 pieces of anchor"),
    (changed(MANIFEST, tensors=[MANIFEST.tensors[0]] * 2), "Manifest describes a tensor twice"),
    (changed(MANIFEST, tensors=[MANIFEST.tensors[0]] * 5), "Manifest.tensors has 5 items"),
    (changed(MANIFEST, ledger={"?": 1}), "Manifest.ledger[0] = '?': must be a node id"),
    (changed(MANIFEST, ledger={ALICE: 1 << 60}), "Manifest.ledger[0] = 1152921504606846976: must be below"),
    (changed(MANIFEST, ledger={f"{NODES[0]}/100": 1}), "Manifest.ledger"),
    (changed(MANIFEST, ledger=dict.fromkeys(ENTRIES, 1)), "Manifest.ledger has 65600 items"),
    (FetchRequest(tensor="../key"), "FetchRequest.tensor"),
    (ProbeRequest(padding=bytes(CHUNK_BYTES + 1)), "ProbeRequest.padding"),
    (ProbeRequest(reply_size=CHUNK_BYTES + 1), "ProbeRequest.reply_size"),
    (ProbeRequest(call_back="10.0.0.1"), "ProbeRequest.call_back"),
    (ProbeReply(time=math.nan), "ProbeReply.time"),
]


@pytest.mark.parametrize(("message", "problem"), BEYOND, ids=[problem[:40] for _, problem in BEYOND])
def test_what_is_beyond_them_is_refused_by_name(message: Message, problem: str) -> None:
    with pytest.raises(BadMessage) as error:
        parse(type(message), message.SerializeToString())
    assert str(error.value).startswith(problem)
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(BadMessage, match="3 bytes that are no Pulse"):
        parse(peer_pb2.Pulse, b"\xff\xff\xff")
    with pytest.raises(BadMessage, match="are no Site"):
        parse(Site, b"\x0a\x02\xff\xfe")  # not UTF-8


@kinds
@settings(max_examples=60, deadline=None)
@given(raw=st.binary(max_size=300))
def test_any_bytes_arrive_or_are_refused(kind: type[Message], raw: bytes) -> None:
    with suppress(BadMessage):
        RULES.check(parse(kind, raw))


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_arrives_or_is_refused(kind: type[Message], data: st.DataObject) -> None:
    """Bytes flipped in a good message get deeper than random ones."""
    good = next(message for message in SAMPLES if type(message) is kind)
    raw = bytearray(good.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(BadMessage):
        RULES.check(parse(kind, bytes(raw)))


def test_a_type_that_is_not_ours_is_a_mistake_in_the_program() -> None:
    with pytest.raises(KeyError):
        RULES.check(Manifest.LedgerEntry())
