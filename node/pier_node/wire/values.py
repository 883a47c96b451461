"""What a single value in a message may be: the rules that bounds.py and pipeline_bounds.py put together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from pier_node.config import SITES
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM
from pier_node.wire.address import is_address
from pier_node.wire.carrier import CHUNK_BYTES
from pier_node.wire.multiaddr import are_routes
from pier_node.wire.rules import Many, Only

REVOKED = 4096
"""Most revoked sites that a list names: the latest."""
COUNTS = 2**53
"""Rounds, tokens and bytes stay below: whole numbers that JSON and a double hold exactly."""
ELEMENTS = 2**40
"""Most elements of a vector: 4 TiB of fp32."""
MANIFEST_HASHES = 400_000
"""Most pieces of a state: 12.5 MB of hashes, for 400 GiB of state in pieces of 1 MiB."""

FRAGMENTS = 64
NODE_ID = re.compile("[0-9a-f]{16}")
LEDGER_KEY = re.compile("[0-9a-f]{16}(/[1-9][0-9]?)?")


def below(limit: int) -> Only:
    """Whole numbers below a limit."""
    return Only(f"below {limit}", lambda value: value < limit)


def text(most: int, breaks: str = "") -> Only:
    """Text that does nothing to a terminal that shows it; `breaks` are control characters allowed besides."""
    spaces = str.maketrans(dict.fromkeys(breaks, " "))
    return Only(
        f"at most {most} printable characters",
        lambda value: len(value) <= most and value.translate(spaces).isprintable(),
    )


def size(least: int, most: int) -> Only:
    """So many bytes."""
    span = f"{least}" if least == most else f"{least} to {most}"
    return Only(f"{span} bytes", lambda value: least <= len(value) <= most)


def one_of(values: Iterable[int]) -> Only:
    """A value of an enumeration."""
    known = frozenset(values)
    return Only("one that this version knows", lambda value: value in known)


def or_empty(rule: Only) -> Only:
    """What a rule allows, or nothing."""
    return Only(f"{rule.allowed}, or empty", lambda value: not value or rule.holds(value))


COUNT = below(COUNTS)
ELEMENT = below(ELEMENTS)
ANY = Only("anything", lambda _: True)
NODE = Only("a node id, 16 hex digits", lambda value: NODE_ID.fullmatch(value) is not None)
NODES = Many(NODE, SITES, ordered=True)
ENTRY = Only("a node id, or one with the number of a fragment", lambda value: LEDGER_KEY.fullmatch(value) is not None)
HASH = size(32, 32)
NONCE = size(1, 64)
SIGNATURE = size(8, 72)
REASON = text(4000, breaks="\n\t")
AMOUNT = Only("finite and not negative", lambda value: 0 <= value < math.inf)
LOSS = Only("finite, or NaN: none yet", lambda value: not math.isinf(value))
ADDRESS = Only("HOST:PORT, or multiaddrs", lambda value: is_address(value) or are_routes(value))
TENSORS = (ANCHOR, MOMENTUM, ADAM_M, ADAM_V)
TENSOR = Only(f"one of {', '.join(TENSORS)}", lambda value: value in TENSORS)
PADDING = size(0, CHUNK_BYTES)
VALUES = size(0, CHUNK_BYTES)
