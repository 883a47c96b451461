"""Codecs: they shrink the vectors that sites exchange. Each module holds a few codecs; this one finds them by name.

What a lossy codec drops is kept and sent later (error feedback): rounds/reduce.py computes it, and
site/error_feedback.py keeps it.
"""

from __future__ import annotations

from pier_node.base.errors import PierError
from pier_node.outer.codec.blockwise import Int4, Int8
from pier_node.outer.codec.interface import BadCode, Codec
from pier_node.outer.codec.plain import Bf16, Plain
from pier_node.outer.codec.topk import TopK

__all__ = ["CODECS", "BadCode", "Codec", "codec"]

CODECS: dict[str, Codec] = {
    each.name: each for each in (Plain(), Bf16(), Int8(), Int4(), TopK("topk", bits=4), TopK("topk2", bits=2))
}
"""Codecs by their name in the configuration; they round to nearest and can be used by several threads."""


def codec(name: str) -> Codec:
    """The codec with this name. Raises PierError."""
    try:
        return CODECS[name]
    except KeyError:
        raise PierError(f"there is no codec {name!r}", f"Use one of {', '.join(CODECS)}.") from None
