"""Codecs: they shrink the vectors that sites exchange. Each module holds a few codecs; this one finds them by name.
`outer.codec` says which one a run uses; site/membership.py hands it to the rounds.

What a lossy codec drops is kept and sent later (error feedback): rounds/reduce.py computes it, and
site/error_feedback.py keeps it.
"""

from __future__ import annotations

from pier_node.base.errors import PierError
from pier_node.outer.codec.blockwise import Int4, Int8
from pier_node.outer.codec.interface import BadCode, Bf16, Codec, Plain
from pier_node.outer.codec.topk import DENSITY, TopK

__all__ = ["CODECS", "BadCode", "Codec", "codec", "of_means"]

SPARSE = {"topk": 4, "topk2": 2}
"""Bits of a value that is kept, by codec."""
_ALL = (Plain(), Bf16(), Int8(), Int4(), *(TopK(name, bits) for name, bits in SPARSE.items()))
CODECS: dict[str, Codec] = {each.name: each for each in _ALL}
"""Codecs by their name in the configuration; they round to nearest and can be used by several threads."""


def codec(name: str, density: int = DENSITY) -> Codec:
    """The codec with this name; a sparse one keeps one value in `density`. Raises PierError."""
    if name in SPARSE and density != DENSITY:
        return TopK(name, SPARSE[name], density)
    if name not in CODECS:
        raise PierError(f"there is no codec {name!r}", f"Use one of {', '.join(CODECS)}.")
    return CODECS[name]


def of_means(used: Codec, members: int, length: int) -> Codec | None:
    """How the mean of some members' codes of `length` values travels: the codec, or None for those codes themselves.

    A mean of sparse codes has more values than a sparse codec keeps. Made sparse again it loses most of what its
    members sent, and error feedback brings that so late that training suffers. So the members' codes are passed on as
    they came; or, if that takes more bytes, the mean as int8.
    """
    if not used.sparse or not members:
        return used
    return None if members * used.size(length) <= CODECS["int8"].size(length) else CODECS["int8"]
