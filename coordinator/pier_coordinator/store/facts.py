"""Facts: the sequence of everything that happened in a run. The page is built from them.

A fact is a row of the database and a line of the event log. The fields of its body depend on its kind:

    run      name, run_hash, algorithm, codec, inner_steps, stages, rounds, total_steps, sites, parameters: the run,
             as configured; always the first fact
    site     name, address, transport, version, workers: a site has registered
    sample   inner_step, tokens, tokens_per_second, loss, utilisation, bytes_sent, memory, device, device_memory,
             mfu, cpu, gradient_norm
    round    round, digest, members, compute, waiting, exchange, retry, steps, inner_step, tokens, bytes_sent, loss,
             validation_loss, sample
    link     peer, round_trip, bandwidth, bytes_sent: measured from `node` to `peer`
    expert   plan, job, name, step, training_loss, tokens, flops, seconds, done, loss, parent_loss, standard_error,
             epochs, accepted, problem, weights: a site's progress with an expert
    note     level, text: a message from the site; level is that of Python's logging
    order    epoch, activity, assignment: what the site shall do; text: the order in words, and who gave it
    event    level, text: what the coordinator noticed or the operator did; `node` is "" if it concerns no single site;
             state: "revoked", "silent" or "left", if the site is so from now on; dropped: number of records that the
             site has lost in total

protos/pier_proto/v1/coordinator.proto defines what the fields mean. A number that is not known is None.

The functions here that read fields of facts and pulses trust nothing: facts and pulses come from sites and files.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any, Literal, Self, get_args

LONGEST = 500
"""Number of characters of a text that are kept."""

MOST = 2.0**63
"""Numbers must be smaller than this in absolute value; others count as unknown."""


def number(body: Mapping[str, Any], key: str) -> float | None:
    """The finite number in a field; None if there is none."""
    value: Any = body.get(key)
    if type(value) not in (float, int) or not -MOST < value < MOST:  # NaN is not between them
        return None
    return float(value)


def whole(body: Mapping[str, Any], key: str) -> int | None:
    """The count (an integer, at least 0) in a field; None if there is none."""
    value = number(body, key)
    return int(value) if value is not None and value >= 0 else None


def amount(body: Mapping[str, Any], key: str) -> float:
    """The number in a field, with negative values raised to 0; 0 if it is not known."""
    return max(0.0, number(body, key) or 0.0)


def text(body: Mapping[str, Any], key: str) -> str:
    """The text in a field, cut to LONGEST characters and without control characters; "" if there is none."""
    value = body.get(key)
    return "".join(it if it.isprintable() else " " for it in value[:LONGEST]) if isinstance(value, str) else ""


ROWS = 64
"""Facts in a statement: a thread that runs one gives way to others, and on a busy machine waits long for its turn."""
LASTING = "kind IN ('run', 'site')"
"""Facts that are needed to understand later ones, in the words of their index."""

Kind = Literal["run", "site", "sample", "round", "link", "note", "expert", "order", "event"]


@dataclass(frozen=True)
class Fact:
    """Something that happened.

    Attributes:
        number: increases by 1 with every fact of a run, without gaps; 0: not stored yet.
        time: seconds since the epoch, by the coordinator's clock; by the site's clock for what sites report.
        node: the site that the fact is about.
    """

    time: float
    kind: Kind
    node: str
    body: dict[str, Any]
    number: int = 0

    def line(self) -> str:
        """The fact as a line of the event log."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> Self:
        """The fact that a line of the event log holds. Raises ValueError."""
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("not a line of an event log")
        if fields["kind"] not in get_args(Kind) or not isinstance(fields["body"], dict):
            raise ValueError(f"a fact of no known kind: {fields['kind']!a}")
        return cls(**fields)


def fact_of(row: sqlite3.Row) -> Fact:
    """Build a fact from its row."""
    return Fact(row["time"], row["kind"], row["node"], json.loads(row["body"]), row["number"])


def insert(connection: sqlite3.Connection, facts: Iterable[Fact]) -> None:
    """Insert numbered facts into their table. Raises sqlite3.Error, ValueError (a number that JSON cannot hold)."""
    dumped = ((fact, json.dumps(fact.body, separators=(",", ":"), allow_nan=False)) for fact in facts)
    rows = iter([(fact.number, fact.time, fact.kind, fact.node, body) for fact, body in dumped])
    while some := list(islice(rows, ROWS)):
        values = ", ".join(["(?, ?, ?, ?, ?)"] * len(some))
        connection.execute(f"INSERT INTO facts VALUES {values}", [*chain.from_iterable(some)])


def event(now: float, text: str, node: str = "", level: int = 20, state: str = "") -> Fact:
    """An event that concerns a site, or none; `level` is that of Python's logging."""
    return Fact(now, "event", node, {"level": level, "text": text, **({"state": state} if state else {})})


def facts_after(connection: sqlite3.Connection, number: int) -> Iterator[Fact]:
    """All facts with a greater number, in order."""
    return map(fact_of, connection.execute("SELECT * FROM facts WHERE number > ? ORDER BY number", (number,)))


def lasting_facts(connection: sqlite3.Connection, before: int) -> Iterator[Fact]:
    """The facts below a number that are needed to understand later ones: run and sites, in order."""
    rows = connection.execute(f"SELECT * FROM facts WHERE number < ? AND {LASTING} ORDER BY number", (before,))
    return map(fact_of, rows)


def last_number(connection: sqlite3.Connection) -> int:
    """Number of the newest fact that the database ever had; 0 if it never had one."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'facts'").fetchone()
    return int(row[0]) if row else 0
