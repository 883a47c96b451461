from __future__ import annotations

import errno
import hashlib
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.identity.node import Identity, Token, key_pem, node_id

RUN = bytes(range(32))
TOKEN = Token(bytes(range(100, 132)), RUN[:16])
WRITTEN = "pier1-mrswmz3infvgw3dnnzxxa4lson2hk5txpb4xu634pv7h7aebqkbqaaicamcakbqhbaequcymbuha75csze3q"

letters = st.sampled_from("abcdefghijklmnopqrstuvwxyz234567")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_identity_is_made_once_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "data"
    first = Identity.load_or_create(folder)
    again = Identity.load_or_create(folder)
    assert again.node == first.node
    assert again.key.private_numbers() == first.key.private_numbers()
    assert Identity.load_or_create(tmp_path / "other").node != first.node


def test_the_node_id_is_the_hash_of_the_public_key(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path)
    der = identity.key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert identity.node == hashlib.sha256(der).hexdigest()[:16]
    golden = ec.derive_private_key(1, ec.SECP256R1())
    assert node_id(golden.public_key()) == "5cd252fb0ce89324"


def test_secrets_are_for_their_owner_only(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path)
    TOKEN.save(tmp_path)
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == {"node.key": 0o600, "run.token": 0o600}


def test_nothing_secret_is_shown_by_accident(tmp_path: Path) -> None:
    assert repr(TOKEN) == f"Token(run={RUN[:16]!r}, founder='')"
    assert repr(Identity.load_or_create(tmp_path)) == "Identity()"


@pytest.mark.parametrize(
    "content", [b"", b"not a key", key_pem(ec.generate_private_key(ec.SECP384R1()))], ids=["empty", "text", "P-384"]
)
def test_a_damaged_key_is_reported_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    with pytest.raises(PierError, match=r"node\.key.*(not a private key|another kind)") as error:
        Identity.load_or_create(tmp_path)
    assert "delete it" in error.value.remedy
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PierError, match="file"):
        Identity.load_or_create(tmp_path / "file")
    with pytest.raises(PierError, match="file"):
        TOKEN.save(tmp_path / "file")


def test_a_full_disk_is_named_and_no_part_of_a_secret_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_written: Path, _path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "put", full)
    for write in (Identity.load_or_create, TOKEN.save):
        with pytest.raises(PierError, match="No space left on device") as error:
            write(tmp_path)
        assert "Free some space" in error.value.remedy
    assert not [*tmp_path.iterdir()]


def test_a_token_is_written_like_this() -> None:
    assert str(TOKEN) == WRITTEN
    assert Token.parse(WRITTEN) == TOKEN


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_token_survives_being_written(secret: bytes, run: bytes) -> None:
    token = Token(secret, run[:16])
    assert Token.parse(str(token)) == token
    token.require_run(run)


def test_new_tokens_differ() -> None:
    first, second = Token.new(RUN), Token.new(RUN)
    assert first.secret != second.secret
    assert first.run == second.run == RUN[:16]


def test_case_and_line_breaks_do_not_matter() -> None:
    pasted = f"  {WRITTEN[:40].upper()}\n  {WRITTEN[40:]}\n"
    assert Token.parse(pasted) == TOKEN


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "starts with pier2-"),
        ("hunter2", "starts with pier2-"),
        (WRITTEN[:-1], "89 characters, a token has 90"),
        (WRITTEN + "a", "91 characters"),
        (WRITTEN[:20] + "1" + WRITTEN[21:], "only letters and the digits 2 to 7"),
        (WRITTEN[:20] + "ß" + WRITTEN[21:], "only letters and the digits 2 to 7"),
        (WRITTEN[:20] + "a" + WRITTEN[21:], "check digits"),
    ],
)
def test_a_mistyped_token_is_told_from_a_wrong_one(text: str, problem: str) -> None:
    with pytest.raises(PierError, match=problem) as error:
        Token.parse(text)
    assert "Copy the token again" in error.value.remedy
    assert WRITTEN[6:18] not in str(error.value)


@given(st.integers(6, 89), letters)
def test_every_single_typo_is_found(position: int, letter: str) -> None:
    text = WRITTEN[:position] + letter + WRITTEN[position + 1 :]
    if text != WRITTEN:
        with pytest.raises(PierError):
            Token.parse(text)


def test_a_token_of_another_run_says_so() -> None:
    with pytest.raises(PierError, match="the token is for run 00010203, the configuration here is run ffffffff"):
        TOKEN.require_run(b"\xff" * 32)


def test_the_kept_token_comes_back(tmp_path: Path) -> None:
    assert Token.load(tmp_path) is None
    TOKEN.save(tmp_path)
    TOKEN.save(tmp_path)
    assert Token.load(tmp_path) == TOKEN


@pytest.mark.parametrize("content", [b"pier1-short", b"\xff\xfe"])
def test_a_damaged_kept_token_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.token").write_bytes(content)
    with pytest.raises(PierError, match=r"run\.token: this is not a whole token") as error:
        Token.load(tmp_path)
    assert "--token" in error.value.remedy


def test_a_kept_token_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run.token").mkdir()
    with pytest.raises(PierError, match=r"run\.token: Is a directory"):
        Token.load(tmp_path)
