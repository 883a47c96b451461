from __future__ import annotations

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.proto import dht_pb2
from wire.sites import ALICE, BOB, OTHER_TOKEN, RUN, TOKEN

from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity, Token
from pier_node.wire.libp2p.discovery import RECORD_BYTES, Holders, Records, key_of, record, said_by


def holder(identity: Identity, token: Token = TOKEN) -> Holders:
    return Holders(credentials(identity, token))


async def question(of: Holders) -> dht_pb2.FindRequest:
    asked = dht_pb2.FindRequest(keys=[b"key"])
    await of.sign_request(asked, None)
    return asked


async def test_holders_of_the_token_understand_each_other() -> None:
    asked = await question(holder(ALICE))
    received = dht_pb2.FindRequest.FromString(asked.SerializeToString())
    assert await holder(BOB).validate_request(received)
    reply = dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=b"x")])
    await holder(BOB).sign_response(reply, received)
    assert await holder(ALICE).validate_response(dht_pb2.FindResponse.FromString(reply.SerializeToString()), asked)


async def test_others_are_not_heard() -> None:
    assert not await holder(BOB).validate_request(await question(holder(ALICE, OTHER_TOKEN)))
    assert not await holder(BOB).validate_request(dht_pb2.FindRequest(keys=[b"key"]))
    changed = await question(holder(ALICE))
    changed.keys.append(b"another")
    assert not await holder(BOB).validate_request(changed)


async def test_an_answer_belongs_to_its_question() -> None:
    first, second = await question(holder(ALICE)), await question(holder(ALICE))
    reply = dht_pb2.FindResponse()
    await holder(BOB).sign_response(reply, first)
    assert not await holder(ALICE).validate_response(reply, second)


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        (key_of(RUN, ALICE.node), record(ALICE.node, "/ip4/…"), True),
        (key_of(RUN, BOB.node), record(ALICE.node, "/ip4/…"), False),
        (key_of(b"another run", ALICE.node), record(ALICE.node, "/ip4/…"), False),
        (key_of(RUN, ALICE.node), record(ALICE.node, "x" * RECORD_BYTES), False),
        (key_of(RUN, ALICE.node), b"\xff" * 20, False),
    ],
)
def test_only_short_records_of_sites_of_the_run_are_kept(key: object, value: bytes, kept: bool) -> None:
    assert Records(RUN).validate(DHTRecord(key.to_bytes(), b"", value, 1.0)) is kept  # type: ignore[attr-defined]


def test_what_a_record_says() -> None:
    assert said_by(ALICE.node, record(ALICE.node, "/ip4/1.2.3.4")) == "/ip4/1.2.3.4"
    assert said_by(BOB.node, record(ALICE.node, "/ip4/1.2.3.4")) == ""
    assert said_by(BOB.node, b"\xff") == ""
