"""What would make the exchange shorter: a codec, or more inner steps between rounds; from figures of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from pier_coordinator.timeline import Segment

BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1.01, "int4": 0.52}
"""What a value takes on the way (docs/results.md, codecs)."""

GOAL = 0.25
"""An exchange of a quarter of the inner steps' time is not worth another thought."""

PASSES = 2
"""A member sends its contribution once, in the reduce-scatter, and its shard once to all in the all-gather."""


def in_stages(run: Mapping[str, Any]) -> bool:
    """Whether the run is a pipeline, whose sites exchange what the paths of an iteration want, without a codec."""
    return (run.get("stages") or 1) > 1


def payload(run: Mapping[str, Any], segments: Sequence[Segment]) -> float | None:
    """Bytes that a site sends in a round: as measured, or else from the model's size; None when neither is known."""
    sent = [later.bytes_sent - earlier.bytes_sent for earlier, later in pairwise(segments)]
    measured = [amount for amount in sent if amount > 0]
    if measured:
        return mean(measured)
    width = BYTES.get(run.get("codec") or "none")
    return PASSES * run["parameters"] * width if run.get("parameters") and width else None


def shorter_exchange(run: Mapping[str, Any], segments: Sequence[Segment], uplink: float | None) -> str:
    """A remedy for a site whose exchange takes too long, or that is late."""
    if in_stages(run):
        return "its log says what it fetches, and from whom (pier-coordinator logs)"
    size, compute = payload(run, segments), mean(row.compute for row in segments) if segments else 0.0
    if not size or not uplink or not compute:
        return "measure its line with pier-node doctor; a narrower codec or a larger H (outer.inner_steps) needs less"
    factor = size / uplink / (GOAL * compute)
    if factor <= 1:
        return "its line is fast enough for this run: see what else uses the line, and its log (pier-coordinator logs)"
    return f"try {_codec(run, factor)}{_steps(run, factor)}"


def _codec(run: Mapping[str, Any], factor: float) -> str:
    gain = BYTES.get(run.get("codec") or "none", 0.0) / BYTES["int4"]
    if gain <= 1:
        return ""
    return "codec int4 or " if gain >= factor else "codec int4 and "


def _steps(run: Mapping[str, Any], factor: float) -> str:
    steps = run.get("inner_steps")
    if not steps:
        return f"{factor:.2g} times as many inner steps between rounds"
    gain = BYTES.get(run.get("codec") or "none", 0.0) / BYTES["int4"]
    alone = gain <= 1 or gain >= factor
    return f"H = {_round_up(steps * (factor if alone else factor / gain))}"


def _round_up(steps: float) -> int:
    """To two digits that people like: 187 -> 200."""
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return int(math.ceil(steps / (5 * unit)) * 5 * unit)
