"""What an exchange computes from the updates of all sites, codec and error feedback included, without a network.

The same arithmetic as node/pier_node/rounds/reduce.py: everybody uses decoded values, and the error of a mean goes to
the owner of its chunk. A mean of sparse codes has no error: the codes themselves are passed on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pier_node.base.shared import Vector
from pier_node.outer.codec import Codec, of_means
from pier_node.outer.mean import Update, relative_weights, weighted_mean
from pier_node.rounds.exchange_plan import CHUNK


def exchanged(updates: Sequence[Update], codec: Codec) -> Vector:
    """The token-weighted mean as all sites see it, as long as the updates; fills in their errors."""
    mean = np.empty_like(updates[0].vector)
    for index, start in enumerate(range(0, len(mean), CHUNK)):
        _average(updates, slice(start, start + CHUNK), updates[index % len(updates)], codec, mean)
    return mean


def decoded(update: Update, codec: Codec) -> Vector:
    """An update as it arrives at others; fills in its error."""
    parts = (slice(start, start + CHUNK) for start in range(0, len(update.vector), CHUNK))
    return np.concatenate([_sent(update, part, codec) for part in parts])


def sent_bytes(codec: Codec, members: int, length: int) -> float:
    """What each of some members sends, in the mean: its update, then the mean of its shard, but nothing to itself."""
    means = of_means(codec, members, length)
    mean = means.size(length) if means else members * codec.size(length)
    return (codec.size(length) + mean) * (1 - 1 / members)


def _average(updates: Sequence[Update], part: slice, owner: Update, codec: Codec, mean: Vector) -> None:
    tokens = [update.tokens for update in updates]
    parts = [_sent(update, part, codec) for update in updates]
    weighted_mean(parts, relative_weights(tokens), out=mean[part])
    means = of_means(codec, len(updates), len(mean[part]))
    if means is None:
        return
    arrived = means.decode(means.encode(mean[part]), len(mean[part]))
    if owner.error is not None:
        owner.error[part] += np.float32(sum(tokens) / owner.tokens) * (mean[part] - arrived)
    mean[part] = arrived


def _sent(update: Update, part: slice, codec: Codec) -> Vector:
    values = update.sent(part)
    arrived = codec.decode(codec.encode(values), len(values))
    if update.error is not None:
        update.error[part] = values - arrived
    return arrived
