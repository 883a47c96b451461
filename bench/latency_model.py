"""What waiting costs: a tree all-reduce against pairs, and pairs against a barrier (arXiv 2506.10911, section 5).

Monte Carlo, vectorised; all times of a simulation are in one unit, seconds where bytes are in play.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Dice = np.random.Generator

STEP_MU, STEP_VARIANCE = 1.0, 0.5
"""Of the logarithm of an inner step's time (Fig. 5B)."""
STEP_MEAN = math.exp(STEP_MU + STEP_VARIANCE / 2)


# --- a tree against a pair: Fig. 5A -----------------------------------------------------------------


def sigma_of(spread: float) -> float:
    """σ of the LogNormal time whose standard deviation is `spread` times its mean."""
    return math.sqrt(math.log(1 + spread**2))


def slower_of_two(sigma: float) -> float:
    """E[max(t1, t2)] over E[t], exact (Eq. 7)."""
    return 1 + math.erf(sigma / 2)


def tree_times(sites: int, sigma: float, samples: int, dice: Dice) -> Times:
    """When the root of a free-running binary tree has heard of all leaves, in mean message times: [samples]."""
    arrived = np.zeros((samples, sites))
    while arrived.shape[1] > 1:
        arrived += dice.lognormal(-(sigma**2) / 2, sigma, arrived.shape)
        arrived = np.maximum(arrived[:, 0::2], arrived[:, 1::2])
    return arrived[:, 0]


def tree_over_pair(sites: int, spread: float, samples: int, dice: Dice) -> float:
    """Time of a tree all-reduce over that of averaging in pairs."""
    sigma = sigma_of(spread)
    return float(tree_times(sites, sigma, samples, dice).mean() / slower_of_two(sigma))


# --- a barrier against pairs: Fig. 5B and beyond ------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """What an exchange costs once the last of its members is there, in units of step time.

    Attributes:
        barrier: an all-reduce of all sites; `pair`: a swap of two.
    """

    barrier: float = 0.0
    pair: float = 0.0


FREE = Exchange()


def finish_times(sites: int, steps: int, rounds: int, dice: Dice, exchange: Exchange = FREE) -> tuple[float, float]:
    """When the last site is done: with a barrier in every round, and with pairs, on the same inner steps."""
    sigma, together, apart = math.sqrt(STEP_VARIANCE), 0.0, np.zeros(sites)
    for _ in range(rounds):
        trained = dice.lognormal(STEP_MU, sigma, (sites, steps)).sum(axis=1)
        together += trained.max() + exchange.barrier
        apart += trained
        pairs = dice.permutation(sites)[: sites - sites % 2].reshape(-1, 2)
        apart[pairs] = apart[pairs].max(axis=1, keepdims=True) + exchange.pair
    return together, float(apart.max())


def barrier_over_pairs(sites: int, steps: int, rounds: int, dice: Dice, runs: int) -> float:
    """Time of DiLoCo over that of NoLoCo, communication left out; the mean of several runs."""
    times = [finish_times(sites, steps, rounds, dice) for _ in range(runs)]
    return float(np.mean([together / apart for together, apart in times]))


# --- with bytes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Every site's line: `bandwidth` in bits a second each way, `latency` one way in seconds."""

    bandwidth: float
    latency: float


def all_reduce_bits(parameters: float, sites: int, bits: float) -> float:
    """Bits that each site sends in a ring or reduce-scatter all-reduce."""
    return 2 * parameters * bits * (sites - 1) / sites


def exchange_on(link: Link, parameters: float, sites: int, bits: float) -> tuple[float, float]:
    """Seconds of an all-reduce (pipelined tree: its latency is that of the hops) and of a two-way swap of θ."""
    hops = 2 * math.ceil(math.log2(sites))
    barrier = all_reduce_bits(parameters, sites, bits) / link.bandwidth + hops * link.latency
    return barrier, parameters * bits / link.bandwidth + link.latency


@dataclass(frozen=True)
class Case:
    """A run of one size on one kind of link with one codec."""

    sites: int
    bandwidth: float
    codec: str
    bits: float


def utilisation(case: Case, setting: dict[str, Any], dice: Dice) -> dict[str, Any]:
    """Part of the time spent in inner steps, and bytes sent per site and inner step, of both methods."""
    link = Link(case.bandwidth, setting["latency"])
    seconds = exchange_on(link, setting["parameters"], case.sites, case.bits)
    barrier, pair = (cost * STEP_MEAN / setting["step_seconds"] for cost in seconds)
    steps, rounds = setting["inner_steps"], setting["rounds"]
    together, apart = finish_times(case.sites, steps, rounds, dice, Exchange(barrier, pair))
    work = STEP_MEAN * steps * rounds
    return {
        "sites": case.sites,
        "mbit": case.bandwidth / 1e6,
        "codec": case.codec,
        "bits": case.bits,
        "diloco_utilisation": work / together,
        "noloco_utilisation": work / apart,
        "speedup": together / apart,
        "diloco_bytes": all_reduce_bits(setting["parameters"], case.sites, case.bits) / 8 / steps,
        "noloco_bytes": setting["parameters"] * case.bits / 8 / steps,
    }
