"""The plan of each outer round: its inner steps, its fragment, its momentum μ and its outer learning rate η.

Pure: no I/O, no clock. A plan is a function of the configuration and the round's number, so all members agree on it
without communication. A site that is slow or late does fewer of the inner steps: see site/inner_steps.py. The
schedules of μ (momentum decay) and η are those of Pier (Fan and Zhang, arXiv 2511.17849): "staged" as published,
"cosine" as in the authors' later reference code.

Fragments are contiguous parts of the model that are synced in turn, so that a round sends only one of them. Source:
Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, section 2.2. Here a fragment is a
range of elements of the canonical order. Where fragments are at least a piece long, the cuts between them are rounded
down to the boundaries of the pieces in which a state is hashed (outer/state.py).

The inner learning rate rises linearly, then decays to its least. cosine: GPT-3, arXiv 2005.14165. wsd: warmup, stable,
decay (MiniCPM, arXiv 2404.06395), with a decay of 1 − √x, which Hägele et al. (arXiv 2405.18392) found the best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from pier_node.config.run import InnerSection, OuterSection, RunConfig
from pier_node.outer.state import PIECE


def span(length: int, fragments: int, fragment: int) -> slice:
    """The elements of one fragment; together, all fragments cover [0, length) exactly once."""
    return slice(_cut(length, fragments, fragment), _cut(length, fragments, fragment + 1))


def entry(node: str, fragment: int) -> str:
    """The ledger key that counts a site's tokens in a fragment; fragment 0 also stands for the whole model."""
    return f"{node}/{fragment}" if fragment else node


def _cut(length: int, fragments: int, index: int) -> int:
    cut = length * index // fragments
    return cut // PIECE * PIECE if length >= fragments * PIECE and index < fragments else cut


RAMP = 0.1
"""Part of the run after the start in which η rises from 0, and in which μ is above its final value."""
ANNEALED = 0.25
"""Part of the run at whose end μ is 0 and η is 1."""
ROUNDING = 1e-9
"""A fraction of a run this close to a boundary counts as the boundary."""


