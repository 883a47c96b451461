"""Codecs: fewer bytes for the vectors that sites exchange. One codec a file; here they are found by name."""

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
"""By the name that the configuration calls it; they round to nearest, and may be used by several threads."""


def codec(name: str) -> Codec:
    """The codec of that name. Raises PierError."""
    try:
        return CODECS[name]
    except KeyError:
        raise PierError(f"there is no codec {name!r}", f"Use one of {', '.join(CODECS)}.") from None
