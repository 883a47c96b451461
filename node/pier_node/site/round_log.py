"""A site's log: what it is about to train, and a line for each committed round: how far the run is and how it goes."""

from __future__ import annotations

import logging
import math
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from pier_node.base.units import amount, count, percent, rate, seconds, several, span
from pier_node.config.run import RunConfig
from pier_node.engine.program import Program
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import Kind, round_plan, total_rounds
from pier_node.outer.state import OuterState
from pier_node.rounds.prediction import Line, exchange_bytes, exchange_seconds, inner_steps, share_of_compute
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import Carrier, PeerLost
from pier_node.wire.probe import SIZES, LinkSpeed, asking, measure
from pier_proto.v1.peer_pb2 import Pulse

RECENT = 20
"""Rounds by whose pace the rest of the run is predicted."""

log = logging.getLogger(__name__)


async def tell_start(
    config: RunConfig,
    trainer: Program,
    progress: Progress,
    roster: Roster,
    carrier: Carrier,
    measured: Callable[[str, float], None],
) -> None:
    """Log what the run is, how much data this site has, and what its link to another site predicts, once it is known.

    A program of the site's owner tells nothing of its data.

    Args:
        measured: takes the node id of that other site, and the bandwidth to it in bytes per second.
    """
    if config.program is None:
        await _tell_model(config, trainer)
    else:
        _tell_rounds(config)
    others: list[str] = []

    def met() -> bool:
        others[:] = sorted(roster.participants().keys() - {carrier.node})
        return bool(others)

    await roster.changed.until(met)
    peer = random.choice(others)  # not all newcomers the same one
    try:
        link = await measure(asking(carrier, peer), sizes=SIZES[:-1])
    except PeerLost as lost:
        log.info("the link to %s could not be measured: %s", peer, lost.reason)
        return
    measured(peer, link.up)
    log.info("%s", prediction(config, progress.tokens_per_second, peer, link))


def prediction(config: RunConfig, speed: float, peer: str, link: LinkSpeed) -> str:
    """A link in words, and what follows for the run if no other is slower.

    Args:
        speed: of this site in inner steps, in tokens per second; 0: not known yet.
    """
    sites = max(config.run.sites, 2)
    parameters, line = Layout.of_run(config).length, Line(min(link.up, link.down), link.round_trip)
    size, takes = exchange_bytes(config, parameters, sites), exchange_seconds(config, parameters, sites, line)
    told = (
        f"link to {peer}: {seconds(link.round_trip)} round trip, {rate(link.up)} there, {rate(link.down)} back; "
        f"an exchange of {sites} sites sends {amount(size)}, which takes {seconds(takes)} on it"
    )
    if not speed:
        return told
    compute = inner_steps(config) * config.step_tokens / speed
    share = percent(share_of_compute(config, compute, takes))
    return f"{told}; the inner steps take {seconds(compute)}: this site trains {share} of the time"


async def _tell_model(config: RunConfig, trainer: Program) -> None:
    parameters = Layout.of(config.model).length
    log.info("model %s: %s parameters, context %d", config.model.name, count(parameters), config.model.context)
    _tell_rounds(config)
    data = await trainer.opened()
    steps = config.inner.total_steps
    log.info(
        "data: %s tokens to train on here, %s for validation; %s steps of %s tokens read it %.2g times",
        *(count(data.train), count(data.validation), count(steps), count(config.step_tokens)),
        steps * config.step_tokens / data.train,
    )


def _tell_rounds(config: RunConfig) -> None:
    rounds, plan_of = total_rounds(config), partial(round_plan, config)
    together = bisect_left(range(1, rounds + 1), True, key=lambda it: plan_of(it).kind in (Kind.LOCAL, Kind.PAIR))
    alone = together if plan_of(1).kind is Kind.SOLO else 0
    log.info(
        "run: %s of up to %s%s; sites expected: %d",
        several(rounds, "round"),
        several(max(plan_of(it).steps for it in (1, min(together + 1, rounds))), "step"),
        f", the first {alone} at one site alone (outer.start)" if alone and config.run.sites > 1 else "",
        config.run.sites,
    )


class RoundLog:
    """Logs committed rounds.

    Args:
        steps: number of inner steps of the whole run.
        others: returns the last pulses of live sites, by node, where all are to be in a round.
        clock: returns seconds.
    """

    def __init__(
        self,
        steps: int,
        progress: Progress,
        carrier: Carrier,
        others: Callable[[], Mapping[str, Pulse]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._progress, self._carrier, self._clock = steps, progress, carrier, clock
        self._others = others
        self._sent = carrier.bytes_sent()
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)
        self._sample = ""

    def committed(self, state: OuterState) -> None:
        """Log a round."""
        parts = (*self._training(state), *self._round(), self._late(state), self._left())
        told = ", ".join(part for part in parts if part)
        log.info("round %d committed by %d: %s", state.round, len(state.members), told)
        before, self._sample = self._sample, self._progress.sample
        if self._sample != before:
            log.info("the model writes: %s", " ".join(self._sample.split()))

    def _training(self, state: OuterState) -> list[str]:
        progress = self._progress
        fresh = progress.validated_round == state.round
        return [
            f"step {count(progress.inner_step)} of {count(self._steps)}",
            "" if math.isnan(progress.loss) else f"loss {progress.loss:.4f}",
            f"validation loss {progress.validation_loss:.4f}" if fresh else "",
            "" if math.isnan(progress.gradient_norm) else f"gradient norm {progress.gradient_norm:.3g}",
            f"{count(progress.tokens_per_second)} tokens/s" if progress.tokens_per_second else "",
            f"MFU {percent(progress.device.mfu(progress.tokens_per_second))}" if progress.device.full_speed else "",
            f"{amount(progress.device.peak_bytes)} of GPU memory" if progress.device.peak_bytes else "",
        ]

    def _round(self) -> list[str]:
        before, self._sent = self._sent, self._carrier.bytes_sent()
        sent = self._sent - before
        if not sent:
            return []
        return [f"{seconds(self._progress.times.exchange)} of exchange", f"{amount(sent)} sent"]

    def _late(self, state: OuterState) -> str:
        """The sites that were still at work on this round, or an earlier one, when it was committed without them."""
        pulses = self._others().items()
        late = [node for node, it in pulses if node not in state.members and 0 < it.training_for <= state.round]
        return f"late: {', '.join(late)}" if late else ""

    def _left(self) -> str:
        self._ends.append((self._progress.inner_step, self._clock()))
        (first, began), (last, now) = self._ends[0], self._ends[-1]
        left = self._steps - last
        if last <= first or left <= 0:
            return ""
        return f"{span((now - began) / (last - first) * left)} left"
