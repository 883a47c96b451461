from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from wire.sites import ALICE, BOB, OTHER_TOKEN, TOKEN, impostor

from pier_node.identity import certificates
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity, Token
from pier_node.wire.libp2p.host import bearer, issue
from pier_proto.v1.stream_pb2 import IdentityProof

CA = credentials(ALICE, TOKEN).ca_pem
PEER, OTHER_PEER = b"\x12\x20" + bytes(32), b"\x12\x20" + bytes([1] * 32)


def proof_of(identity: Identity, token: Token = TOKEN) -> IdentityProof:
    return issue(identity.node, credentials(identity, token), PEER)


def shown(document: IdentityProof, peer: bytes = PEER) -> str:
    return bearer(CA, document.certificate, document.proof, peer)


def test_it_names_its_bearer() -> None:
    assert shown(proof_of(ALICE)) == ALICE.node
    assert issue(ALICE.node, None, PEER) == IdentityProof(node=ALICE.node)


def test_another_peer_cannot_use_it() -> None:
    with pytest.raises(ValueError, match="is of another libp2p peer"):
        shown(proof_of(ALICE), OTHER_PEER)


def test_a_proof_of_another_key_is_worth_nothing() -> None:
    forged = IdentityProof(certificate=proof_of(ALICE).certificate, proof=proof_of(BOB).proof)
    with pytest.raises(ValueError, match="is of another libp2p peer"):
        shown(forged)


def test_it_must_be_of_this_run() -> None:
    with pytest.raises(ValueError, match="the tokens differ"):
        shown(proof_of(ALICE, OTHER_TOKEN))


def test_a_certificate_in_anothers_name_is_noticed() -> None:
    with pytest.raises(ValueError, match="names another node than its key"):
        shown(proof_of(impostor(BOB, ALICE.node)))


@pytest.mark.parametrize("part", [slice(0), slice(100), slice(1, None)])
def test_what_is_no_certificate_is_refused(part: slice) -> None:
    document = proof_of(ALICE)
    with pytest.raises(ValueError, match=r"."):
        bearer(CA, document.certificate[part], document.proof, PEER)


@pytest.mark.parametrize(("days", "words"), [(-2, "not valid yet"), (4000, "has expired")])
def test_clocks_that_are_far_off_are_noticed(monkeypatch: pytest.MonkeyPatch, days: int, words: str) -> None:
    document = proof_of(ALICE)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(UTC) + timedelta(days=days)

    monkeypatch.setattr(certificates, "datetime", Clock)
    with pytest.raises(ValueError, match=words):
        shown(document)
