"""What the slowest link predicts: how long an exchange takes, and for which part of its time a site trains.

In a round, each of n members sends its vector of P values by reduce-scatter and all-gather: 2·P·(n − 1)/n values, of 4
bytes or as encoded by the codec, after H inner steps or, with overlap, during them. A pair in noloco exchanges P values
in both directions at once; what is sent ahead of the round does not count.

A fragment has a round of its own, with its round trips. What a round takes besides (the outer step, votes that are
written down) is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from pier_node.config.run import RunConfig
from pier_node.outer.codec import codec, of_means
from pier_node.rounds.exchange_plan import CHUNK

ROUND_TRIPS = 2
"""Of a round: announcement and proposal, then data and votes (docs/protocol.md, "The exchange")."""


class Line(NamedTuple):
    """What an exchange has to pass: bytes per second of the slowest link, and seconds of the longest round trip."""

    rate: float
    round_trip: float


def exchange_seconds(config: RunConfig, parameters: int, sites: int, line: Line) -> float:
    """Seconds until the whole model is synced once."""
    return (
        exchange_bytes(config, parameters, sites) / line.rate + ROUND_TRIPS * config.outer.fragments * line.round_trip
    )


def exchange_bytes(config: RunConfig, parameters: int, sites: int) -> float:
    """Bytes that each site sends until the whole model is synced once."""
    used = codec(config.outer.codec, config.outer.density)
    if config.outer.algorithm == "noloco":
        return used.size(CHUNK) / CHUNK * parameters
    size = used.size(CHUNK) / CHUNK + mean_bytes(config, sites)
    return size * parameters * (sites - 1) / sites


def mean_bytes(config: RunConfig, sites: int) -> float:
    """Bytes per element of a mean as it travels."""
    used = codec(config.outer.codec, config.outer.density)
    means = of_means(used, sites, CHUNK)
    return (means.size(CHUNK) if means else sites * used.size(CHUNK)) / CHUNK


def share_of_compute(config: RunConfig, compute: float, exchange: float) -> float:
    """The fraction of its time that a site computes."""
    return compute / (max(compute, exchange) if config.outer.overlap else compute + exchange)


def inner_steps(config: RunConfig) -> int:
    """H, the number of inner steps from one exchange to the next."""
    return 1 if config.outer.algorithm == "sync" else config.outer.inner_steps
