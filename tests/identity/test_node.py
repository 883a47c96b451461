from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.identity.node import Identity, Signer, is_signed

RUN = bytes(32)


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(Identity.load_or_create(tmp_path / "a"), RUN)


def test_a_signature_holds_for_its_statement_alone(signer: Signer, tmp_path: Path) -> None:
    signature, public = signer.sign("vote", b"yes"), signer.public
    assert is_signed(signer.node, public, signature, "vote", RUN, b"yes")
    assert not is_signed(signer.node, public, signature, "vote", RUN, b"no")
    assert not is_signed(signer.node, public, signature, "goodbye", RUN, b"yes")
    assert not is_signed(signer.node, public, signature, "vote", bytes(31) + b"1", b"yes")
    other = Signer(Identity.load_or_create(tmp_path / "b"), RUN)
    assert not is_signed(other.node, public, signature, "vote", RUN, b"yes")
    assert not is_signed(signer.node, other.public, signature, "vote", RUN, b"yes")
    assert not is_signed(signer.node, other.public, other.sign("vote", b"yes"), "vote", RUN, b"yes")


@pytest.mark.parametrize("public", [b"", b"not a key", bytes(91), bytes(4096)])
@pytest.mark.parametrize("signature", [b"", b"not a signature", bytes(72)])
def test_garbage_is_no_signature(signer: Signer, public: bytes, signature: bytes) -> None:
    assert not is_signed(signer.node, public, b"", "vote", RUN, b"yes")
    assert not is_signed(signer.node, signer.public, signature, "vote", RUN, b"yes")
