"""Secrets as text that people paste: a prefix, base32 in small letters, and check digits against slips."""

from __future__ import annotations

import base64
import hashlib

from pier_node.errors import PierError

TOKEN_VARIABLE = "PIER_TOKEN"
"""Environment variable in which a command is given a token or an invite: other users see argv, and not that."""
CHECK = 4
"""Bytes of check digits."""


def spell(prefix: str, body: bytes) -> str:
    """The text of a secret."""
    return prefix + base64.b32encode(body + _checksum(prefix, body)).decode().rstrip("=").lower()


def read(prefix: str, length: int, text: str) -> bytes:
    """The secret of `length` bytes in what somebody typed or pasted: case and line breaks do not matter.

    Raises:
        PierError: it is no such text, or not whole.
    """
    compact = "".join(text.split()).lower()
    letters = len(prefix) + -(-(length + CHECK) * 8 // 5)
    if not compact.startswith(prefix):
        raise _mistyped(f"a token starts with {prefix}", prefix)
    if len(compact) != letters:
        raise _mistyped(f"it has {len(compact)} characters, a token has {letters}", prefix)
    try:
        padding = "=" * (-len(compact.removeprefix(prefix)) % 8)
        raw = base64.b32decode(compact.removeprefix(prefix).upper() + padding)
    except ValueError as error:
        raise _mistyped(f"after {prefix} only letters and the digits 2 to 7 occur in a token", prefix) from error
    body = raw[:length]
    if spell(prefix, body) != compact:
        raise _mistyped("its check digits do not match the rest", prefix)
    return body


def _checksum(prefix: str, body: bytes) -> bytes:
    return hashlib.sha256(prefix.encode() + body).digest()[:CHECK]


def _mistyped(why: str, prefix: str) -> PierError:
    return PierError(
        f"this is not a whole token: {why}", f"Copy the token again, from `{prefix}` to its last character."
    )
