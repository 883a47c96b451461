from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from wire.sites import ALICE, BOB, CAROL, RUN, TOKEN, impostor

from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity, Token
from pier_node.wire.carrier import PROTOCOL
from pier_node.wire.links import FROM, NONCE, PROOF, PROTOCOL_KEY, TO, CallMetadata, Headers, NotAdmitted
from pier_node.wire.links import RUN as RUN_KEY

OTHER_RUN = b"\xee" * 32


def metadata(identity: Identity, run: bytes = RUN, secure: bool = True) -> CallMetadata:
    return CallMetadata(identity.node, run, identity.key if secure else None)


def certificate(identity: Identity, token: Token = TOKEN) -> bytes:
    return credentials(identity, token).cert_pem


def test_a_member_is_admitted_and_proves_who_it_is() -> None:
    asked = metadata(ALICE).call(BOB.node)
    caller = metadata(BOB).admit("Beat", asked, certificate(ALICE))
    answer = metadata(BOB).answer(caller, asked)
    assert caller == ALICE.node
    assert metadata(ALICE).answered(asked, answer) == BOB.node


def test_without_tls_names_are_taken_as_given() -> None:
    asked = metadata(ALICE, secure=False).call(BOB.node)
    caller = metadata(BOB, secure=False).admit("Beat", asked, None)
    assert caller == ALICE.node
    answer = metadata(BOB, secure=False).answer(caller, asked)
    assert answer == {FROM: BOB.node}
    assert metadata(ALICE, secure=False).answered(asked, answer) == BOB.node


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({PROTOCOL_KEY: "1"}, f"this node speaks protocol {PROTOCOL}, the caller '1': install one version of Pier"),
        ({PROTOCOL_KEY: ""}, "the caller none"),
        ({RUN_KEY: OTHER_RUN.hex()}, f"this is run {RUN.hex()[:8]}, the caller is in run eeeeeeee"),
        ({RUN_KEY: ""}, f"this is run {RUN.hex()[:8]}"),
        ({TO: CAROL.node}, f"node {BOB.node} answers here, not '{CAROL.node}'"),
        ({FROM: CAROL.node}, f"the caller says it is '{CAROL.node}', its certificate is of {ALICE.node}"),
    ],
)
def test_a_wrong_card_is_refused(changes: Headers, problem: str) -> None:
    with pytest.raises(NotAdmitted, match=problem):
        metadata(BOB).admit("Beat", {**metadata(ALICE).call(BOB.node), **changes}, certificate(ALICE))


@pytest.mark.parametrize("name", ["", "alice", "A" * 16, "a" * 17])
def test_without_tls_a_name_must_be_a_node_id(name: str) -> None:
    with pytest.raises(NotAdmitted, match="must be the caller's node id"):
        metadata(BOB, secure=False).admit("Beat", {**metadata(ALICE).call(BOB.node), FROM: name}, None)


def test_hello_is_answered_to_a_node_without_configuration() -> None:
    newcomer = metadata(ALICE, run=b"").call(None)
    assert TO not in newcomer
    assert metadata(BOB).admit("Hello", newcomer, certificate(ALICE)) == ALICE.node
    with pytest.raises(NotAdmitted, match="this is run"):
        metadata(BOB).admit("Hello", metadata(ALICE, run=OTHER_RUN).call(None), certificate(ALICE))


def test_a_call_needs_a_certificate_of_its_own_key() -> None:
    asked = metadata(ALICE).call(BOB.node)
    with pytest.raises(NotAdmitted, match="without a certificate"):
        metadata(BOB).admit("Beat", asked, None)
    with pytest.raises(NotAdmitted, match=f"names another node than its key, which is of {CAROL.node}"):
        metadata(BOB).admit("Beat", asked, certificate(impostor(CAROL, ALICE.node)))


def test_a_revoked_node_neither_asks_nor_answers() -> None:
    here = metadata(BOB)
    here.put_out[ALICE.node] = "was revoked by the run's operator"
    with pytest.raises(NotAdmitted, match=f"{ALICE.node} was revoked by the run's operator"):
        here.admit("Beat", metadata(ALICE).call(BOB.node), certificate(ALICE))
    asked = here.call(ALICE.node)
    with pytest.raises(ValueError, match="was revoked"):
        here.answered(asked, metadata(ALICE).answer(BOB.node, asked))


def test_a_proof_holds_for_one_question_of_one_caller() -> None:
    asked, later = metadata(ALICE).call(BOB.node), metadata(ALICE).call(BOB.node)
    assert asked[NONCE] != later[NONCE]
    answer = metadata(BOB).answer(ALICE.node, asked)
    with pytest.raises(ValueError, match="signature is wrong"):
        metadata(ALICE).answered(later, answer)
    with pytest.raises(ValueError, match="signature is wrong"):  # Carol passes on what Bob answered to her
        metadata(ALICE).answered(asked, metadata(BOB).answer(CAROL.node, asked))


def test_a_proof_in_another_name_shows_whose_it_is() -> None:
    asked = metadata(ALICE).call(BOB.node)
    forged = CallMetadata(BOB.node, RUN, CAROL.key).answer(ALICE.node, asked)
    assert metadata(ALICE).answered(asked, forged) == CAROL.node


@pytest.mark.parametrize(
    "proof", [b"", b"\x04" + bytes(64), bytes(200), b"\x04" * 300], ids=["none", "no point", "zeros", "long"]
)
def test_no_proof_is_no_proof(proof: bytes) -> None:
    asked = metadata(ALICE).call(BOB.node)
    with pytest.raises(ValueError, match=r"."):
        metadata(ALICE).answered(asked, {FROM: BOB.node, PROOF: proof} if proof else {FROM: BOB.node})


def test_a_damaged_signature_is_found() -> None:
    asked = metadata(ALICE).call(BOB.node)
    proof = metadata(BOB).answer(ALICE.node, asked)[PROOF]
    assert isinstance(proof, bytes)
    with pytest.raises(ValueError, match="signature is wrong"):
        metadata(ALICE).answered(asked, {PROOF: proof[:-1] + bytes([proof[-1] ^ 1])})


def test_a_key_of_another_curve_is_refused() -> None:
    other = CallMetadata(BOB.node, RUN, ec.generate_private_key(ec.SECP384R1()))
    asked = metadata(ALICE).call(BOB.node)
    with pytest.raises(ValueError, match=r"."):
        metadata(ALICE).answered(asked, other.answer(ALICE.node, asked))
