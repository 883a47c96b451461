"""What an exchange makes of the contributions of all sites, codec and error feedback included, without a network.

The same arithmetic as node/pier_node/outer/reduce.py: everybody uses decoded values, and the error of a mean goes to
the owner of its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pier_node.outer.codec import Codec
from pier_node.outer.contribution import Contribution
from pier_node.outer.mean import relative_weights, weighted_mean
from pier_node.outer.plan import CHUNK
from pier_node.shared import Vector


def exchanged(contributions: Sequence[Contribution], codec: Codec) -> Vector:
    """The token-weighted mean as all sites see it, as long as the contributions; fills in their errors."""
    mean = np.empty_like(contributions[0].vector)
    for index, start in enumerate(range(0, len(mean), CHUNK)):
        _average(contributions, slice(start, start + CHUNK), contributions[index % len(contributions)], codec, mean)
    return mean


def _average(
    contributions: Sequence[Contribution], part: slice, owner: Contribution, codec: Codec, mean: Vector
) -> None:
    tokens = [contribution.tokens for contribution in contributions]
    parts = [_sent(contribution.vector[part], contribution.error, part, codec) for contribution in contributions]
    weighted_mean(parts, relative_weights(tokens), out=mean[part])
    decoded = codec.decode(codec.encode(mean[part]), len(mean[part]))
    if owner.error is not None:
        owner.error[part] += np.float32(sum(tokens) / owner.tokens) * (mean[part] - decoded)
    mean[part] = decoded


def _sent(values: Vector, error: Vector | None, part: slice, codec: Codec) -> Vector:
    decoded = codec.decode(codec.encode(values), len(values))
    if error is not None:
        error[part] = values - decoded
    return decoded
