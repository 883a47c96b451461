"""A site as a row of a table, for people and for --json."""

from __future__ import annotations

import math
from typing import Any

from pier.v1.peer_pb2 import Phase, Place, Pulse
from pier_coordinator.registry import Presence
from pier_coordinator.store.rows import OrderRow, SiteRow

PULSE_KEYS = (
    "phase",
    "round",
    "lag",
    "inner_step",
    "tokens",
    "tokens_per_second",
    "loss",
    "validation_loss",
    "bytes_sent",
)


def row(site: SiteRow, presence: Presence | None, order: OrderRow, newest: int) -> dict[str, Any]:
    """Who a site is, how it does, what it shall do; None where nothing is known.

    `lag` is in rounds behind `newest`, the newest round that a living site has committed; `order` is the epoch of its
    newest order, `follows` that of the one it has taken up; `place`: what it is to a pipeline, and has measured.
    """
    pulse = presence.pulse if presence else None
    return {
        "node": site.node,
        "name": site.name,
        "address": site.address,
        "slot": site.slot,
        "version": site.version,
        "transport": site.transport,
        "alive": presence is not None and presence.alive,
        "offset": presence.offset if presence else None,
        **(_pulse(pulse, newest) if pulse else dict.fromkeys(PULSE_KEYS)),
        "activity": order.activity,
        "assignment": next(iter(order.assignment)),
        "order": order.epoch,
        "follows": presence.follows if presence else 0,
        "place": _place(pulse.place) if pulse and pulse.HasField("place") else None,
    }


def _pulse(pulse: Pulse, newest: int) -> dict[str, Any]:
    values = (
        Phase.Name(pulse.phase).removeprefix("PHASE_").lower(),
        pulse.round,
        max(newest - pulse.round, 0),
        pulse.inner_step,
        pulse.tokens,
        pulse.tokens_per_second,
        _known(pulse.loss),
        _known(pulse.validation_loss),
        pulse.bytes_sent,
    )
    return dict(zip(PULSE_KEYS, values))


def _place(place: Place) -> dict[str, Any]:
    times = {key: getattr(place, key) for key in ("forward", "backward", "loss")}
    ways = {"transfer": dict(place.transfer), "round_trip": dict(place.round_trip)}
    return {"stage": place.stage, "memory": place.memory, **times, **ways}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