class Kind(Enum):
    """How a round turns what the sites send into the next outer state."""

    SOLO = "solo"
    """One site trains with everyone's batch; its weights become the anchor."""
    SYNC = "sync"
    """One inner step; gradients are averaged, and the outer state takes the AdamW step."""
    LOCAL = "local"
    """Sites train separately; pseudo-gradients are averaged, and the anchor takes a Nesterov step."""
    PAIR = "pair"
    """Sites train separately and meet in pairs; each has its own anchor, which takes a heavy-ball step (noloco.py)."""


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one outer round.

    Attributes:
        first_step, steps: inner steps [first_step, first_step + steps), counted from 0 over the whole run.
        momentum: factor μ on M; 1 within an interval of synchronous steps, 0 if no momentum is accumulated.
        lr: outer learning rate η; 0 if the anchor follows the weights. Pairs have neither: see [outer.noloco].
        warmup: whether this is a round of a start that adds its pseudo-gradient to M.
        sites: least number of sites that must be in the round: all of the run in its first exchange, then one.
        fragment, fragments: index of the fragment that it syncs, and their number; (0, 1) is the whole model.
    """

    round: int
    kind: Kind
    first_step: int
    steps: int
    momentum: float
    lr: float
    warmup: bool
    sites: int
    fragment: int = 0
    fragments: int = 1

    def span(self, length: int) -> slice:
        """The elements that the round syncs, of a model of this length."""
        return span(length, self.fragments, self.fragment)


def start_steps(config: RunConfig) -> int:
    """Inner steps of the synchronous start: a whole number of outer rounds, as close to p·T as possible."""
    outer = config.outer
    if outer.start == "none":
        return 0
    rounds = round(outer.start_fraction * config.inner.total_steps / outer.inner_steps)
    return min(max(rounds, 1) * outer.inner_steps, config.inner.total_steps)


def total_rounds(config: RunConfig) -> int:
    """Outer rounds of the whole run. In a pipeline each step is a round too; rounds with a failed step come on top."""
    if config.pipeline.stages > 1:
        alone = config.inner.total_steps - stepwise(config)
        return config.inner.total_steps + math.ceil(alone / config.outer.inner_steps)
    before, local_steps = _start_rounds(config), config.inner.total_steps - start_steps(config)
    if config.outer.algorithm == "sync" or local_steps <= 0:
        return before
    # The last step is followed by P - 1 rounds without steps, one for each fragment that still has unsent progress.
    return before + math.ceil(local_steps / _steps_of_round(config.outer)) + config.outer.fragments - 1


def round_plan(config: RunConfig, number: int) -> RoundPlan:
    """The plan of round `number`, counted from 1."""
    before = _start_rounds(config)
    if number <= stepwise(config):
        return _sync_plan(config, number)
    return _solo_plan(config, number) if number <= before else _local_plan(config, number, number - 1 - before)


def synced(config: RunConfig, number: int, length: int) -> int:
    """Number of elements that round `number` syncs, of a model of this length."""
    part = round_plan(config, number).span(length)
    return int(part.stop - part.start)


def momentum_at(outer: OuterSection, done: float) -> float:
    """μ once the fraction `done` of the run is complete; boundaries belong to the later interval."""
    since = done - outer.start_fraction + ROUNDING
    if outer.schedule in ("constant", "anneal"):
        return outer.momentum * (1.0 - _annealed(outer, done))
    if since < 0:
        return 0.9
    if outer.schedule == "cosine":
        return 0.90 + 0.045 * (1 + math.cos(math.pi * since / (1 - outer.start_fraction)))
    return 0.99 if since < RAMP / 2 else 0.95 if since < RAMP else 0.9


def lr_at(outer: OuterSection, done: float) -> float:
    """η once the fraction `done` of the run is complete; boundaries belong to the later interval."""
    since = done - outer.start_fraction
    if outer.schedule in ("constant", "anneal"):
        return outer.lr + (1.0 - outer.lr) * _annealed(outer, done)
    if since < RAMP - ROUNDING:
        return 1.1 * max(since, 0.0) / RAMP
    if outer.schedule == "cosine":
        left = 1 - outer.start_fraction - RAMP
        return 0.9 + 0.1 * (1 + math.cos(math.pi * (since - RAMP) / left)) if left > 0 else 1.1
    return 1.1 if done < 0.8 - ROUNDING else 0.9


def _annealed(outer: OuterSection, done: float) -> float:
    """How far μ and η have come to 0 and 1."""
    return max(0.0, 1.0 - (1.0 - done) / ANNEALED) if outer.schedule == "anneal" else 0.0


def _steps_of_round(outer: OuterSection) -> int:
    """Inner steps between two rounds; each round syncs the next fragment."""
    return outer.inner_steps // outer.fragments


def _start_rounds(config: RunConfig) -> int:
    """Number of rounds before sites train separately."""
    return stepwise(config) or math.ceil(start_steps(config) / config.outer.inner_steps)


def stepwise(config: RunConfig) -> int:
    """Number of inner steps, from the first, that are one round each because gradients are averaged."""
    if config.outer.algorithm == "sync":
        return config.inner.total_steps
    return start_steps(config) if config.outer.start == "sync" else 0


def _solo_plan(config: RunConfig, number: int) -> RoundPlan:
    outer = config.outer
    first = (number - 1) * outer.inner_steps
    steps = min(outer.inner_steps, config.inner.total_steps - first)
    momentum = outer.momentum if outer.momentum_warmup else 0.0
    return RoundPlan(number, Kind.SOLO, first, steps, momentum, lr=0.0, warmup=outer.momentum_warmup, sites=1)


def _local_plan(config: RunConfig, number: int, index: int) -> RoundPlan:
    outer, total, each = config.outer, config.inner.total_steps, _steps_of_round(config.outer)
    first = min(start_steps(config) + index * each, total)
    steps = min(each, total - first)
    done = (first + steps) / total
    sites = config.run.sites if index == 0 and stepwise(config) == 0 else 1
    if outer.algorithm == "noloco":
        return RoundPlan(number, Kind.PAIR, first, steps, momentum=0.0, lr=0.0, warmup=False, sites=sites)
    return RoundPlan(
        number,
        Kind.LOCAL,
        first,
        steps,
        momentum=momentum_at(outer, done),
        lr=lr_at(outer, done),
        warmup=False,
        sites=sites,
        fragment=index % outer.fragments,
        fragments=outer.fragments,
    )


def _sync_plan(config: RunConfig, number: int) -> RoundPlan:
    outer = config.outer
    opens_interval = (number - 1) % outer.inner_steps == 0
    accumulates = outer.momentum_warmup and outer.algorithm != "sync"
    momentum = (outer.momentum if opens_interval else 1.0) if accumulates else 0.0
    sites = config.run.sites if number == 1 else 1
    return RoundPlan(number, Kind.SYNC, number - 1, 1, momentum, lr=0.0, warmup=accumulates, sites=sites)


def learning_rate(step: int, config: InnerSection) -> float:
    """The rate of inner step `step`, counted from 0 over the run: up to lr in warmup_steps, then down to min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_start, drop = config.warmup_steps, config.lr - config.min_lr
    if config.schedule == "wsd":
        decay_start = max(decay_start, config.total_steps - math.ceil(config.decay_fraction * config.total_steps))
    done = min(1.0, max(0, step - decay_start) / max(1, config.total_steps - decay_start))
    if config.schedule == "wsd":
        return config.min_lr + drop * (1.0 - math.sqrt(done))
    return config.min_lr + 0.5 * drop * (1.0 + math.cos(math.pi * done))
