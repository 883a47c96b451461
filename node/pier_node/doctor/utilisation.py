"""How much of its time a site will spend in inner steps, on the links that were measured.

In a round each of n members sends its vector of 4·P bytes by reduce-scatter and all-gather: 2·4·P·(n − 1)/n bytes, at
the rate of the slowest link, after H inner steps.
"""

from __future__ import annotations

import math

from pier_node.config import RunConfig
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.units import percent, seconds

GOOD, POOR = 0.8, 0.5
AIM = 0.9
"""Utilisation that advice aims at."""
CHECK = "utilisation"


def exchange_bytes(parameters: int, sites: int) -> float:
    """Bytes that each of the sites sends in a round."""
    return 2 * 4 * parameters * (sites - 1) / sites


def inner_steps(config: RunConfig) -> int:
    """H, inner steps from one exchange to the next."""
    return 1 if config.outer.algorithm == "sync" else config.outer.inner_steps


def utilisation_finding(
    config: RunConfig, parameters: int, sites: int, rate: float, speed: float, measured: float | None
) -> Finding:
    """The prediction.

    Args:
        sites: that take part, this one included.
        rate: of the slowest link, bytes a second; 0: not known.
        speed: of this site in inner steps, tokens a second; 0: not known yet.
        measured: by its daemon so far, waits for other sites included; None: not yet.
    """
    if sites < 2:
        return Finding(THIS_SITE, CHECK, Verdict.OK, "a run of one site exchanges nothing")
    if not rate:
        return Finding(THIS_SITE, CHECK, Verdict.UNKNOWN, "no link to another site could be measured")
    exchange = exchange_bytes(parameters, sites) / rate
    if not speed:
        detail = f"an exchange takes {seconds(exchange)}; its part of the time shows once this site has trained"
        return Finding(THIS_SITE, CHECK, Verdict.UNKNOWN, detail, "", {"exchange_seconds": exchange})
    step = config.inner.batch_size * config.model.context / speed
    steps = inner_steps(config)
    share = steps * step / (steps * step + exchange)
    so_far = f"; {percent(measured)} so far, waits for others included" if measured is not None else ""
    times = f"H = {steps} inner steps take {seconds(steps * step)}, an exchange {seconds(exchange)}"
    detail = f"{percent(share)} expected: {times}{so_far}"
    values = {"utilisation": share, "exchange_seconds": exchange, "compute_seconds": steps * step}
    if share >= GOOD:
        return Finding(THIS_SITE, CHECK, Verdict.OK, detail, "", values)
    wanted = _round_up(AIM / (1 - AIM) * exchange / step)
    verdict = Verdict.ADVICE if share >= POOR else Verdict.PROBLEM
    return Finding(THIS_SITE, CHECK, verdict, detail, _remedy(config, wanted), {**values, "better_inner_steps": wanted})


def _remedy(config: RunConfig, wanted: int) -> str:
    if config.outer.algorithm == "sync":
        return f'Synchronous training needs a faster line: choose algorithm = "pier" with inner_steps = {wanted}.'
    if wanted > config.inner.total_steps:
        return (
            f"The run's {config.inner.total_steps} inner steps are fewer than the H = {wanted} needed for "
            f"{100 * AIM:.0f} %: give the slowest site a faster line, or train a smaller model."
        )
    return (
        f"Raise outer.inner_steps to H = {wanted} in the run.toml of a new run (it never changes within one) for "
        f"{100 * AIM:.0f} %, or give the slowest site a faster line."
    )


def _round_up(steps: float) -> int:
    """To two digits: 1234 -> 1300."""
    unit = 10 ** max(0, len(str(math.ceil(steps))) - 2)
    return int(math.ceil(steps / unit) * unit)
