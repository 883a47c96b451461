"""Dealing documents: one part to validate on, at every site the same, and a part to train on for each slot.

A document's part follows from its name and its text alone, by BLAKE2b, so that sites with the same data agree without
a word, and more data moves no document that was dealt before.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

from pier_node.data.files import Document

VALIDATION = -1
"""The part that no site trains on."""
HELD_OUT = 0.1
"""The fraction of a domain's documents that no expert trains on."""

Split = Literal["dev", "prior", "test"]
"""What held-out documents of a domain are for: to accept an expert, to fit the prior of a mixture, to score it."""
SPLITS: tuple[Split, ...] = get_args(Split)


def part_of(document: Document, validation: float, slots: int) -> int:
    """The slot in 0..slots-1 that trains on a document, or VALIDATION for about the fraction `validation` of them."""
    name, text = document.name.encode(errors="surrogateescape"), document.text.encode()
    digest = hashlib.blake2b(b"%b\0%b" % (name, text), digest_size=16).digest()
    if int.from_bytes(digest[:8], "big") < int(validation * 2**64):
        return VALIDATION
    return int.from_bytes(digest[8:], "big") % slots
