"""Predicts the fraction of its time that a site will spend in inner steps, from the measured links.

In a round, each of n members sends its vector of P values by reduce-scatter and all-gather: 2·P·(n − 1)/n values, of 4
bytes or as encoded by the codec. It sends them at the rate of the slowest link, after H inner steps or, with overlap,
during them. A pair in noloco exchanges P values in both directions at once; what is sent ahead of the round does not
count.
"""

from __future__ import annotations

import math

from pier_node.base.units import percent, seconds
from pier_node.config.run import RunConfig
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.outer.codec import codec
from pier_node.rounds.plan import CHUNK

GOOD, POOR = 0.8, 0.5
AIM = 0.9
"""Utilisation that the advice aims at."""
CHECK = "utilisation"


def exchange_bytes(config: RunConfig, parameters: int, sites: int) -> float:
    """Bytes that each site sends until the whole model is synced once."""
    bytes_a_value = codec(config.outer.codec).size(CHUNK) / CHUNK
    if config.outer.algorithm == "noloco":
        return bytes_a_value * parameters
    return 2 * bytes_a_value * parameters * (sites - 1) / sites


def share_of_compute(config: RunConfig, compute: float, exchange: float) -> float:
    """The fraction of its time that a site computes."""
    return compute / (max(compute, exchange) if config.outer.overlap else compute + exchange)


def inner_steps(config: RunConfig) -> int:
    """H, the number of inner steps from one exchange to the next."""
    return 1 if config.outer.algorithm == "sync" else config.outer.inner_steps


def utilisation_finding(
    config: RunConfig, parameters: int, sites: int, rate: float, speed: float, measured: float | None
) -> Finding:
    """The prediction.

    Args:
        sites: number of sites that take part, this one included.
        rate: of the slowest link, in bytes per second; 0: not known.
        speed: of this site in inner steps, in tokens per second; 0: not known yet.
        measured: utilisation measured by its daemon so far, including waits for other sites; None: not yet.
    """
    if sites < 2:
        return Finding(THIS_SITE, CHECK, Verdict.OK, "a run of one site exchanges nothing")
    if not rate:
        return Finding(THIS_SITE, CHECK, Verdict.UNKNOWN, "no link to another site could be measured")
    exchange = exchange_bytes(config, parameters, sites) / rate
    if not speed:
        detail = f"an exchange takes {seconds(exchange)}; its part of the time shows once this site has trained"
        return Finding(THIS_SITE, CHECK, Verdict.UNKNOWN, detail, "", {"exchange_seconds": exchange})
    step = config.step_tokens / speed
    steps = inner_steps(config)
    share = share_of_compute(config, steps * step, exchange)
    so_far = f"; {percent(measured)} so far, waits for others included" if measured is not None else ""
    times = f"H = {steps} inner steps take {seconds(steps * step)}, an exchange {seconds(exchange)}"
    detail = f"{percent(share)} expected: {times}{so_far}"
    values = {"utilisation": share, "exchange_seconds": exchange, "compute_seconds": steps * step}
    if share >= GOOD:
        return Finding(THIS_SITE, CHECK, Verdict.OK, detail, "", values)
    wanted = _round_up((AIM if config.outer.overlap else AIM / (1 - AIM)) * exchange / step)
    verdict = Verdict.ADVICE if share >= POOR else Verdict.PROBLEM
    return Finding(THIS_SITE, CHECK, verdict, detail, _remedy(config, wanted), {**values, "better_inner_steps": wanted})


def _remedy(config: RunConfig, wanted: int) -> str:
    if config.outer.algorithm == "sync":
        return f'Synchronous training needs a faster line: choose algorithm = "pier" with inner_steps = {wanted}.'
    less = _less_traffic(config)
    if wanted > config.inner.total_steps:
        return (
            f"The run's {config.inner.total_steps} inner steps are fewer than the H = {wanted} needed for "
            f"{100 * AIM:.0f} %: give the slowest site a faster line, or train a smaller model{less}."
        )
    return (
        f"Raise outer.inner_steps to H = {wanted} in the run.toml of a new run (it never changes within one) for "
        f"{100 * AIM:.0f} %, or give the slowest site a faster line{less}."
    )


def _less_traffic(config: RunConfig) -> str:
    settings = [] if config.outer.codec != "none" else ['codec = "int4" (an eighth of the bytes)']
    settings += [] if config.outer.overlap else ["overlap = true (train on while sending)"]
    return f"; or set outer.{' and outer.'.join(settings)}" if settings else ""


def _round_up(steps: float) -> int:
    """Round up to two digits: 1234 -> 1300."""
    unit = 10 ** max(0, len(str(math.ceil(steps))) - 2)
    return int(math.ceil(steps / unit) * unit)
