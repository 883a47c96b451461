"""What each outer round of a run does: its inner steps, its payload, its momentum μ and its outer learning rate η.

A pure function of the configuration and the round's number, so that all members agree on it without a word.
Formulas: spec/pier.md section 2, after Fan and Zhang, arXiv 2511.17849.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from pier_node.config import OuterSection, RunConfig

RAMP = 0.1
"""Part of the run over which η rises from 0 after the start, and within which μ is above its final value."""
ROUNDING = 1e-9


class Kind(Enum):
    """How a round turns what sites send into the next outer state."""

    SOLO = "solo"
    """One site trains with everybody's batch; its weights become the anchor."""
    SYNC = "sync"
    """One inner step; gradients are averaged and the outer state takes the AdamW step."""
    LOCAL = "local"
    """Sites train apart; pseudo-gradients are averaged and the anchor takes a Nesterov step."""


@dataclass(frozen=True)
class RoundPlan:
    """One outer round.

    Attributes:
        first_step, steps: inner steps [first_step, first_step + steps), counted from 0 over the whole run.
        momentum: factor μ on M; 1 within an interval of synchronous steps, 0 where no momentum is gathered.
        lr: outer learning rate η; 0 where the anchor follows the weights.
        warmup: a start's round adds its pseudo-gradient to M.
        first_exchange: the first round that needs other sites.
    """

    round: int
    kind: Kind
    first_step: int
    steps: int
    momentum: float
    lr: float
    warmup: bool
    first_exchange: bool


def start_steps(config: RunConfig) -> int:
    """Inner steps of the synchronous start: whole outer rounds, as near to p·T as they come."""
    outer = config.outer
    if outer.start == "none":
        return 0
    rounds = round(outer.start_fraction * config.inner.total_steps / outer.inner_steps)
    return min(max(rounds, 1) * outer.inner_steps, config.inner.total_steps)


def total_rounds(config: RunConfig) -> int:
    """Outer rounds of the whole run."""
    stepwise = _stepwise(config)
    rest = config.inner.total_steps - stepwise
    return stepwise + math.ceil(rest / config.outer.inner_steps)


def round_plan(config: RunConfig, number: int) -> RoundPlan:
    """The plan of round `number`, counted from 1."""
    outer, stepwise = config.outer, _stepwise(config)
    if number <= stepwise:
        return _sync_plan(config, number)
    first = stepwise + (number - 1 - stepwise) * outer.inner_steps
    steps = min(outer.inner_steps, config.inner.total_steps - first)
    start = start_steps(config)
    if first < start:
        momentum = outer.momentum if outer.momentum_warmup else 0.0
        return RoundPlan(number, Kind.SOLO, first, steps, momentum, 0.0, outer.momentum_warmup, False)
    done = (first + steps) / config.inner.total_steps
    momentum, lr = momentum_at(outer, done), lr_at(outer, done)
    opens = first == start and stepwise == 0
    return RoundPlan(number, Kind.LOCAL, first, steps, momentum, lr, False, opens)


def momentum_at(outer: OuterSection, done: float) -> float:
    """μ when the fraction `done` of the run is behind; boundaries belong to the later interval."""
    since = done - outer.start_fraction + ROUNDING
    if outer.schedule == "constant":
        return outer.momentum
    if since < 0:
        return 0.9
    if outer.schedule == "cosine":
        return 0.90 + 0.045 * (1 + math.cos(math.pi * since / (1 - outer.start_fraction)))
    return 0.99 if since < RAMP / 2 else 0.95 if since < RAMP else 0.9


def lr_at(outer: OuterSection, done: float) -> float:
    """η when the fraction `done` of the run is behind; boundaries belong to the later interval."""
    since = done - outer.start_fraction
    if outer.schedule == "constant":
        return outer.lr
    if since < RAMP - ROUNDING:
        return 1.1 * max(since, 0.0) / RAMP
    if outer.schedule == "cosine":
        left = 1 - outer.start_fraction - RAMP
        return 0.9 + 0.1 * (1 + math.cos(math.pi * (since - RAMP) / left)) if left > 0 else 1.1
    return 1.1 if done < 0.8 - ROUNDING else 0.9


def _stepwise(config: RunConfig) -> int:
    """Inner steps, from the first, that are a round each because gradients are averaged."""
    if config.outer.algorithm == "sync":
        return config.inner.total_steps
    return start_steps(config) if config.outer.start == "sync" else 0


def _sync_plan(config: RunConfig, number: int) -> RoundPlan:
    outer = config.outer
    opens_interval = (number - 1) % outer.inner_steps == 0
    gathers = outer.momentum_warmup and outer.algorithm != "sync"
    momentum = (outer.momentum if opens_interval else 1.0) if gathers else 0.0
    return RoundPlan(number, Kind.SYNC, number - 1, 1, momentum, 0.0, gathers, number == 1)
