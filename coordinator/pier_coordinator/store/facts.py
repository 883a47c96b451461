"""Facts: what happened in a run, one after the other. The page is made of them, live and when they are replayed.

A fact is a row of the database and a line of the event log. Its body has, by its kind:

    run      name, run_hash, algorithm, codec, inner_steps, stages, rounds, total_steps, sites, parameters: what the
             run is, of its configuration; the first fact of all
    site     name, address, transport, version, workers: a site has registered
    sample   inner_step, tokens, tokens_per_second, loss, utilisation, bytes_sent, memory
    round    round, digest, members, compute, waiting, exchange, retry, steps, tokens, bytes_sent, loss, validation_loss
    link     peer, round_trip, bandwidth, bytes_sent: from `node` to `peer`
    expert   plan, job, name, step, training_loss, tokens, flops, seconds, done, loss, parent_loss, standard_error,
             epochs, accepted, problem: how far a site is with an expert
    plan     plan, accepted, mode, seconds, experts: what sites train from then on, in the order in which they take it
             (number, domain, size, steps, node, planned_seconds); again when one goes to another site
    note     level, text: what the site told, a level of Python's logging
    order    epoch, activity, assignment: what the site shall do; text: in words, and by whose will
    event    level, text: what the coordinator noticed, or its operator did; `node` is "" when it is of no one site;
             state: "revoked", if the site ended so; dropped: records that it has lost in all

What the fields mean is said where they come from: protos/pier_proto/v1/coordinator.proto. Numbers not known are None.

Reads the fields of facts and pulses: they come from sites and from files, so nothing is believed about them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

LONGEST = 500
"""Characters of a text that are kept."""

MOST = 2.0**63
"""Greatest number that is believed."""


def number(body: Mapping[str, Any], key: str) -> float | None:
    """A finite number; None when there is none."""
    value: Any = body.get(key)
    if type(value) not in (float, int) or not -MOST < value < MOST:  # NaN is not between them
        return None
    return float(value)


def whole(body: Mapping[str, Any], key: str) -> int | None:
    """A number that counts something; None when there is none."""
    value = number(body, key)
    return int(value) if value is not None and value >= 0 else None


def amount(body: Mapping[str, Any], key: str) -> float:
    """A number that is never negative; 0 when it is not known."""
    return max(0.0, number(body, key) or 0.0)


def text(body: Mapping[str, Any], key: str) -> str:
    """A text, cut where it is too long, without control characters; "" when there is none."""
    value = body.get(key)
    return "".join(it if it.isprintable() else " " for it in value[:LONGEST]) if isinstance(value, str) else ""


Kind = Literal["run", "site", "sample", "round", "link", "note", "expert", "plan", "order", "event"]


@dataclass(frozen=True)
class Fact:
    """Something that happened.

    Attributes:
        number: grows with every fact of a run, without gaps; 0: not stored yet.
        time: seconds since the epoch; by the coordinator's clock, but for what sites report.
        node: the site that it is about.
    """

    time: float
    kind: Kind
    node: str
    body: dict[str, Any]
    number: int = 0

    def line(self) -> str:
        """Its line of the event log."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> Self:
        """The fact of a line. Raises ValueError."""
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("not a line of an event log")
        if fields["kind"] not in get_args(Kind) or not isinstance(fields["body"], dict):
            raise ValueError(f"a fact of no known kind: {fields['kind']!a}")
        return cls(**fields)
